"""How tokens are drawn: warps, rule and keyed noise, the same for plain and drafted decoding.

It applies the rules of `verify` to the rows a verify pass gives, and tells drafters how to rank
their candidates. It knows neither model nor head.

Shapes: B rows of a batch, n rows of a verify pass, m draft nodes, V vocabulary, Vd draft
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.inference.history import History
from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.tree import Tree
from drafthead.inference.verify import RULES, block, choose, drawn, reject, typical, walk
from drafthead.inference.warps import UnsupportedSamplingError, Warps

AT_ONCE = 2**16
"""Up to so many logits, one pass over all of them is quicker than one over each node reached."""

LEAST = 1e-30
"""Draft probabilities below this one count as 0, so that what is left of a law never underflows."""

Verdict = tuple[list[int], int]
"""The drafted nodes that are kept, and the token that the target adds."""


class NotFiniteError(FloatingPointError):
    """The target's logits behind these nodes, none meaning the root, are not finite."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__(
            "the target's logits are not finite at a committed token: "
            "load it in bfloat16 or float32"
        )
        self.path = list(path)


class Sampler:
    """Rule, warps and the noise of each row; greedy where `noise` is None.

    `position` is always the index of the token being decided, counting the row's real tokens.
    """

    def __init__(
        self,
        warps: Warps | None = None,
        noise: Sequence[Noise] | None = None,
        rule: str = "coupled",
        lossy: bool = False,
    ) -> None:
        """`rule`: of `verify.RULES`; one that is not exact needs `lossy` as well."""
        if rule not in RULES:
            raise UnsupportedSamplingError(f"rule {rule!r}: choose one of {', '.join(RULES)}")
        if not (RULES[rule].exact or lossy):
            exact = ", ".join(name for name, other in RULES.items() if other.exact)
            raise UnsupportedSamplingError(
                f"rule {rule!r} changes the target's distribution: allow it with lossy=True, or "
                f"choose one of {exact}"
            )
        self.warps = warps or Warps()
        self.noise = None if noise is None else list(noise)
        self.rule = rule

    @property
    def greedy(self) -> bool:
        return self.noise is None

    @property
    def needs_proposals(self) -> bool:
        """Whether drafts must be draws, and carry the law they were drawn from (ratio rules)."""
        return RULES[self.rule].needs_proposals and not self.greedy

    @property
    def _plain(self) -> bool:
        """Whether the target's choice is the argmax of its logits as they are."""
        return self.greedy and RULES[self.rule].exact and not self.warps

    def decide(
        self, histories: Mapping[int, History], trees: Sequence[Tree], logits: Tensor
    ) -> dict[int, Verdict]:
        """Accept for these rows of a verify pass's logits (B, n, V); see `accept`.

        Raises NotFiniteError, before anything is decided for any row, where a root's logits are not
        finite.
        """
        if self._plain and (logits.device.type != "cpu" or logits.numel() <= AT_ONCE):
            best = logits.max(-1)
            tops, choices = best.values.tolist(), best.indices.tolist()
            return {row: _walk_settled(trees[row], tops[row], choices[row]) for row in histories}
        return {
            row: self.accept(row, trees[row], logits[row], history)
            for row, history in histories.items()
        }

    def accept(self, row: int, tree: Tree, logits: Tensor, history: History) -> Verdict:
        """Nodes kept and the token added, from a row's verify logits (n, V).

        `history` ends with the root.
        """
        try:
            return self._accepted(row, tree, logits, history)
        except NotFiniteError as error:
            known = len(error.path)
            if RULES[self.rule].chains_only and known < len(tree):
                # Block verification looks at all laws at once: it may have those before this one.
                return self.accept(row, tree.only(range(known)), logits, history)
            return _retreat(tree, error)

    def _accepted(self, row: int, tree: Tree, logits: Tensor, history: History) -> Verdict:
        noise, position = None if self.noise is None else self.noise[row], len(history)

        def scores_after(path: Sequence[int]) -> Tensor:
            """(V,) the target's warped logits after the nodes of a path; none of them: the root."""
            at = logits[path[-1] + 1 if path else 0]
            _check_finite(float(at.amax()), path)  # NaN spreads through a maximum
            scores = self.warps(at[None], history, [tree.tokens[node] for node in path])[0]
            if noise is not None and self.warps.looks_back:  # no other processor removes all
                _check_left(float(scores.amax()))
            return scores

        def law_after(path: Sequence[int]) -> Tensor:
            return scores_after(path).softmax(-1)

        def choice_after(path: Sequence[int]) -> int:
            if self._plain:
                top, token = logits[path[-1] + 1 if path else 0].max(-1)
                _check_finite(float(top), path)
                return int(token)
            return choose(
                scores_after(path), None if noise is None else noise.gumbel(position + len(path))
            )

        if not RULES[self.rule].exact:
            return typical(tree, law_after, choice_after)
        if noise is None or not self.needs_proposals:
            return walk(tree.tokens, tree.parents, choice_after)
        if RULES[self.rule].chains_only and not tree.is_chain:
            raise UnsupportedSamplingError(
                f"rule {self.rule!r} verifies chains only: use a chain, or rule='rejection'"
            )
        rule = block if self.rule == "block" else reject
        return rule(tree, law_after, _Keyed(noise, position))

    def draft_scores(
        self, row: int, logits: Tensor, draft_ids: Tensor, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Rank candidates for one position: scores (m, Vd), and the laws q (m, Vd) if needed.

        Scores are log q up to a constant (greedy, typical), plus the noise that the target will use
        (coupled), or plus noise of the draft's own stream (ratio rules): then the n best-scored
        candidates, in that order, are n draws from q without replacement (arXiv 1903.06059). Nodes
        of one position share their noise: a ratio rule goes down one branch only, so the others'
        draws never meet it. A score of -inf is no candidate.
        """
        if self.noise is None or not RULES[self.rule].exact:
            return logits.float(), None
        if not self.needs_proposals:
            scores = self.warps.history_free(logits)
            return scores + self.noise[row].gumbel(position)[draft_ids], None
        # A head whose logits are not finite has no law to draw from.
        logits = logits.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)
        scores = self.warps.history_free(logits)
        law = scores.softmax(-1)
        rare = law < LEAST
        noise = self.noise[row].gumbel(position, Purpose.DRAFT)[draft_ids]
        return (scores + noise).masked_fill(rare, -torch.inf), law.masked_fill(rare, 0)

    def forget(self, row: int, position: int) -> None:
        """Everything before this position is decided: a fresh round begins there."""
        if self.noise is not None:
            self.noise[row].forget(position)


@dataclass(frozen=True)
class _Keyed:
    """The chance of a round whose first token is at `position`, from the row's keyed noise."""

    noise: Noise
    position: int

    def accept(self, probability: float, depth: int, sibling: int = 0) -> bool:
        # Strictly below: an impossible token is never kept, a sure one always.
        return self.noise.uniform(self.position + depth, Purpose.ACCEPT, sibling) < probability

    def draw(self, law: Tensor, depth: int) -> int:
        return drawn(law, self.noise.uniform(self.position + depth, Purpose.RECOVER))


def _walk_settled(tree: Tree, tops: Sequence[float], choices: Sequence[int]) -> Verdict:
    """Greedy verification where the best logit and its token (n,) are known for every node."""

    def choice_after(path: Sequence[int]) -> int:
        at = path[-1] + 1 if path else 0
        _check_finite(tops[at], path)
        return choices[at]

    try:
        return walk(tree.tokens, tree.parents, choice_after)
    except NotFiniteError as error:
        return _retreat(tree, error)


def _check_finite(top: float, path: Sequence[int]) -> None:
    """Not finite is an error, never token 0."""
    if not math.isfinite(top):
        raise NotFiniteError(path)


def _check_left(top: float) -> None:
    """Nothing to draw is an error, as in `generate`; greedily the first token is emitted there."""
    if top == -math.inf:
        raise UnsupportedSamplingError(
            "the logits processors leave no token to draw: allow one, or decode greedily"
        )


def _retreat(tree: Tree, error: NotFiniteError) -> Verdict:
    """The same tokens with the last kept node as the token added, so that it is the next root.

    A node that was kept and whose own logits are not finite says nothing about what follows; run
    alone it may (an overflow in a batch), and if not, that is an error then. Raises it at a root.
    """
    if not error.path:
        raise error
    return error.path[:-1], tree.tokens[error.path[-1]]
