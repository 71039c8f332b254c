"""Where a target really is: below PEFT's wrapper, and on which device accelerate runs it.

It runs no model and knows nothing of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drafthead.inference.masks import UnsupportedTargetError


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; PEFT's adapters are layers inside it and stay active.

    Raises UnsupportedTargetError for adapters that are more than layers.
    """
    inner: Any = model
    _refuse_prompts(model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    # Inside a wrapper's `generate` the wrapper shows only by what it has put on the inner model.
    prepare = vars(inner).get("prepare_inputs_for_generation")
    _refuse_prompts(getattr(prepare, "__self__", None))
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedTargetError(
            f"{type(inner).__name__}: not a transformers model; pass one, or PEFT's around one"
        )
    return inner


def _refuse_prompts(wrapper: object) -> None:
    """Refuse adapters that look at a text as a whole: a tree runs several texts at once."""
    configs = getattr(wrapper, "peft_config", None)
    active = getattr(wrapper, "active_adapters", ())
    if not isinstance(configs, dict) or callable(active):  # callable: the inner model, LoRA only
        return
    for name in active:
        config = configs[name]
        learned = getattr(config, "is_prompt_learning", False)
        inserted = getattr(config, "is_adaption_prompt", False)
        if learned or inserted or getattr(config, "alora_invocation_tokens", None):
            kind = getattr(config, "peft_type", "prompt")
            raise UnsupportedTargetError(
                f"adapter {name!r} ({getattr(kind, 'value', kind)}) acts on prompts, not on "
                "weights, which is not supported here; use LoRA or another adapter of weights"
            )


def execution_device(embedding: nn.Module) -> torch.device:
    """The device that a model's input embedding runs on, where accelerate moves its tokens to."""
    for hook in _hooks(getattr(embedding, "_hf_hook", None)):
        # Offloaded weights are on `meta` between forwards.
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.device(device)
    return next(embedding.parameters()).device


def _hooks(hook: Any) -> Iterator[Any]:
    """Single hooks of accelerate, which nests them when a module has several."""
    if hook is None:
        return
    inner = getattr(hook, "hooks", None)
    if inner is None:
        yield hook
    else:
        for one in inner:
            yield from _hooks(one)
