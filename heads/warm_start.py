"""A closed-form start for EAGLE-3's tensors: ridge regression towards the target's next state.

The target's last state at t + 1, from which it predicts token t + 2, is regressed on what slot t
holds: the captured states at t and the embedding of token t + 1. The states' part of the map is
written into `fc`. The embedding's part has to go through attention: queries and keys share one
random projection of the embedding, so that a slot looks at itself, and values and output hold the
map's best approximation of the rank that the value heads allow. No tensor is added, and everything
is trained on afterwards.

Shapes: n positions, L captured layers, D width, Hkv key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.heads.base import TeacherBatch
from drafthead.heads.blocks import Attention

RIDGE = 0.005
"""Penalty on the map, as a share of the inputs' mean variance."""
SHARPNESS = 2.0
"""Length of a query's projection row: how much more a slot looks at itself than at others."""
MODESTY = 0.6
"""Scale of the first logits over the target's: a regression is surer than it should be."""


class Moments:
    """Second moments of inputs and outputs, summed over batches."""

    square: Tensor
    """(P, P) sum of inputs' outer products."""
    cross: Tensor
    """(P, D) sum of inputs times outputs."""

    def __init__(self) -> None:
        self.n = 0
        self.rms = 0.0

    @classmethod
    def of(
        cls, batches: Iterable[TeacherBatch], embedding: Tensor, parts: int, eps: float
    ) -> Moments:
        """Those of all slots that have a label: inputs are states and token, outputs next states.

        parts: into how many the states are cut to be normed, 0 = they are taken as they are.
        """
        moments = cls()
        for batch in batches:
            rows, slots = batch.mask[:, 2:].nonzero(as_tuple=True)
            states = batch.features[rows, slots].float()
            if parts:
                states = torch.cat([normed(part, eps) for part in states.chunk(parts, -1)], -1)
            token = normed(F.embedding(batch.ids[rows, slots + 1], embedding), eps)
            moments.add(torch.cat([states, token], -1), batch.last_hidden[rows, slots + 1])
        if not moments.n:
            raise ValueError("head.warm_start: no supervised position in its batches")
        return moments

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take in (n, P) inputs and (n, D) outputs."""
        inputs, outputs = inputs.float(), outputs.float()
        square, cross = inputs.T @ inputs, inputs.T @ outputs
        self.square = square if self.n == 0 else self.square + square
        self.cross = cross if self.n == 0 else self.cross + cross
        self.n += len(inputs)
        self.rms += float(outputs.square().mean(-1).sqrt().sum())

    def solve(self) -> Tensor:
        """(P, D) map of least penalised error."""
        square = self.square.double()
        penalty = RIDGE * square.diagonal().mean() * torch.eye(len(square)).to(square)
        solution: Tensor = torch.linalg.solve(square + penalty, self.cross.double())
        return solution

    @torch.no_grad()
    def write(self, fc: nn.Linear, attention: Attention, heads: int, kv_heads: int) -> None:
        """Put the map into `fc` and the attention's embedding half; its hidden half starts at 0."""
        width = fc.out_features
        head_dim = attention.k_proj.out_features // kv_heads
        groups = heads // kv_heads
        fused, carried = self.solve().split([fc.in_features, width])
        values, back = low_rank(
            carried, self.square[-width:, -width:].double(), kv_heads * head_dim
        )
        look = self_looking(kv_heads, head_dim, width)  # (Hkv, d, D)
        fc.weight.copy_(fused.T)
        for linear, weight in (
            (attention.q_proj, look.repeat_interleave(groups, 0).flatten(0, 1)),
            (attention.k_proj, look.flatten(0, 1)),
            (attention.v_proj, values.T),
        ):
            linear.weight.zero_()
            linear.weight[:, :width].copy_(weight)
        # The query heads of one value head share its part of the map.
        shared = back.T.unflatten(1, (kv_heads, head_dim)) / groups
        attention.o_proj.weight.copy_(shared.repeat_interleave(groups, 1).flatten(1))


def low_rank(weights: Tensor, square: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a map (P, D) into (P, rank) and (rank, D) with the least error on its inputs.

    square: their second moments (P, P); in that metric the truncated SVD is the best there is.
    """
    variance, axes = torch.linalg.eigh(square)
    scale = variance.clamp_min(1e-6 * variance.max()).sqrt()
    metric, inverse = (axes * scale) @ axes.T, (axes / scale) @ axes.T
    left, strength, right = torch.linalg.svd(metric @ weights, full_matrices=False)
    root = strength[:rank].sqrt()
    spare = rank - len(root)  # more value columns than the map has ranks
    first, second = inverse @ left[:, :rank] * root, root[:, None] * right[:rank]
    return F.pad(first, (0, spare)), F.pad(second, (0, 0, 0, spare))


def self_looking(heads: int, head_dim: int, width: int) -> Tensor:
    """(Hkv, d, D) one random projection per key/value head, for queries and keys alike."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.linalg.qr(torch.randn(width, head_dim, generator=generator))[0].T * SHARPNESS
        for _ in range(heads)
    ]
    look = torch.stack(parts)
    return F.pad(look, (0, 0, 0, head_dim - look.shape[1]))  # a head may be wider than the stream


def normed(x: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension, without a weight, in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps)
