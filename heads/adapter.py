"""Low-rank adapters (LoRA, arXiv 2106.09685) that belong to a head and act inside its target.

PEFT puts them into a live target. The maps there are the head's very modules: what the head trains,
stores and loads is what the target computes with, and the target's own weights and files stay as
they are. It knows no head.

Shapes: D_in and D_out, widths of an adapted layer, r rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization

from drafthead.heads.contract import ADAPTER, ContractError

Shapes = Mapping[str, tuple[int, int]]
"""(D_in, D_out) of each adapted layer, by its name in the target."""


class LowRank(nn.Module):
    """What is added to one linear layer, B A x; zero at first."""

    def __init__(self, inside: int, rank: int, outside: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inside, rank, bias=False)
        self.lora_B = nn.Linear(rank, outside, bias=False)

    def start(self) -> None:
        """First weights, as PEFT's: A uniform, B zero."""
        initialization.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        initialization.zeros_(self.lora_B.weight)


class Adapter(nn.Module):
    """A `LowRank` for each layer, under the layer's own name, so that files read as PEFT's do."""

    def __init__(self, shapes: Shapes, rank: int) -> None:
        super().__init__()
        for name, (inside, outside) in shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(last, LowRank(inside, rank, outside))

    def parts(self) -> dict[str, LowRank]:
        """By the names of the layers they are for."""
        return {name: m for name, m in self.named_modules() if isinstance(m, LowRank)}


def shapes_of(target: PreTrainedConfig, wanted: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Layers of a target of this config whose last name is one of those wanted; ValueError for one
    that is in none.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(target))
    rows = model.get_output_embeddings()  # borrowed as they are
    shapes = {
        name: (part.in_features, part.out_features)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not rows and name.split(".")[-1] in wanted
    }
    found = {name.split(".")[-1] for name in shapes}
    if absent := [name for name in wanted if name not in found]:
        raise ValueError(
            f"head.lora_targets: no linear layer of a {target.model_type} is called {absent[0]!r}; "
            "name such as 'q_proj', without its path"
        )
    return shapes


def insert(model: PreTrainedModel, adapter: Adapter, rank: int, alpha: float) -> bool:
    """Let the adapter act in a live target, once; whether it was not there already.

    Raises ContractError where the target lacks a layer or carries another adapter.
    """
    parts = adapter.parts()
    if any(hasattr(part, "lora_A") for part in model.modules()):
        _same(model, parts)
        return False
    for name, part in parts.items():
        _check_layer(model, name, part)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "a head that adapts its target needs PEFT: pip install 'drafthead[adapters]'"
        ) from error
    kept = [(p, p.requires_grad) for p in model.parameters()]  # PEFT freezes them all
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=list(parts))
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for parameter, required in kept:
        parameter.requires_grad_(required)
    for name, part in parts.items():
        layer: Any = model.get_submodule(name)
        layer.lora_A[ADAPTER], layer.lora_B[ADAPTER] = part.lora_A, part.lora_B
    return True


def _check_layer(model: PreTrainedModel, name: str, part: LowRank) -> None:
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError as error:
        raise ContractError(
            f"{type(model).__name__} has no layer {name}, which the head adapts"
        ) from error
    shape = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    expected = part.lora_A.in_features, part.lora_B.out_features
    if shape != expected:
        raise ContractError(f"target layer {name} is of shape {shape}, the head adapts {expected}")


def _same(model: PreTrainedModel, parts: Mapping[str, LowRank]) -> None:
    """Refuse a target that carries anything but these very values."""
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    pairs = [
        (getattr(layer, side), getattr(parts[name], side))
        for name, layer in layers.items()
        for side in ("lora_A", "lora_B")
        if name in parts
    ]
    if layers.keys() != parts.keys() or not all(
        ADAPTER in held and (held[ADAPTER] is own or torch.equal(held[ADAPTER].weight, own.weight))
        for held, own in pairs
    ):
        raise ContractError(
            "the target carries another adapter already, of PEFT or of a head: load it anew, "
            "or merge what it carries first"
        )


@contextmanager
def acting(model: PreTrainedModel) -> Iterator[None]:
    """Let a resting adapter act inside the block."""
    scale(model, 1.0)
    try:
        yield
    finally:
        scale(model, 0.0)


def scale(model: PreTrainedModel, factor: float) -> None:
    """Scale what the adapter adds; by 0 it rests, and the target is as it was, bit for bit."""
    layers: list[Any] = [part for part in model.modules() if hasattr(part, "lora_A")]
    for layer in layers:
        layer.set_scale(ADAPTER, factor)
