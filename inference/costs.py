"""What a round costs, measured, and what a draft may therefore grow to; the decisions are pure.

A round takes the seconds of its draft steps and of verifying its tokens; it gives one token of the
target's own and the drafts that are accepted. A draft grows while that adds more tokens per second
than the round has so far (arXiv 2405.19715's threshold, with measured seconds). A node's value, its
draft probability along the path, stands for the chance that it is accepted.

Shapes: B rows, m candidates of one level.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.target import Target
from drafthead.inference.tree import chain

SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)
"""Tokens of the forwards that are timed; between them the curve is a straight line."""

Clock = Callable[[], float]
"""Seconds since some moment: of the wall, or of this process."""

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round, all rows of the batch together."""

    tokens: tuple[int, ...]
    """Tokens per row of the forwards that were timed, ascending."""
    seconds: tuple[float, ...]
    """What each took; never less than a shorter one."""
    extend: float
    """A head's step over what was committed, which the first guesses come from."""
    step: float
    """A head's step from one level of a draft to the next."""
    widths: tuple[int, ...] = ()
    """Nodes of the draft steps that were timed, ascending, where there were several sizes."""
    steps: tuple[float, ...] = ()
    """What each took; never less than a narrower one."""

    def __post_init__(self) -> None:
        curves = [("tokens", self.tokens, self.seconds)]
        if self.widths or self.steps:
            curves.append(("widths", self.widths, self.steps))
        for name, sizes, seconds in curves:
            ascending = all(a < b for a, b in itertools.pairwise(sizes))
            rising = all(a <= b for a, b in itertools.pairwise(seconds))
            paired = 0 < len(sizes) == len(seconds)
            if not (paired and ascending and rising and seconds[0] >= 0 < self.seconds[0]):
                raise ValueError(
                    f"costs of {sizes} {name}, {seconds} s: give ascending {name} and "
                    "positive seconds that do not fall"
                )

    def verify(self, tokens: int) -> float:
        """Seconds of a verifying forward of so many tokens per row, root included."""
        return _between(self.tokens, self.seconds, tokens)

    def going_on(self, width: int) -> float:
        """Seconds of a draft step from so many nodes per row."""
        return _between(self.widths, self.steps, width) if self.widths else self.step

    def drafting(self, steps: int) -> float:
        """Seconds of a draft that goes on so many times from its first guesses."""
        return self.extend + steps * self.step


def _between(known: Sequence[int], seconds: Sequence[float], size: int) -> float:
    """On the straight line between measured points; past the end the last piece goes on."""
    if len(known) == 1 or size <= known[0]:
        return seconds[0]
    right = min(bisect_left(known, size), len(known) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
    return seconds[left] + slope * (size - known[left])


def worth_verifying(values: Sequence[float], rows: int, spent: float, costs: Costs) -> int:
    """How many of these candidates to verify, the first so many, for the most tokens per second.

    values: of one row's candidates, falling, or the sums of all rows' by rank; rows: tokens that
    come anyway, one a row; spent: seconds of drafting so far, which are paid whatever is verified.
    """
    tokens = float(rows)
    best, count = tokens / (spent + costs.verify(1)), 0
    for k, value in enumerate(values, start=1):
        tokens += value
        rate = tokens / (spent + costs.verify(k + 1))
        if rate > best:
            best, count = rate, k
    return count


def worth_growing(gain: float, tokens: float, seconds: float, step: float) -> bool:
    """Whether another level, of `step` seconds, beats the round's average so far."""
    return gain * seconds > tokens * step


class Growth:
    """How far the best-first trees of a batch are worth growing, level by level.

    Every level is the log values (B, m) of its candidates; -inf is no candidate.
    """

    def __init__(self, width: int, nodes: int, rows: int, costs: Costs) -> None:
        """width: nodes a level goes on from; nodes: most of a tree; rows: those that draft."""
        self.width, self.nodes, self.rows, self.costs = width, nodes, rows, costs

    def goes_on(self, found: Sequence[Tensor]) -> bool:
        """Whether another level pays; what it gives is guessed from the share the last caught."""
        count, tokens, spent = self.verified(found)
        *above, last = found
        before = self._mass(above[-1]) if above else float(self.rows)
        caught = float(last.exp().sum()) / before if before else 0.0
        seconds = spent + self.costs.verify(count + 1)
        return worth_growing(self._mass(last) * caught, tokens, seconds, self.costs.step)

    def verified(self, found: Sequence[Tensor]) -> tuple[int, float, float]:
        """Nodes a row worth verifying so far, tokens expected of all rows, seconds of drafting."""
        chances = torch.cat(list(found), dim=1).exp()
        by_rank = chances.sort(dim=1, descending=True).values.sum(dim=0)[: self.nodes].tolist()
        spent = self.costs.drafting(len(found) - 1)
        count = worth_verifying(by_rank, self.rows, spent, self.costs)
        return count, self.rows + sum(by_rank[:count]), spent

    def _mass(self, level: Tensor) -> float:
        """The draft probability that the nodes to go on from hold, over all rows."""
        best = level.topk(min(self.width, level.shape[1]), dim=-1).values
        return float(best.exp().sum())


def measure(
    target: Target,
    head: DraftHead,
    *,
    width: int = 1,
    widths: Sequence[int] = (),
    batch: int = 1,
    context: int = 128,
    most: int = 64,
    repeats: int = 3,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Time forwards of the target and steps of a bound head, once for a target and a batch.

    width: nodes of one draft step; widths: others to be timed as well; context: committed tokens;
    most: nodes of the largest tree. Each figure is the median of `repeats`, of which each goes over
    all sizes, so that a machine that slows down slows all; the first run of each is not counted.
    """
    most = min(most, target.context - 2)  # behind one committed token and the root
    sizes = [size for size in SIZES if size <= most] + [most + 1]
    asked = sorted({width, *widths})
    # A sibling may know fewer positions than its target.
    positions = min(target.context, head.positions or target.context)
    context = max(1, min(context, positions - max(most, (repeats + 1) * len(asked)) - 1))
    store = target.open(batch, context + most + 1)
    prompt = [token % target.vocab_size for token in range(3, 3 + context)]
    for row in range(batch):
        features = target.prefill(store, row, prompt, head.contract.layers).features

    def verify(size: int) -> Callable[[], object]:
        trees = [chain(prompt[:1] * (size - 1)) for _ in range(batch)]
        return lambda: target.verify(store, prompt[:1] * batch, trees, head.contract.layers)

    seconds = _timed([verify(size) for size in sizes], repeats, clock)
    extend, steps = _head_seconds(head, features, prompt, batch, asked, repeats, clock)
    return Costs(
        tuple(sizes),
        tuple(itertools.accumulate(seconds, max)),
        extend,
        steps[asked.index(width)],
        *((tuple(asked), tuple(itertools.accumulate(steps, max))) if widths else ()),
    )


def _head_seconds(
    head: DraftHead,
    features: Tensor | None,
    prompt: Sequence[int],
    batch: int,
    widths: Sequence[int],
    repeats: int,
    clock: Clock,
) -> tuple[float, list[float]]:
    """Seconds of `extend` by one token, and of `expand` by each number of nodes.

    A step is timed in a round of its own: some heads make a depth's logits once in a round.
    """
    runs = (repeats + 1) * len(widths)
    state = head.open(batch, len(prompt) + runs + max(widths))
    device = head.draft_ids.device
    ids = torch.tensor([list(prompt)] * batch, device=device)
    if features is None:
        features = torch.zeros(1, len(prompt), 0, device=device)
    features = features.expand(batch, -1, -1)
    head.extend(state, features, ids, torch.full((batch,), len(prompt)))
    one = torch.ones(batch, dtype=torch.long)
    extends: list[float] = []
    steps: list[list[float]] = [[] for _ in widths]
    for _ in range(repeats + 1):
        for width, taken in zip(widths, steps, strict=True):
            nodes = ids[:, :1].expand(batch, width)
            below = torch.full((batch, width), -1, device=device)
            extends.append(
                _seconds(lambda: head.extend(state, features[:, -1:], ids[:, -1:], one), clock)
            )
            deeper = head.max_depth != 1
            step = partial(head.expand, state, nodes, below)
            taken.append(_seconds(step, clock) if deeper else 0.0)
    # The first of each is not counted.
    return median(extends[len(widths) :]), [median(taken[1:]) for taken in steps]


def _timed(works: Sequence[Callable[[], object]], repeats: int, clock: Clock) -> list[float]:
    """Median seconds of each call, after one that is not counted."""
    for work in works:
        work()
    taken = [[_seconds(work, clock) for work in works] for _ in range(repeats)]
    return [median(times) for times in zip(*taken, strict=True)]


def _seconds(work: Callable[[], object], clock: Clock) -> float:
    since = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - since
