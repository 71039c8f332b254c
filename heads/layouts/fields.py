"""Config fields that the layouts of Llama-like draft layers share, to and from a head's geometry.

Old readers know `rope_theta` and `rope_scaling`, new ones `rope_parameters`: all are written, with
equal values. Where a foreign config contradicts itself `rope_parameters` wins, as in transformers.

Shapes: H query heads, Hkv key/value heads, d head width, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafthead.heads.geometry import HeadConfig
from drafthead.heads.layouts.layout import LayoutError

ROPE_BASE = 10_000.0
"""What every reader takes where a config names no base."""
NORM_EPS = 1e-6
POSITIONS = 2048
"""What transformers' Llama takes where a config names none."""


def layer_fields(config: HeadConfig) -> dict[str, Any]:
    """Sizes, activation, rotary and lengths of the draft layers."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        **rope_fields(config.rope_parameters or {}),
    }


def dtype_fields(dtype: torch.dtype) -> dict[str, str]:
    """Both spellings: TensorRT-LLM reads the first, transformers 5 writes the second."""
    name = str(dtype).removeprefix("torch.")
    return {"torch_dtype": name, "dtype": name}


def rope_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The three spellings of one rotary embedding; no `rope_scaling` where nothing is scaled."""
    full = {"rope_type": "default", **parameters}
    fields = {"rope_theta": full["rope_theta"], "rope_parameters": full}
    if full["rope_type"] != "default":
        fields["rope_scaling"] = {k: v for k, v in full.items() if k != "rope_theta"}
    return fields


def rope_of(config: Mapping[str, Any], place: str = "config.json") -> dict[str, Any]:
    """`rope_parameters` of a foreign config, from whichever spelling it has.

    LayoutError where there are several of them.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise LayoutError(f"{place}: rope_parameters differ between kinds of layers")
    found = {k: v for k, v in given.items() if k not in ("type", "mrope_section")}
    kind = given.get("rope_type", given.get("type", "default"))
    # Draft tokens are text: with one position for all sections mrope turns as the default does.
    found["rope_type"] = "default" if "mrope_section" in given or kind == "mrope" else kind
    found.setdefault("rope_theta", float(config.get("rope_theta") or ROPE_BASE))
    return found


def geometry_of(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], place: str
) -> dict[str, Any]:
    """Sizes of the draft layers for a `HeadConfig`, from a foreign config and its tensors.

    tensors: by plain names. The head width is that of `q_proj`, as configs often lack it. Raises
    LayoutError where a field that is needed is missing or the two do not agree.
    """
    config = {name: value for name, value in config.items() if value is not None}
    required = ("hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in required if name not in config]
    if missing:
        raise LayoutError(f"{place}: config.json has no {', '.join(missing)}")
    rope, rotated = rope_of(config, place), config.get("partial_rotary_factor")
    if rope.get("partial_rotary_factor", rotated) not in (None, 1, 1.0):
        raise LayoutError(f"{place}: its attention turns a part of each head only")
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = "layers.0.self_attn."
    rows = [needed(tensors, f"{attention}{x}_proj.weight", place).shape[0] for x in "qk"]
    if heads % kv_heads or rows[0] % heads or rows[1] * heads != rows[0] * kv_heads:
        raise LayoutError(
            f"{place}: {heads} heads and {kv_heads} key/value heads do not divide the "
            f"{rows[0]} and {rows[1]} rows of q_proj and k_proj"
        )
    said = {"head_dim": rows[0] // heads, "num_hidden_layers": len(layer_numbers(tensors))}
    for name, found in said.items():
        if config.get(name, found) != found:
            raise LayoutError(f"{place}: {name} is {config[name]}, the tensors have {found}")
    if windows := set(config.get("layer_types", ())) - {"full_attention"}:
        raise LayoutError(f"{place}: layers with {', '.join(sorted(windows))} cannot be read")
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": width,
        "intermediate_size": needed(tensors, "layers.0.mlp.gate_proj.weight", place).shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rows[0] // heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": float(config.get("rms_norm_eps", NORM_EPS)),
        "initializer_range": float(config.get("initializer_range", 0.02)),
        "max_position_embeddings": int(config.get("max_position_embeddings", POSITIONS)),
        "rope_parameters": rope,
    }


def layer_numbers(tensors: Mapping[str, Tensor]) -> set[int]:
    """Numbers of the layers that tensors of plain names are of."""
    found = (re.match(r"layers\.(\d+)\.", name) for name in tensors)
    return {int(match[1]) for match in found if match}


def needed(tensors: Mapping[str, Tensor], name: str, place: str) -> Tensor:
    """A matrix that cannot be missing; LayoutError where it is, or is none."""
    if name not in tensors:
        raise LayoutError(f"{place}: tensor {name} is missing")
    if tensors[name].dim() != 2 or not tensors[name].numel():
        raise LayoutError(f"{place}: tensor {name} has shape {tuple(tensors[name].shape)}")
    return tensors[name]
