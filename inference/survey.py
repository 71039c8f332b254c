"""What a record says of a shape: how much of its draft is right at each place, and how large it is.

A place is (text, tokens of it that rounds have emitted). Narrower, shallower and smaller trees are
parts of the recorded one, and are searched as the drafter searches them; the text itself says which
nodes are right. A node that the recorded tree did not go on from has no children here, so figures
of wide trees are low rather than high.

Shapes: m * W candidates of a level, K recorded levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from drafthead.inference.record import Draft, Record, Text

Place = tuple[int, int]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Searched:
    """The part of one place's recorded tree that a search of some width finds."""

    values: list[NDArray[np.float32]]
    """By level: log values of the candidates, falling."""
    candidates: list[int]
    """How many there are up to and with each level."""
    before: list[list[int]]
    """Of the right node of each depth, as long as it was found: how many candidates go before it,
    if levels up to and with 1, 2, … are drafted."""

    def accepted(self, depth: int, nodes: int) -> int:
        """How deep the text follows the tree of the best so many nodes of so many levels."""
        return sum(row[depth - 1] < nodes for row in self.before[:depth])


class Survey:
    """A record, looked at place by place."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.searched = cache(self._searched)
        """(place, width) → what a best-first search of that width finds."""
        self.ranks = cache(self._ranks)
        """place → ranks of the right tokens among their siblings, up to one that was not found."""
        self.shares = cache(self._shares)
        """place → chance of each token of the chain, given the one before. Of sampled text it has
        the noise in it, which `stop:` chains do not look at: their forecasts are rough there."""

    def left(self, place: Place) -> int:
        """Tokens of the text that are still to be emitted."""
        text, at = place
        return len(self.record.texts[text].new) - 1 - at

    def levels(self, place: Place) -> int:
        """The deepest draft that was recorded: fewer levels near the end."""
        draft = self._draft(place)
        return 0 if draft is None else len(draft.tokens)

    @cached_property
    def places(self) -> list[Place]:
        """All places where something can be drafted."""
        return [(t, at) for t, text in enumerate(self.record.texts) for at in _drafted(text)]

    def rates(self) -> list[list[float]]:
        """By depth: how often the token of each rank is right, where all before it were; falling,
        as a better sibling is never left out.
        """
        deepest = max(map(self.levels, self.places), default=0)
        table = []
        for depth in range(deepest):
            reached, counts = 0, np.zeros(self.record.width)
            for place in self.places:
                ranks = self.ranks(place)
                if self.levels(place) > depth and len(ranks) >= depth:
                    if self.left(place) <= depth:  # the text ends there
                        continue
                    reached += 1
                    if len(ranks) > depth:
                        counts[ranks[depth]] += 1
            shares = counts / max(reached, 1)
            table.append(np.minimum.accumulate(shares).tolist())
        return table

    def _draft(self, place: Place) -> Draft | None:
        text, at = place
        drafts = self.record.texts[text].drafts
        return drafts[at] if at < len(drafts) else None

    def _right(self, place: Place) -> list[int]:
        """Candidate numbers, level by level, of the tokens that the text goes on with."""
        text, at = place
        draft = self._draft(place)
        found: list[int] = []
        if draft is None:
            return found
        going_on = self.record.texts[text].new[at + 1 :]
        for level, token in enumerate(going_on[: len(draft.tokens)]):
            below = draft.parents[level] == (found[-1] if found else -1)
            real = draft.values[level] > -np.inf
            here = np.flatnonzero(below & real & (draft.tokens[level] == token))
            if not len(here):
                break
            found.append(int(here[0]))
        return found

    def _ranks(self, place: Place) -> list[int]:
        return [number % self.record.width for number in self._right(place)]

    def _shares(self, place: Place) -> list[float]:
        draft = self._draft(place)
        if draft is None:
            return []
        chances = [float(np.exp(level[0])) for level in draft.values]
        before = [1.0, *chances]
        return [c / b if b else 0.0 for c, b in zip(chances, before, strict=False)]

    def _searched(self, place: Place, width: int) -> Searched:
        draft = self._draft(place)
        assert draft is not None
        found = _search(draft, width, self.record.width)
        right: list[int] = []
        for level, number in enumerate(self._right(place)):
            if not found[level][number]:
                break
            right.append(number)
        before = [_before(draft, found, depth, number) for depth, number in enumerate(right)]
        sizes = np.cumsum([int(level.sum()) for level in found]).tolist()
        values = [-np.sort(-v[f]) for v, f in zip(draft.values, found, strict=True)]
        return Searched(values, sizes, before)


def _drafted(text: Text) -> range:
    return range(len(text.drafts))


def _search(draft: Draft, width: int, recorded: int) -> list[Mask]:
    """Which candidates a best-first search of this width meets, by level."""
    found: list[Mask] = []
    going_on = np.array([-1])
    for parents, values in zip(draft.parents, draft.values, strict=True):
        ranks = np.arange(len(values)) % recorded
        here = np.isin(parents, going_on) & (ranks < width) & (values > -np.inf)
        found.append(here)
        order = np.argsort(-values, kind="stable")
        going_on = order[here[order]][:width]
    return found


def _before(draft: Draft, found: list[Mask], depth: int, number: int) -> list[int]:
    """How many of the candidates found go before this one, with levels up to 1, 2, … drafted."""
    value = draft.values[depth][number]
    counts = []
    for level, here in enumerate(found):
        better = draft.values[level] > value
        # Equal values keep the earlier candidate.
        equal = draft.values[level] == value
        earlier = np.arange(len(equal)) < number if level == depth else level < depth
        counts.append(int((here & (better | (equal & earlier))).sum()))
    return np.cumsum(counts).tolist()  # type: ignore[no-any-return]
