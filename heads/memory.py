"""What a one-layer head remembers while it decodes: keys, values, and the draft nodes of one round.

Row b of a batch holds its committed slots 0 .. lengths[b] - 1 and behind them its nodes in the
order of expansion; a new round overwrites them. A node of depth k stands at the rotary position
lengths[b] - 1 + k, the root (the last committed slot) being depth 0, and sees the committed slots
and its own ancestors. It knows no layer and no tree policy.

Shapes: B batch, D width, Hkv key/value heads, d head width, C capacity, n new slots, m new nodes,
N nodes of this round so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.heads.base import HeadState
from drafthead.heads.blocks import masked_attention, write_rows


def depths_below(depths: Tensor, parents: Tensor) -> Tensor:
    """Depths of nodes below (B, m) parents, -1 the root; ValueError for one that is not there.

    depths: (B, 1 + N) of the nodes of this round so far, the root first.
    """
    low, high = (int(bound) for bound in parents.aminmax())
    nodes = depths.shape[1] - 1
    if low < -1 or high >= nodes:
        raise ValueError(f"parents {low}..{high}: this round has {nodes} nodes; -1 is the root")
    return depths.gather(1, parents + 1) + 1


class LayerMemory(HeadState):
    """Ragged rows are equal to rows decoded alone."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.capacity = capacity
        self.lengths = [0] * batch
        # Zeros: a masked slot that holds NaN would still poison the softmax.
        self.keys = torch.zeros(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.row = torch.arange(batch, device=device)[:, None]
        # Index 0 of the three is the root.
        self.outputs = torch.zeros(batch, 1, width, device=device, dtype=dtype)  # (B, 1 + N, D)
        self.depths = torch.zeros_like(self.row)  # (B, 1 + N)
        self.ancestors = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # (B, 1 + N, N)

    @property
    def num_nodes(self) -> int:
        return self.ancestors.shape[2]

    def _committed(self) -> Tensor:
        """(B, 1) committed slots of each row."""
        return torch.tensor(self.lengths, device=self.row.device)[:, None]

    # Committed slots

    def next_positions(self, n: int) -> Tensor:
        """(B, n) positions of the n slots that follow the committed ones."""
        return self._committed() + torch.arange(n, device=self.row.device)

    def commit(self, keys: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        """Append the first counts[b] of (B, Hkv, n, d) to row b and drop all nodes."""
        write_rows(self.keys, keys, self.lengths, counts)
        write_rows(self.values, values, self.lengths, counts)
        self.lengths = [old + new for old, new in zip(self.lengths, counts, strict=True)]

    def attend_committed(self, query: Tensor) -> Tensor:
        """One query per row, (B, H, 1, d), over its committed slots → (B, H, 1, d)."""
        width, seen = max(self.lengths), None
        if min(self.lengths) < width:
            seen = (torch.arange(width, device=self.row.device) < self._committed())[:, None]
        return self._attend(query, width, seen)

    def start_round(self, outputs: Tensor) -> None:
        """Make (B, 1, D) the layer's outputs at the roots of a new round."""
        self.outputs = outputs
        self.depths = self.depths[:, :1]
        self.ancestors = self.ancestors[:, :1, :0]

    # Draft nodes

    def below(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """(B, m) parents, -1 the root → their outputs (B, m, D), their children's positions."""
        depths = depths_below(self.depths, parents)
        return self.outputs[self.row, parents + 1], self._committed() - 1 + depths

    def add(self, query: Tensor, keys: Tensor, values: Tensor, parents: Tensor) -> Tensor:
        """Hold m nodes below their parents; their attention, (B, H, m, d). Then call `finish`."""
        slots = [length + self.num_nodes for length in self.lengths]
        write_rows(self.keys, keys, slots)
        write_rows(self.values, values, slots)
        m = parents.shape[1]
        own = torch.eye(m, dtype=torch.bool, device=parents.device).expand(len(self.row), m, m)
        seen = torch.cat((self.ancestors[self.row, parents + 1], own), dim=2)  # (B, m, N + m)
        self.ancestors = torch.cat((F.pad(self.ancestors, (0, m)), seen), dim=1)
        depths = self.depths[self.row, parents + 1] + 1
        self.depths = torch.cat((self.depths, depths), dim=1)
        return self._attend(query, max(self.lengths) + self.num_nodes, self._visible(seen))

    def finish(self, outputs: Tensor) -> None:
        """Hold the layer's outputs (B, m, D) at the nodes just added."""
        self.outputs = torch.cat((self.outputs, outputs), dim=1)

    def _visible(self, seen: Tensor) -> Tensor | None:
        """(B, m, N) over nodes → (B, m, S) over slots, or None where every slot is seen."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None if bool(seen.all()) else F.pad(seen, (longest, 0), value=True)
        node = torch.arange(longest + self.num_nodes, device=seen.device) - self._committed()
        node = node[:, None].expand(-1, seen.shape[1], -1)  # (B, m, S); negative: committed
        held = seen.gather(2, node.clamp(0, self.num_nodes - 1)) & (node < self.num_nodes)
        return (node < 0) | held

    def _attend(self, query: Tensor, width: int, seen: Tensor | None) -> Tensor:
        return masked_attention(query, self.keys[:, :, :width], self.values[:, :, :width], seen)
