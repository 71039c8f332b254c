"""What kind of value a field of a foreign config has to be, before any layout takes it for one.

A list where a number belongs would end in an error that names no field, a text where true or false
belongs in another head. It knows names and kinds, and no layout; null stands for a missing field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drafthead.heads.layouts.layout import LayoutError

LARGEST = 2**24
"""No size of a draft head comes near it, and nothing is made in vain below it."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _size(value: object) -> bool:
    return _whole(value) and value != 0


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30


def _list_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "a positive whole number": (
        _size,
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim vocab_size draft_vocab_size max_position_embeddings block_size num_target_layers",
    ),
    "a whole number": (_whole, "mask_token_id markov_rank"),
    "a positive number": (
        _positive,
        "rope_theta rms_norm_eps initializer_range logit_scale factor",
    ),
    "true or false": (
        lambda value: isinstance(value, bool),
        "norm_before_residual norm_before_fc fc_norm norm_output use_aux_norm use_aux_hidden_state "
        "medusa_fc_bias original_lm_head grounded_heads is_causal causal sample_from_anchor "
        "enable_confidence_head confidence_head_with_markov",
    ),
    "a text": (_text, "model_type hidden_act rope_type"),
    "an object": (
        lambda value: isinstance(value, dict),
        "dflash_config eagle_config rope_parameters rope_scaling speculators_config "
        "transformer_layer_config",
    ),
    "a list of texts": (_list_of(_text), "architectures layer_types"),
    "a list of whole numbers": (
        _list_of(_whole),
        "target_layer_ids eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids "
        "aux_hidden_states_layer_ids",
    ),
    "a list of positive numbers": (_list_of(_positive), "confidence_temperatures"),
}
"""What a value has to be: how that is told, and the names of the fields."""

RULES = {
    name: (words, is_one) for words, (is_one, names) in KINDS.items() for name in names.split()
}


def check_kinds(config: Mapping[str, Any], place: str) -> None:
    """LayoutError for the first field, here or in an object within, that is of another kind."""
    for name, value in config.items():
        words, is_one = RULES.get(name, ("", lambda _: True))
        if value is not None and not is_one(value):
            shown = repr(value)
            shown = shown if len(shown) < 40 else f"{shown[:40]}…"
            raise LayoutError(f"{place}: {name} is {shown}, not {words}")
        if isinstance(value, dict):
            check_kinds(value, place)
