"""What a head of several layers remembers while it decodes: a memory of each layer's own.

The first layer's is the head's state: its outputs are those of the whole stack, which the next
depth reads. It knows no layer and no tree policy.

Shapes: B batch, D width, H query heads, d head width, n new slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafthead.heads.blocks import masked_attention
from drafthead.heads.memory import LayerMemory

CHUNK = 512
"""New slots whose mask exists at one time."""


class StackMemory(LayerMemory):
    """See the module; with one layer it is that layer's memory and nothing else."""

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = batch, capacity, kv_heads, head_dim, width, device, dtype
        super().__init__(*shape)
        self._above = [LayerMemory(*shape) for _ in range(layers - 1)]

    @property
    def layers(self) -> list[LayerMemory]:
        """One for each layer, the first one first."""
        return [self, *self._above]

    def start(self, row: int) -> None:
        for memory in self.layers:
            memory.lengths[row] = 0

    def start_round(self, outputs: Tensor) -> None:
        """Make (B, 1, D) the stack's outputs at the roots of a new round; drops all nodes."""
        super().start_round(outputs)
        for memory in self._above:
            memory.start_round(memory.outputs)


def attend_new(memory: LayerMemory, queries: Tensor, positions: Tensor) -> Tensor:
    """Slots just committed, each over those of its row up to itself.

    queries: (B, H, n, d), positions: (B, n), right padded as they were committed; what comes out
    for padding means nothing. Returns (B, H, n, d).
    """
    width = max(memory.lengths)
    keys, values = memory.keys[:, :, :width], memory.values[:, :, :width]
    place = torch.arange(width, device=queries.device)
    parts = []
    for start in range(0, queries.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        seen = place <= positions[:, at, None]  # (B, c, S)
        parts.append(masked_attention(queries[:, :, at], keys, values, seen))
    return torch.cat(parts, dim=2)
