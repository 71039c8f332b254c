"""Temperatures that make a head's chances of acceptance come true: pure functions of logits.

Fitted in sequence: depth k's temperature makes the chance that the first k drafts are *all*
accepted come true, given those of the depths before it, since that product is what trees and stops
look at (arXiv 2607.05147). It knows no head.

Shapes: K depths, N positions, M rows, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 512
"""Rows of logits whose laws exist at one time."""
COARSE, FINE = 41, 21
"""Temperatures tried between 1 / 32 and 32, and then around the best of them."""


def acceptance(logits: Tensor, teacher: Tensor) -> Tensor:
    """Two (M, Vd) of logits → (M,) fp32: the sum of min(p, q), or 1 - L1 / 2 (arXiv 2211.17192)."""
    shares = [
        torch.minimum(ours.float().softmax(-1), theirs.float().softmax(-1)).sum(-1)
        for ours, theirs in zip(logits.split(ROWS), teacher.split(ROWS), strict=True)
    ]
    return torch.cat(shares) if shares else logits.new_zeros(0, dtype=torch.float32)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> Tensor:
    """(K, N) logits of the chances and (K, N) chances measured → (K,) temperatures, fp64.

    NaN where a position has no such depth. Each is the minimum of the cross-entropy of the product
    of the chances so far; 1 where no position is left.
    """
    K, N = logits.shape
    logits, accepted = logits.double(), accepted.double()
    temperatures = torch.ones(K, dtype=torch.float64)
    foretold, truth = (torch.ones(N, dtype=torch.float64, device=logits.device) for _ in range(2))
    for depth in range(K):
        truth = truth * accepted[depth]
        known = truth.isfinite() & (foretold * logits[depth]).isfinite()
        if not known.any():
            break
        at = logits[depth, known], foretold[known], truth[known]
        best = _best_of(torch.logspace(-5, 5, COARSE, 2.0, dtype=torch.float64), *at)
        around = best * torch.logspace(-0.25, 0.25, FINE, 2.0, dtype=torch.float64)
        temperatures[depth] = _best_of(around, *at)
        foretold = foretold * (logits[depth] / temperatures[depth]).sigmoid()
        foretold = foretold.masked_fill(~known, torch.nan)
    return temperatures


def _best_of(candidates: Tensor, logits: Tensor, before: Tensor, truth: Tensor) -> Tensor:
    """The candidate temperature, 0-dim, whose product of chances has the least cross-entropy."""
    losses = [
        F.binary_cross_entropy((before * (logits / float(t)).sigmoid()).clamp(0, 1), truth)
        for t in candidates
    ]
    return candidates[torch.stack(losses).argmin().cpu()]
