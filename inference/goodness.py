"""Goodness of fit of counts to a known law, and how small a departure the test would have seen.

Pearson's chi-square with pooled cells; pure, and it knows no sampler. Shapes: C cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0
"""Cells that expect fewer are pooled: below it the statistic has no chi-square law."""
POWER = 0.9
"""The chance with which a shift counts as one that would have been seen."""


def pooled(observed: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) counts and what was expected, with the cells of small expectation taken together."""
    small = expected < LEAST_EXPECTED
    if not small.any():
        return observed, expected
    rest = [torch.cat([x[~small], x[small].sum()[None]]) for x in (observed, expected)]
    if rest[1][-1] >= LEAST_EXPECTED or len(rest[1]) < 2:
        return rest[0], rest[1]
    # The pool itself is too small: it joins the smallest cell that is not.
    order = rest[1].argsort()
    joined = [torch.cat([x[order[2:]], x[order[:2]].sum()[None]]) for x in rest]
    return joined[0], joined[1]


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Of (C,) float64 counts against expected counts of the same sum; 1 where one cell is left."""
    counts, means = pooled(observed.double(), expected.double())
    freedom = len(means) - 1
    if freedom < 1:
        return 1.0
    return _tail(freedom, float(((counts - means).square() / means).sum()))


def _tail(freedom: float, statistic: float) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float) -> float:
    """The statistic that is exceeded with probability alpha under the law itself."""
    high = 1.0
    while _tail(freedom, high) > alpha:
        high *= 2
    return _bisected(lambda x: _tail(freedom, x) < alpha, high)


def power(freedom: int, alpha: float, noncentrality: float) -> float:
    """P(rejection) where the counts are of another law: noncentrality = N Σ (p' - p)² / p.

    A noncentral chi-square is a Poisson mixture of central ones.
    """
    mean = noncentrality / 2
    most = int(mean + 12 * math.sqrt(mean) + 30)
    steps = torch.arange(most + 1, dtype=torch.float64)
    logs = torch.special.xlogy(steps, torch.tensor(mean)) - mean - torch.lgamma(steps + 1)
    limit = torch.full_like(steps, critical(freedom, alpha) / 2)
    return float((logs.exp() * torch.special.gammaincc(freedom / 2 + steps, limit)).sum())


def least_shift(expected: Tensor, alpha: float) -> float:
    """Every law at least this far away, in total variation, would have been refused with `POWER`.

    expected: (C,) counts; the distance is one of pooled cells. By Cauchy's inequality the
    noncentrality of a law at distance d is 4 N d² at least. 1 where nothing could have been seen.
    """
    _, means = pooled(expected, expected)
    freedom = len(means) - 1
    if freedom < 1:
        return 1.0
    high = 1.0
    while power(freedom, alpha, high) < POWER:
        high *= 2
    needed = _bisected(lambda x: power(freedom, alpha, x) >= POWER, high)
    return min(1.0, math.sqrt(needed / float(means.sum())) / 2)


def _bisected(reached: Callable[[float], bool], high: float) -> float:
    """The least number up to `high` at which a rising condition holds."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
