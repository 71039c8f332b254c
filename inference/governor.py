"""Whether drafting pays here and now: a moving estimate of what drafts earn, and rests.

A round with a draft earns (tokens a row / its seconds) / (1 / seconds of a plain round): 1 is as
fast as plain decoding. Tokens are those of this drafter that were really accepted, and the
target's own; a head's probabilities promise nothing here, as a head may be sure and wrong. Seconds
are the measured `Costs`, fixed numbers, so the same history makes the same decisions whatever the
clock says. Costs are those of the batch, so a batch too large to draft for rests as a text does
that cannot be guessed.

Where the estimate is below 1, rounds go without a draft, and now and then one probes whether that
has changed; after probes that fail the rest gets longer. A round that paid is always followed by
another draft.

No text changes. Coupled and greedy decoding emit the target's own choice, whatever is drafted.
Ratio rules are exact for a draft or none, if which of the two is decided before the round draws
anything: here it depends on what earlier rounds committed, and every round draws afresh (`noise`).
To leave out a draft because of its own tokens would bias them; nothing here sees those before they
are verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafthead.inference.costs import Costs
from drafthead.inference.tree import Tree

PRIOR, TRUST = 1.1, 16
"""What drafts are taken to earn before any was seen, and how many of them that is worth."""

WINDOW = 32
"""Drafts, of any row, that the estimate goes by: earlier ones fade."""

REST, LONGEST = 8, 32
"""Rounds of the first rest, and of the longest."""


class Governor:
    """The estimate for one run of a drafter, over all rows of its batch."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.earning = PRIOR
        """Tokens per second of rounds with a draft, in terms of plain decoding."""
        self._weight = float(TRUST)
        self._left = 0
        self._rest = REST
        self._seconds = 0.0
        self._waiting: dict[int, tuple[Tree, int]] = {}
        """Rows whose draft is being verified: the draft, and how long the text was."""
        self._accepted: list[int] = []

    def start(self, row: int) -> None:
        """Another text begins in this row: its last round is not known."""
        self._waiting.pop(row, None)

    def resting(self) -> bool:
        """Whether to leave out this round's draft; ask once a round."""
        self._settle()
        if not self._left:
            return False
        self._left -= 1
        return True

    def drafted(self, trees: Mapping[int, Tree], lengths: Sequence[int], steps: int) -> None:
        """Note a round's drafts by row, empty ones too, the lengths of all rows' texts, and how
        many steps a draft went on from its first guesses.
        """
        self._waiting = {row: (tree, lengths[row]) for row, tree in trees.items()}
        nodes = max((len(tree) for tree in trees.values()), default=0)
        self._seconds = self.costs.drafting(steps) + self.costs.verify(nodes + 1)

    def observe(self, row: int, ids: Sequence[int]) -> None:
        """Take a row's text after its round. What others drafted as well is not credited."""
        if found := self._waiting.pop(row, None):
            tree, length = found
            self._accepted.append(_followed(tree, ids[length:]))

    def _settle(self) -> None:
        """Bring the last round's earning into the estimate, if it is known of any row."""
        count = len(self._accepted)
        self._waiting = {}
        if not count:
            return
        tokens = 1 + sum(self._accepted) / count
        earned = tokens * self.costs.verify(1) / self._seconds
        self._accepted = []
        self._weight = min(self._weight + count, max(WINDOW, count))
        self.earning += (earned - self.earning) * count / self._weight
        if earned >= 1:
            self._rest = REST
        elif self.earning < 1:
            self._left = self._rest
            self._rest = min(2 * self._rest, LONGEST)


def _followed(tree: Tree, tokens: Sequence[int]) -> int:
    """How many of these tokens, from the first on, lie on one branch of a tree."""
    pairs = zip(tree.parents, tree.tokens, strict=True)
    children = {pair: node for node, pair in enumerate(pairs)}
    at, depth = -1, 0
    for token in tokens:
        if (at, token) not in children:
            break
        at, depth = children[at, token], depth + 1
    return depth
