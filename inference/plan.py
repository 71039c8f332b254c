"""Which shapes to draft in: what each comes to, by a record of drafts and the measured costs; pure.

Rounds are walked along the recorded texts as decoding would: the draft of the place, the tokens of
it that the text goes on with, the next place. So the tokens of a round are what decoding gives, and
the rate is tokens / (seconds of draft steps and verifying). Static trees are made of the nodes that
are right most often, by rank and depth (Sequoia's independence, arXiv 2402.12374).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from drafthead.inference.costs import Costs, Growth
from drafthead.inference.survey import Place, Survey
from drafthead.inference.tree import OFF, Shape, Static, TreeShape

CHANCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Of the `stop:` chains that are tried."""
WIDTHS = (2, 3, 4, 6, 8)
NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


@dataclass(frozen=True)
class Forecast:
    """What a shape comes to on the record."""

    shape: TreeShape
    tokens: int
    rounds: int
    """Rounds of a row: one forward of four rows is four."""
    seconds: float

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Drafted = tuple[float, int, list[int]]
"""Of a round: seconds of drafting, nodes of the largest tree, and tokens accepted by row."""
Drafting = Callable[[Sequence[Place]], Drafted]


def forecast(survey: Survey, shape: TreeShape, costs: Costs, batch: int = 1) -> Forecast:
    """Decode the record in this shape, `batch` texts at a time; ValueError if it has no text.

    The last batch is filled up with the first texts again.
    """
    count = len(survey.record.texts)
    if not any(survey.left((text, 0)) > 0 for text in range(count)):
        raise ValueError("nothing was recorded: give prompts with answers of two tokens or more")
    draft = _drafting(survey, shape, costs)
    tokens, rounds, seconds = 0, 0, 0.0
    for first in range(0, count, batch):
        texts = [(first + slot) % count for slot in range(batch)]
        rows: dict[int, Place] = {slot: (text, 0) for slot, text in enumerate(texts)}
        rows = {slot: place for slot, place in rows.items() if survey.left(place) > 0}
        while rows:
            spent, nodes, accepted = draft(list(rows.values()))
            seconds += spent + costs.verify(nodes + 1)
            rounds += len(rows)
            for (slot, place), kept in zip(list(rows.items()), accepted, strict=True):
                emitted = min(kept + 1, survey.left(place))
                tokens += emitted
                rows[slot] = (place[0], place[1] + emitted)
                if not survey.left(rows[slot]):
                    del rows[slot]
    return Forecast(shape, tokens, rounds, seconds)


def shapes(survey: Survey, most: int = 64) -> list[TreeShape]:
    """The shapes worth a forecast, of at most so many nodes, within the recorded tree."""
    deepest = max(map(survey.levels, survey.places), default=0)
    widths = [width for width in WIDTHS if width <= survey.record.width]
    found: list[TreeShape] = [OFF]
    depths = range(1, min(deepest, most) + 1)
    found += [Shape(depth, 1, depth) for depth in depths]
    if deepest:
        found += [Shape(depths[-1], 1, depths[-1], stop=chance) for chance in CHANCES]
    for depth, width, nodes in product(depths, widths, NODES):
        # With fewer nodes than a level has candidates, or more than all have, others are the same.
        if max(depth, 2) <= nodes <= min(most, width + (depth - 1) * width * width):
            found.append(Shape(depth, width, nodes))
    for depth, width in product(sorted({min(d, deepest) for d in (4, 6, 8)}), (2, 4, 8)):
        nodes = min(most, depth * width)
        if 0 < depth <= nodes and width in widths:
            found.append(Shape(depth, width, nodes, by_cost=True))
    rates = survey.rates()
    found += [best_static(rates, nodes) for nodes in NODES if rates and nodes <= most]
    return list(dict.fromkeys(found))


def best_static(rates: Sequence[Sequence[float]], nodes: int) -> Static:
    """The static tree of at most so many nodes that accepts most, if ranks fall out independently.

    rates: by depth, the chance of each rank, falling. A node's value is the product along its path,
    so no value exceeds its parent's or a better sibling's, and the best ones are a tree.
    """
    ready: list[tuple[float, tuple[int, ...]]] = []
    if rates and rates[0]:
        ready.append((-rates[0][0], (0,)))
    paths: list[tuple[int, ...]] = []
    while ready and len(paths) < nodes:
        value, path = heapq.heappop(ready)
        if value == 0:
            break
        paths.append(path)
        *_, rank = path
        depth = len(path) - 1
        above = value / rates[depth][rank]
        if rank + 1 < len(rates[depth]):
            heapq.heappush(ready, (above * rates[depth][rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(rates) and rates[depth + 1]:
            heapq.heappush(ready, (value * rates[depth + 1][0], (*path, 0)))
    return Static(tuple(paths))


def priced(costs: Costs, shape: TreeShape) -> Costs:
    """The costs with the draft step of this shape: that of its width, or a static tree's mean."""
    if isinstance(shape, Static):
        inner = [len(level) for level in shape.inner[1:]]
        step = sum(map(costs.going_on, inner)) / len(inner) if inner else 0.0
    else:
        step = costs.going_on(shape.width)
    return replace(costs, step=step)


def _drafting(survey: Survey, shape: TreeShape, costs: Costs) -> Drafting:
    costs = priced(costs, shape)
    if isinstance(shape, Static):
        within = _static(survey, shape, costs)
    elif shape.stop is not None:
        within = _stopping(survey, shape.depth, shape.stop, costs)
    elif shape.is_chain:
        within = _static(survey, Static.chain(shape.depth), costs)
    else:
        within = (_by_cost if shape.by_cost else _best_first)(survey, shape, costs)

    def draft(places: Sequence[Place]) -> Drafted:
        """Where no row can use a draft, none is asked for."""
        if not shape.nodes or not any(map(survey.levels, places)):
            return 0.0, 0, [0] * len(places)
        return within(places)

    return draft


def _static(survey: Survey, shape: Static, costs: Costs) -> Drafting:
    known = set(shape.paths)
    sizes = [sum(len(path) <= depth for path in shape.paths) for depth in range(shape.depth + 1)]
    steps = [costs.going_on(len(level)) for level in shape.inner[1:]]

    def draft(places: Sequence[Place]) -> Drafted:
        depths = [min(shape.depth, survey.levels(place)) for place in places]
        accepted = []
        for place, depth in zip(places, depths, strict=True):
            ranks = tuple(survey.ranks(place)[:depth])
            kept = 0
            while kept < len(ranks) and ranks[: kept + 1] in known:
                kept += 1
            accepted.append(kept)
        deepest = max(depths)
        return costs.extend + sum(steps[: deepest - 1]), sizes[deepest], accepted

    return draft


def _stopping(survey: Survey, depth: int, least: float, costs: Costs) -> Drafting:
    tells = survey.record.tells

    def one(place: Place) -> tuple[int, int]:
        """How long the chain is, and how many steps it took."""
        most = min(depth, survey.levels(place))
        chance = 1.0
        for level, share in enumerate(survey.shares(place)[:most]):
            chance *= share
            if chance < least:
                # Told beforehand, the token is not drawn; its own probability comes with it.
                return (level, level) if tells else (level + 1, level)
        return most, max(0, most - 1)

    def draft(places: Sequence[Place]) -> Drafted:
        drawn = [one(place) for place in places]
        accepted = []
        for place, (length, _) in zip(places, drawn, strict=True):
            ranks = survey.ranks(place)[:length]
            accepted.append(next((k for k, rank in enumerate(ranks) if rank), len(ranks)))
        return costs.drafting(max(s for _, s in drawn)), max(n for n, _ in drawn), accepted

    return draft


def _best_first(survey: Survey, shape: Shape, costs: Costs) -> Drafting:
    def draft(places: Sequence[Place]) -> Drafted:
        depths = [min(shape.depth, survey.levels(place)) for place in places]
        accepted, nodes = [], 0
        for place, depth in zip(places, depths, strict=True):
            if not depth:
                accepted.append(0)
                continue
            found = survey.searched(place, shape.width)
            accepted.append(found.accepted(depth, shape.nodes))
            nodes = max(nodes, min(shape.nodes, found.candidates[depth - 1]))
        return costs.drafting(max(depths) - 1), nodes, accepted

    return draft


def _by_cost(survey: Survey, shape: Shape, costs: Costs) -> Drafting:
    def draft(places: Sequence[Place]) -> Drafted:
        depths = [min(shape.depth, survey.levels(place)) for place in places]
        rows = [survey.searched(p, shape.width) if d else None
                for p, d in zip(places, depths, strict=True)]  # fmt: skip
        growth = Growth(shape.width, shape.nodes, sum(d > 0 for d in depths), costs)
        found: list[torch.Tensor] = []
        for level in range(max(depths)):
            here = torch.full((len(rows), shape.width**2 if level else shape.width), -torch.inf)
            for line, row, depth in zip(here, rows, depths, strict=True):
                if row is not None and depth > level:
                    values = torch.from_numpy(row.values[level])
                    line[: len(values)] = values
            found.append(here)
            if level + 1 == max(depths) or not growth.goes_on(found):
                break
        count, _, spent = growth.verified(found)
        accepted = [
            row.accepted(min(depth, len(found)), count) if row is not None else 0
            for row, depth in zip(rows, depths, strict=True)
        ]
        return spent, count, accepted

    return draft
