"""A decoder layer written out position by position in plain tensor maths: a twin for heads' layers.

It shares no code with the library: rotary pairs are complex numbers, attention is a loop over query
heads, and nothing is batched, chunked, masked or remembered.

Shapes: D width, d head width, n positions seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def naive_turn(x: Tensor, position: int, base: float) -> Tensor:
    """(d,) turned by the angles of its position; pair i is elements i and i + d / 2."""
    half = len(x) // 2
    angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag))


def naive_layer(
    weights: Mapping[str, Tensor],
    config: PreTrainedConfig,
    streams: Sequence[Tensor],
    positions: Sequence[int],
) -> Tensor:
    """The output (D,) at the last of n streams (D,) that it sees.

    weights: by the names inside the layer; without `input_layernorm.weight` there is no such norm.
    """
    base, eps, d = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    first = weights.get("input_layernorm.weight")
    seen = [x if first is None else naive_norm(x, first, eps) for x in streams]
    project = {name: weights[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
    heads = []
    for head in range(config.num_attention_heads):
        own, shared = (
            slice(head * d, head * d + d),
            slice(head // group * d, (head // group + 1) * d),
        )
        query = naive_turn(project["q"][own] @ seen[-1], positions[-1], base)
        keys = [
            naive_turn(project["k"][shared] @ x, position, base)
            for x, position in zip(seen, positions, strict=True)
        ]
        chances = torch.stack([query @ key for key in keys]).div(math.sqrt(d)).softmax(0)
        values = torch.stack([project["v"][shared] @ x for x in seen])
        heads.append(chances @ values)
    stream = streams[-1] + project["o"] @ torch.cat(heads)
    x = naive_norm(stream, weights["post_attention_layernorm.weight"], eps)
    gate, up = weights["mlp.gate_proj.weight"] @ x, weights["mlp.up_proj.weight"] @ x
    return stream + weights["mlp.down_proj.weight"] @ (F.silu(gate) * up)
