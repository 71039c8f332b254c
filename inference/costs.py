"""What a round costs, measured, and what a draft may therefore grow to; the decisions are pure.

A round takes the seconds of its draft steps and of verifying its tokens; it gives one token of the
target's own and the drafts that are accepted. A draft grows while that adds more tokens per second
than the round has so far (arXiv 2405.19715's threshold, with measured seconds). A node's value, its
draft probability along the path, stands for the chance that it is accepted.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.target import Target
from drafthead.inference.tree import chain

SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)
"""Tokens of the forwards that are timed; between them the curve is a straight line."""


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

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(self.tokens))
        rising = all(a <= b for a, b in itertools.pairwise(self.seconds))
        paired = 0 < len(self.tokens) == len(self.seconds)
        if not (paired and ascending and rising and self.seconds[0] > 0):
            raise ValueError(
                f"costs of {self.tokens} tokens, {self.seconds} s: give ascending tokens and "
                "positive seconds that do not fall"
            )

    def verify(self, tokens: int) -> float:
        """Seconds of a verifying forward of so many tokens per row, root included."""
        known, seconds = self.tokens, self.seconds
        if len(known) == 1 or tokens <= known[0]:
            return seconds[0]
        # Past the end the last piece goes on.
        right = min(bisect_left(known, tokens), len(known) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        return seconds[left] + slope * (tokens - known[left])


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


class Payoff:
    """Whether drafting pays at all: where recent drafts promised less than plain decoding gives,
    rounds go without one, and now and then one is drafted to see whether that has changed.
    """

    REST = 8
    """Rounds without a draft at a time."""
    FADE = 0.9
    """Weight of what earlier drafts promised."""

    def __init__(self) -> None:
        self._promise = 1.1  # over plain: some drafts are tried before the first rest
        self._rest = 0

    def resting(self) -> bool:
        """Whether to leave out this round's draft."""
        if not self._rest:
            return False
        self._rest -= 1
        return True

    def note(self, rate: float, plain: float) -> None:
        """Take what a draft promised and what plain decoding gives, in tokens per second."""
        self._promise = self.FADE * self._promise + (1 - self.FADE) * rate / plain
        if self._promise < 1:
            self._rest = self.REST


def measure(
    target: Target,
    head: DraftHead,
    *,
    width: int = 1,
    batch: int = 1,
    context: int = 128,
    most: int = 64,
    repeats: int = 3,
) -> Costs:
    """Time forwards of the target and steps of a bound head, once for a target and a batch.

    width: nodes of one draft step; context: committed tokens; most: nodes of the largest tree. Each
    figure is the median of `repeats`; the first run of each is not counted.
    """
    most = min(most, target.context - 2)  # behind one committed token and the root
    sizes = [size for size in SIZES if size <= most] + [most + 1]
    # A sibling may know fewer positions than its target.
    positions = min(target.context, head.positions or target.context)
    context = max(1, min(context, positions - max(most, repeats + 1) - 1))
    store = target.open(batch, context + most + 1)
    prompt = [token % target.vocab_size for token in range(3, 3 + context)]
    for row in range(batch):
        features = target.prefill(store, row, prompt, head.contract.layers).features

    def verify(size: int) -> Callable[[], object]:
        trees = [chain(prompt[:1] * (size - 1)) for _ in range(batch)]
        return lambda: target.verify(store, prompt[:1] * batch, trees, head.contract.layers)

    rising = itertools.accumulate((_timed(verify(size), repeats) for size in sizes), max)
    extend, step = _head_seconds(head, features, prompt, batch, width, repeats)
    return Costs(tuple(sizes), tuple(rising), extend, step)


def _head_seconds(
    head: DraftHead,
    features: Tensor | None,
    prompt: Sequence[int],
    batch: int,
    width: int,
    repeats: int,
) -> tuple[float, float]:
    """Seconds of `extend` by one token, and of `expand` by `width` nodes.

    A step is timed in a round of its own: some heads make a depth's logits once in a round.
    """
    runs = repeats + 1
    state = head.open(batch, len(prompt) + runs + width)
    device = head.draft_ids.device
    ids = torch.tensor([list(prompt)] * batch, device=device)
    if features is None:
        features = torch.zeros(1, len(prompt), 0, device=device)
    features = features.expand(batch, -1, -1)
    head.extend(state, features, ids, torch.full((batch,), len(prompt)))
    one = torch.ones(batch, dtype=torch.long)
    nodes, below = ids[:, :1].expand(batch, width), torch.full((batch, width), -1, device=device)
    times = []
    for _ in range(runs):
        extend = _seconds(lambda: head.extend(state, features[:, -1:], ids[:, -1:], one))
        deeper = head.max_depth != 1
        step = _seconds(lambda: head.expand(state, nodes, below)) if deeper else 0.0
        times.append((extend, step))
    extends, steps = zip(*times[1:], strict=True)  # the first is not counted
    return median(extends), median(steps)


def _timed(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    work()
    return median(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    since = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - since
