"""Which captured states a flat EAGLE-3 folder means: several numberings are about.

An id L here is that of `contract`: the stream entering layer L. vLLM reads a list at the top of the
config so; SGLang, ModelOpt, SpecForge and TensorRT-LLM count layers by their output, one less, in a
list inside `eagle_config`, and vLLM's V1 runner reads that one, too, as it is. AngelSlim trains by
outputs as well, under a name of its own. With no list at all it is (2, n // 2, n - 3) everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafthead.heads.contract import check_layers, default_layers
from drafthead.heads.layouts.layout import Asked, LayoutError

IDS = "eagle_aux_hidden_state_layer_ids"
BY_OUTPUT = "aux_hidden_states_layer_ids"
"""AngelSlim's list."""
PRODUCERS = {
    "drafthead": 0,
    "vllm": 0,
    "angelslim": 0,
    "sglang": 1,
    "modelopt": 1,
    "specforge": 1,
    "tensorrt-llm": 1,
}
"""What is to be added to the ids that each writes, to have ours."""
LATE_FIRST = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
"""Targets for which SGLang takes ids as they are, unless the first is 1."""


def is_default(layers: tuple[int, ...], num_layers: int) -> bool:
    """Whether these are the states that every reader takes where none are named."""
    return num_layers >= 7 and layers == default_layers(num_layers)


def nested_ids(layers: tuple[int, ...], model_type: str) -> list[int] | None:
    """The ids that SGLang must be given to capture `layers`; None where it cannot be told."""
    if model_type not in LATE_FIRST or layers[0] == 2:
        return [layer - 1 for layer in layers]
    return None if layers[0] == 1 else list(layers)


def captured_layers(
    config: Mapping[str, Any], count: int, num_layers: int, asked: Asked, place: str
) -> tuple[int, ...]:
    """The captured states of a foreign head; LayoutError where its config does not say them.

    count: how many the head fuses; num_layers: of the target.
    """
    layers = asked.layers or _listed(config, num_layers, asked.producer, place)
    if layers is None:
        if count != 3:
            raise LayoutError(
                f"{place}: it fuses {count} states and names none; name them with --layers"
            )
        layers = default_layers(num_layers)
    layers = check_layers(sorted(layers), num_layers)
    if len(layers) != count:
        raise LayoutError(
            f"{place}: layers {list(layers)} are named, fc.weight takes {count} states"
        )
    return layers


def _listed(
    config: Mapping[str, Any], num_layers: int, producer: str | None, place: str
) -> tuple[int, ...] | None:
    """Ids of the contract's convention from the lists of a config; None where it has none."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    ids = top or nested
    if not ids:
        own = config.get(BY_OUTPUT)
        return tuple(i + 1 for i in own) if own else None
    if producer is not None:
        if producer not in PRODUCERS:
            raise LayoutError(f"--producer {producer!r}: choose {', '.join(PRODUCERS)}")
        # A list at the top stands for what vLLM takes it for wherever there are both.
        by = 0 if top and nested else PRODUCERS[producer]
        return tuple(i + by for i in ids)
    less = [i + 1 for i in sorted(ids)]
    if top:
        told = bool(nested) or not is_default(tuple(less), num_layers)
        by = 0
    else:
        told = min(ids) <= 1 or max(ids) == num_layers
        by = 1 if min(ids) <= 1 else 0
    if not told:
        raise LayoutError(
            f"{place}: layers {list(ids)} may be counted as vLLM does or, as others do, by their "
            f"output ({less} here): say --producer vllm or --producer modelopt, or give --layers"
        )
    return tuple(i + by for i in ids)
