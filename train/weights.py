"""How much each predicted position counts: pure functions over depths, and tables by slot.

A slot is where a chain of drafts begins: its predictions at depths 0 .. K - 1 are what one round of
a decoder would draft there. Fixed weights depend on the depth alone; the others on what the head
gave at the other depths of the same slot, so they are made when all depths are there, and without a
gradient. A depth that a slot has no label for (text before an answer, or after it) is given text:
it counts as right, and carries nothing itself.

Shapes: M positions of one depth, S slots, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor

SMOOTHING = 0.5
"""The `a` of D-PACE: what even a hopeless depth lets through to those after it."""


def depth_weights(steps: int, decay: float) -> tuple[float, ...]:
    """Weight of each depth's loss, decay ** depth: 0.8 is EAGLE-3's."""
    if steps < 1 or decay <= 0:
        raise ValueError(f"depth weights need steps >= 1 and decay > 0, not {steps} and {decay}")
    return tuple(decay**depth for depth in range(steps))


def exponential_weights(steps: int, scale: float) -> tuple[float, ...]:
    """exp(−depth / scale): DFlash (arXiv 2602.06036) uses 4 for blocks of 8, and 7 for 16."""
    return depth_weights(steps, exp(-1.0 / scale))


def by_slot(slots: Sequence[Tensor], values: Sequence[Tensor], size: int, missing: float) -> Tensor:
    """Lay values (M,) of each depth out by slot: (S = size, K), `missing` where there is none."""
    table = values[0].new_full((size, len(values)), missing)
    for depth, (at, value) in enumerate(zip(slots, values, strict=True)):
        table[at, depth] = value
    return table


def dpace(chances: Tensor, known: Tensor) -> Tensor:
    """D-PACE weights (arXiv 2605.18810), (S, K) → (S, K); no gradient.

    chances: the draft's probability of each depth's label; known: bool, whether it has one.

    With s_j = (1 − a) p_j + a and P_j = s_0 ⋯ s_j, the sum of all P_j is a smooth stand-in for the
    accepted length, and a depth weighs what log s_i contributes to it: the sum of P_j over j ≥ i.
    It is divided by K, the same for all slots, so that slots keep their proportions: a sure slot's
    first depth weighs 1, as with the fixed weights, and its last 1 / K; where every depth has the
    chance p, depth i weighs (s^(i+1) + … + s^K) / K.
    """
    chances = chances.detach()
    passed = torch.where(known, (1.0 - SMOOTHING) * chances + SMOOTHING, 1.0).cumprod(dim=1)
    reached = torch.where(known, passed, 0.0)
    # Summed from the last depth on.
    return reached.flip(1).cumsum(dim=1).flip(1) / chances.shape[1]


def alive(right: Tensor, known: Tensor) -> Tensor:
    """(S, K) bool, twice → (S, K) bool: whether every earlier depth of the slot was right.

    Only what a decoder would still look at counts (GRIFFIN, arXiv 2502.11018, has the same idea
    with the head's k best choices in place of its best).
    """
    held = (right | ~known).long().cumprod(dim=1)
    return torch.cat((torch.ones_like(held[:, :1]), held[:, :-1]), dim=1).bool()
