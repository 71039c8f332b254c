"""The decoder layer of block drafters (arXiv 2602.06036), what its blocks see, and its memory.

A block is a few inputs that are run at once: a known token, the anchor, and masks after it. Context
states enter no layer as inputs; every layer projects them to keys and values of its own. A block
sees the context up to the state before its anchor, and itself: all of it, or causally. Blocks of
different anchors do not see each other.

Shapes: B batch, T positions, D width, H query heads, Hkv key/value heads, d head width, m anchors,
S inputs of a block, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.heads.base import HeadState
from drafthead.heads.blocks import (
    Attention,
    GatedMLP,
    RMSNorm,
    masked_attention,
    rotate,
    write_rows,
)
from drafthead.heads.memory import depths_below

CHUNK = 512
"""Queries whose mask and scores exist at one time in `BlockPlan.attend`."""

Turns = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries (B, H, n, d), keys and values (B, Hkv, n, d) of blocks → (B, H, n, d)."""


class NormedAttention(Attention):
    """Projections whose queries and keys are normed by head."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(width, width, heads, kv_heads, head_dim)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)


class BlockLayer(nn.Module):
    """A pre-norm decoder layer over blocks; its tensors are named as in DFlash."""

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        activation: str,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = NormedAttention(width, heads, kv_heads, head_dim, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, inner, activation)

    def keys_values(self, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """(B, n, D), context or normed inputs → keys and values (B, Hkv, n, d)."""
        attn = self.self_attn
        keys = attn.k_norm(attn.split(attn.k_proj(x)))
        return rotate(keys, *turns), attn.split(attn.v_proj(x))

    def forward(self, hidden: Tensor, turns: Turns, attend: Attend) -> Tensor:
        """The residual stream of blocks, (B, n, D) → (B, n, D)."""
        attn, x = self.self_attn, self.input_layernorm(hidden)
        queries = rotate(attn.q_norm(attn.split(attn.q_proj(x))), *turns)
        hidden = hidden + attn.join(attend(queries, *self.keys_values(x, turns)))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class BlockPlan:
    """Which context states the blocks of an unroll see; made once for all layers."""

    def __init__(self, slots: Tensor, starts: Tensor, size: int, causal: bool) -> None:
        """slots: (B, m) the state before each anchor, ascending; starts: (B, m) where its own
        sequence begins; size: S.
        """
        self.slots, self.starts, self.size, self.causal = slots, starts, size, causal
        m, step = slots.shape[1], max(1, CHUNK // size)
        bounds = [starts.amin(0).tolist(), (slots.amax(0) + 1).tolist()] if m else [[], []]
        self._chunks = [
            (slice(a, a + step), slice(min(bounds[0][a : a + step]), max(bounds[1][a : a + step])))
            for a in range(0, m, step)
        ]

    def attend(
        self, keys: Tensor, values: Tensor, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        """keys, values: (B, Hkv, T, d) of the context; q: (B, H, m * S, d) of the blocks, and their
        own keys and values, (B, Hkv, m * S, d). Returns (B, H, m * S, d).

        Masks and scores are made and dropped for some blocks at a time, and made again in the
        backward pass: what is kept grows with T and with m, never with their product.
        """
        if not self._chunks:  # connected with all it would have read
            return q + 0.0 * sum(part.sum() for part in (keys, values, own_keys, own_values))
        parts = []
        for blocks, seen in self._chunks:
            rows = slice(blocks.start * self.size, blocks.stop * self.size)
            operands = [x[:, :, rows] for x in (q, own_keys, own_values)]
            operands += [x[:, :, seen] for x in (keys, values)]
            operands += [x[:, blocks] - seen.start for x in (self.slots, self.starts)]
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._attend_chunk, *operands, use_reentrant=False))
            else:
                parts.append(self._attend_chunk(*operands))
        return torch.cat(parts, dim=2)

    def _attend_chunk(
        self,
        q: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        starts: Tensor,
    ) -> Tensor:
        """Some blocks over the part of the context that any of them sees, and themselves."""
        place = torch.arange(keys.shape[2], device=q.device)
        context = (place <= slots[..., None]) & (place >= starts[..., None])  # (B, c, e)
        context = context.repeat_interleave(self.size, dim=1)
        row = torch.arange(q.shape[2], device=q.device)
        own = row[:, None] // self.size == row // self.size
        if self.causal:
            own &= row <= row[:, None]
        mask = torch.cat((context, own.expand(len(q), -1, -1)), dim=2)
        keys, values = torch.cat((keys, own_keys), dim=2), torch.cat((values, own_values), dim=2)
        return masked_attention(q, keys, values, mask)


class BlockMemory(HeadState):
    """Keys and values of the committed context by layer, and one round's block and draft nodes.

    Row b of a batch holds context slots 0 .. lengths[b] - 1; a round's block is written behind them
    and the next commit overwrites it. A draft node is no more than its depth and token.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.capacity, self.size = capacity, size
        self.lengths = [0] * batch
        shape = (layers, 2, batch, kv_heads, capacity + size, head_dim)
        # Zeros: a masked slot that holds NaN would still poison the softmax.
        self.held = torch.zeros(shape, device=device, dtype=dtype)
        self.row = torch.arange(batch, device=device)[:, None]
        self.anchors = torch.zeros_like(self.row)  # (B, 1) the token after the committed states
        self.depths = torch.zeros_like(self.row)  # (B, 1 + N), index 0 the root
        self.asked = self.depths, self.anchors
        """Depths and tokens, each (B, m), of the nodes of the last call."""
        self.hidden = self.logits = torch.empty(0)
        """Of the round's block, by depth: (B, K, D) normed, and (B, K, Vd) uncorrected."""

    @property
    def committed(self) -> Tensor:
        """(B, 1) context slots of each row."""
        return torch.tensor(self.lengths, device=self.row.device)[:, None]

    def next_positions(self, n: int) -> Tensor:
        """(B, n) positions of the n slots that follow the committed ones."""
        return self.committed + torch.arange(n, device=self.row.device)

    def commit(
        self, context: Sequence[tuple[Tensor, Tensor]], next_ids: Tensor, counts: Tensor
    ) -> None:
        """Append the first counts[b] of each layer's keys and values (B, Hkv, n, d) to row b; the
        last of its next tokens (B, n) is its anchor.
        """
        lengths = [old + new for old, new in zip(self.lengths, counts.tolist(), strict=True)]
        if max(lengths) > self.capacity:
            raise ValueError(
                f"key/value memory is full: {max(lengths)} slots needed, {self.capacity} held"
            )
        for held, pair in zip(self.held, context, strict=True):
            for buffer, new in zip(held, pair, strict=True):
                write_rows(buffer, new, self.lengths, counts.tolist())
        self.lengths = lengths
        counts = counts.to(self.row.device)[:, None]
        last = next_ids.gather(1, (counts - 1).clamp(min=0))
        self.anchors = torch.where(counts > 0, last, self.anchors)

    def seen(self, causal: bool) -> Tensor | None:
        """(B, S, slots) bool: what each row's block sees; None where that is everything."""
        if not causal and min(self.lengths) == max(self.lengths):
            return None
        place = torch.arange(max(self.lengths) + self.size, device=self.row.device)
        reach = torch.arange(1, self.size + 1, device=self.row.device) if causal else self.size
        return place < (self.committed + reach)[..., None].expand(-1, self.size, -1)

    def attend(self, layer: int, seen: Tensor | None) -> Attend:
        """The attention of one layer's block, which is written behind the context."""
        keys, values = self.held[layer]
        width = max(self.lengths) + self.size

        def over_context(q: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
            write_rows(keys, own_keys, self.lengths)
            write_rows(values, own_values, self.lengths)
            return masked_attention(q, keys[:, :, :width], values[:, :, :width], seen)

        return over_context

    def start_round(self, hidden: Tensor, logits: Tensor) -> None:
        """Hold a new round's block and drop all nodes."""
        self.hidden, self.logits = hidden, logits
        self.depths = self.depths[:, :1]
        self.asked = self.depths, self.anchors

    def add(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Hold m nodes below earlier ones, -1 the root; their depths (B, m)."""
        depths = depths_below(self.depths, parents)
        if int(depths.max()) >= self.logits.shape[1]:
            raise ValueError(
                f"node of depth {int(depths.max())}: the block drafts {self.logits.shape[1]} "
                "tokens at most"
            )
        self.depths = torch.cat((self.depths, depths), dim=1)
        self.asked = depths, ids
        return depths
