"""Goodness of fit for counts of draws."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square of (cells,) counts against expected counts; cells below 5 expected are pooled."""
    small = expected < 5
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    statistic = ((observed - expected).square() / expected).sum().double()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
