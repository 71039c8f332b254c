"""Parts that heads are built from: norms, rotary tables, one EAGLE-3 layer, the unroll's attention.

It knows no target, no vocabulary and no decoding round. Training and decoding call the same layer;
only the attention between its two halves differs, because only the visible keys are held otherwise.

Shapes: B batch, T slots, D width, H query heads, Hkv key/value heads, G = H / Hkv, d head width,
n new slots, C capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED = {
    "llama3": {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor"},
    "yarn": {"original_max_position_embeddings", "factor"},
}
"""Rotary scalings that are left to transformers, and the parameters that they cannot do without."""
CHUNK = 256
"""Queries whose scores exist at one time in `unroll_attention`."""


def widened(x: Tensor) -> Tensor:
    """In fp32, or in fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467); statistics in fp32 or fp64, result as the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Rotary:
    """Cosine and sine tables (arXiv 2104.09864, half-split pairs) that grow on demand.

    A plain object, not a module: its tables are computed, so nothing of it is stored or loaded.
    """

    def __init__(self, head_dim: int, parameters: Mapping[str, Any]) -> None:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        self.scale = 1.0
        missing = SCALED.get(kind, {"factor"} if kind == "linear" else set()) - parameters.keys()
        if missing:
            raise ValueError(f"rope_parameters: {kind!r} needs {' and '.join(sorted(missing))}")
        if kind in SCALED:  # as heads of others have it
            shape = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                # what the two below come to, or transformers warns
                max_position_embeddings=int(
                    parameters["factor"] * parameters["original_max_position_embeddings"]
                ),
                rope_parameters=dict(parameters),
            )
            with torch.device("cpu"):
                self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](shape, None)
        elif kind in ("default", "linear"):
            factor = float(parameters["factor"]) if kind == "linear" else 1.0
            exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
            self.frequencies = 1.0 / (float(parameters["rope_theta"]) ** exponents) / factor
        else:
            raise ValueError(
                f"rope_parameters.rope_type: {kind!r} is not supported for a draft layer; "
                f"use 'default', 'linear', {' or '.join(map(repr, SCALED))}"
            )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(
        self, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions 0 .. at least length - 1, each (≥ length, d)."""
        held = self._tables.get((device, dtype))
        if held is None or held[0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length())
            # Tables made while decoding are used in training as well, where autograd saves them.
            with torch.inference_mode(False):
                angles = torch.outer(torch.arange(size, dtype=torch.float32), self.frequencies)
                angles = angles.repeat(1, 2).to(device)
                turns = angles.cos() * self.scale, angles.sin() * self.scale
                held = (turns[0].to(dtype), turns[1].to(dtype))
            self._tables[device, dtype] = held
        return held


def rope_base(config: PreTrainedConfig) -> float:
    """Find the base of a model's full attention, 10,000 where it has none; scaling is left out."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    return float((nested or parameters).get("rope_theta") or 10_000.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, H, n, d) by tables that broadcast to it, (n, d) or (B, 1, n, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections of grouped-query attention whose input is wider than the stream it writes to."""

    def __init__(self, inputs: int, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """(B, n, H * d) → (B, H, n, d)."""
        B, n, width = x.shape
        return x.view(B, n, width // self.head_dim, self.head_dim).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """(B, H, n, d) → (B, n, D) through the output projection."""
        out: Tensor = self.o_proj(x.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        if activation not in ACT2FN:
            raise ValueError(f"hidden_act: {activation!r} is unknown to transformers")
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Eagle3Layer(nn.Module):
    """The decoder layer of EAGLE-3 (arXiv 2503.01840) in halves: before and after the attention.

    Attention reads [norm(embedding); norm(hidden)], 2 D wide; the residual stream is the hidden as
    it came, before its norm.
    """

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
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(2 * width, width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, inner, activation)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Two (B, n, D) → (B, n, 2 D), the embedding's half first."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, n, 2 D) → (B, H, n, d)."""
        return rotate(self.self_attn.split(self.self_attn.q_proj(x)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, 2 D) → keys and values (B, Hkv, n, d)."""
        attn = self.self_attn
        return rotate(attn.split(attn.k_proj(x)), cos, sin), attn.split(attn.v_proj(x))

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's result (B, H, n, d) and the residual stream (B, n, D) → (B, n, D)."""
        hidden = hidden + self.self_attn.join(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def active_slots(wanted: Tensor) -> Tensor:
    """(B, T) bool → (B, m) the wanted slots of each row, ascending; m is the most of any row.

    Rows with fewer are filled up with slots that are not wanted.
    """
    m = int(wanted.sum(1).max())
    return wanted.long().argsort(dim=1, descending=True, stable=True)[:, :m]


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """(B, T, D) at (B, m) slots → (B, m, D)."""
    B, T, D = x.shape
    flat = slots + T * torch.arange(B, device=slots.device)[:, None]
    # Unlike x[row, slots], this has a fast backward pass (index_add).
    return x.flatten(0, 1).index_select(0, flat.flatten()).view(B, slots.shape[1], D)


def unroll_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor | None = None,
    starts: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Attend as the decoder will at unroll step i = len(keys) - 1 (arXiv 2503.01840).

    q: (B, H, m, d) of the given slots, (B, m), by default 0 .. m - 1; keys[0] and values[0]: of
    step 0 at all slots, (B, Hkv, T, d); keys[j] and values[j]: of step j at the queries' own slots,
    (B, Hkv, m, d); starts: (B, m) where each query's own sequence begins, by default at 0. The
    query at slot t sees step 0 at its sequence's slots ≤ t, and of every later step only slot t.
    Returns (B, H, m, d).

    Scores are made and dropped for `chunk` queries at a time and made again in the backward pass,
    so what is kept grows with T, not with T².
    """
    B, H, m, d = q.shape
    if m == 0:  # connected with all it would have read: every weight gets a gradient, if of zeros
        return q + 0.0 * sum(part.sum() for part in (*keys, *values))
    if slots is None:
        slots = torch.arange(m, device=q.device).expand(B, m)
    if starts is None:
        starts = torch.zeros_like(slots)
    grouped = q.view(B, keys[0].shape[1], -1, m, d)
    first, last = torch.stack((starts.amin(0), slots.amax(0))).tolist()
    parts = []
    for start in range(0, m, chunk):
        at = slice(start, min(start + chunk, m))
        seen = slice(min(first[at]), max(last[at]) + 1)  # no query of the chunk sees beyond
        own = slots[:, at] - seen.start, starts[:, at] - seen.start
        operands = [grouped[..., at, :], *own, keys[0][:, :, seen], values[0][:, :, seen]]
        operands += [k[:, :, at] for k in keys[1:]] + [v[:, :, at] for v in values[1:]]
        if torch.is_grad_enabled():
            parts.append(checkpoint(_attend_chunk, *operands, use_reentrant=False))
        else:
            parts.append(_attend_chunk(*operands))
    return torch.cat(parts, dim=3).reshape(B, H, m, d)


def _attend_chunk(
    q: Tensor, slots: Tensor, starts: Tensor, keys: Tensor, values: Tensor, *later: Tensor
) -> Tensor:
    """q: (B, Hkv, G, c, d) at slots (B, c); keys, values: (B, Hkv, e, d) of step 0.

    later: the c queries' own slots of each later step, (B, Hkv, c, d), all keys, then all values.
    """
    B, Hkv, G, c, d = q.shape
    e = keys.shape[2]
    own_keys, own_values = later[: len(later) // 2], later[len(later) // 2 :]
    q = q * d**-0.5
    scores = widened(q.reshape(B, Hkv, G * c, d) @ keys.transpose(2, 3)).view(B, Hkv, G, c, e)
    key = torch.arange(e, device=q.device)
    unseen = (key > slots[..., None]) | (key < starts[..., None])  # (B, c, e)
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    own = [widened((q * k[:, :, None]).sum(-1, keepdim=True)) for k in own_keys]
    weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(values.dtype)
    out = (weights[..., :e].reshape(B, Hkv, G * c, e) @ values).view(B, Hkv, G, c, d)
    for j, v in enumerate(own_values):
        out = out + weights[..., e + j, None] * v[:, :, None]
    return out


def masked_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q: (B, H, n, d); keys, values: (B, Hkv, S, d) → (B, H, n, d).

    mask: (B, n, S) bool, True = seen, or None for all. Query heads of one group ride along as extra
    rows, so no key is repeated.
    """
    B, H, n, d = q.shape
    kv_heads = keys.shape[1]
    rows = q.reshape(B, kv_heads, -1, d)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, H // kv_heads, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return out.reshape(B, H, n, d)


Slots = tuple[Tensor, Tensor, Tensor | None]
"""Row and slot of every slot to write, and which of a row's new ones go there: None, all."""


def row_slots(offsets: Sequence[int], count: int | Sequence[int], device: torch.device) -> Slots:
    """Index `count` slots from offsets[b] on in each row b, or counts[b] of them.

    Made once where the same slots of many buffers are written.
    """
    if isinstance(count, int):
        rows = torch.arange(len(offsets), device=device)[:, None]
        first = torch.tensor(offsets, device=device)[:, None]
        return rows, first + torch.arange(count, device=device), None
    at = [(b, o + j, j) for b, o in enumerate(offsets) for j in range(count[b])]
    rows, slots, new = torch.tensor(at, dtype=torch.long, device=device).view(-1, 3).unbind(1)
    return rows, slots, new


def write_slots(buffer: Tensor, new: Tensor, at: Slots) -> None:
    """Write (B, H, n, d) into (B, H, C, d) in place, at the slots that `row_slots` indexes."""
    rows, slots, index = at
    states = new.transpose(1, 2)
    buffer.transpose(1, 2)[rows, slots] = states if index is None else states[rows, index]


def write_rows(
    buffer: Tensor, new: Tensor, offsets: Sequence[int], counts: Sequence[int] | None = None
) -> None:
    """Write (B, H, n, d) into (B, H, C, d) in place, row b at slots offsets[b] and on.

    counts: how many of the n are written in each row; all by default. ValueError beyond slot C - 1.
    """
    lengths = [new.shape[2]] * len(offsets) if counts is None else counts
    last = max(o + c for o, c in zip(offsets, lengths, strict=True))
    if last > buffer.shape[2]:
        raise ValueError(f"key/value memory is full: {last} slots needed, {buffer.shape[2]} held")
    start, size = offsets[0], lengths[0]
    even = all(length == size for length in lengths)
    if even and all(offset == start for offset in offsets):
        buffer[:, :, start : start + size] = new[:, :, :size]
    else:
        at = row_slots(offsets, size if even else lengths, buffer.device)
        write_slots(buffer, new[:, :, :size] if even else new, at)
