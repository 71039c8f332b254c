"""EAGLE-3 as vLLM 0.32.0, SGLang 0.5.23 and SafeAILab/EAGLE cb7e0841 load it: the flat layout.

All are given one and the same folder, which TensorRT-LLM reads as well; they differ in what they
can run. The target's output rows are written out, with the target's scale of logits in them, as a
reduced vocabulary needs rows of its own; its embedding, which all readers take from the target
unscaled as the head does, is not. The first layer's norms have other meanings than those of the
layers above it, whose one norm vLLM calls `input_layernorm` and SGLang `hidden_norm`: both are
written.

Shapes: V target vocabulary, Vd draft vocabulary, D hidden width, L captured layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Settings
from drafthead.heads.layouts.captured import IDS, captured_layers, is_default, nested_ids
from drafthead.heads.layouts.copies import filled, floats_in, is_copy, kept_ids
from drafthead.heads.layouts.fields import (
    dtype_fields,
    geometry_of,
    layer_fields,
    layer_numbers,
    needed,
)
from drafthead.heads.layouts.foreign import check_sizes, plain_tensors, take_embedding
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.layouts.limits import layer_limits
from drafthead.heads.layouts.recognise import family
from drafthead.heads.vocabulary import maps_of

AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""What SGLang called the norms of captured states at first."""
UPPER_NORM = {"vllm": "input_layernorm", "sglang": "hidden_norm", "tensorrt-llm": "hidden_norm"}
"""The norm before attention of the layers above the first, by who trained for which reader."""


@dataclass(frozen=True)
class Eagle3Layout:
    """The flat layout for one reader."""

    name: str
    formats: tuple[str, ...]
    consumers: tuple[str, ...]
    reader: str
    """Who loads it, for errors."""
    kind: str = "eagle3"

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, Eagle3Head)
        published = self.reader == "SafeAILab/EAGLE"
        found = layer_limits(head.config, self.reader, scaled=not published)
        if LAST in head.contract.layers:
            found.append(
                f"{self.reader} captures no state after the final norm ({LAST} in head.layers); "
                "train with others"
            )
        elif self.reader == "SGLang":
            found += _sglang_limits(head)
        elif published:
            found += _published_limits(head)
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        assert isinstance(head, Eagle3Head)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layer_fields(head.config),
            "draft_vocab_size": head.config.draft_vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bias": False,
            **_switches(head),
            **_captured_fields(head.contract),
            **dtype_fields(dtype),
        }
        if head.settings.norm_before_fc:  # TensorRT-LLM looks for it here alone
            config["eagle_config"] = {**config.get("eagle_config", {}), "norm_before_fc": True}
        return Stored(config, floats_in(_tensors(head), dtype))

    def recognises(self, stored: Stored) -> bool:
        return family(stored) == "eagle3"

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        return _read(stored, asked)


def _sglang_limits(head: Eagle3Head) -> list[str]:
    contract, found = head.contract, []
    if head.settings.norm_before_residual:
        found.append(
            "SGLang ignores norm_before_residual and would add to the hidden itself; use --format "
            "vllm"
        )
    if len(contract.layers) == 1:
        found.append("SGLang passes over fc where one state is captured; use --format vllm")
    if contract.num_layers in contract.layers:
        found.append(
            f"SGLang captures states before layers alone, none after the last "
            f"({contract.num_layers} in head.layers); use --format vllm"
        )
    if not is_default(contract.layers, contract.num_layers) and (
        nested_ids(contract.layers, contract.model_type) is None
    ):
        found.append(
            f"SGLang reads the layers of {contract.model_type} targets otherwise where the first "
            "is 1; use --format vllm"
        )
    return found


def _published_limits(head: Eagle3Head) -> list[str]:
    """What SafeAILab/EAGLE has no word for: it would load the rest and draft nonsense."""
    settings, contract = head.settings, head.contract
    instead = "use --format vllm or sglang"
    parts = {
        "norm_features": settings.norm_features,
        "norm_before_fc": settings.norm_before_fc,
        "norm_output": settings.norm_output,
        "norm_before_residual": settings.norm_before_residual,
        "num_layers above 1": head.config.num_hidden_layers > 1,
    }
    found = [f"SafeAILab/EAGLE has no {name}; {instead}" for name, has in parts.items() if has]
    if not is_default(contract.layers, contract.num_layers):
        found.append(
            f"SafeAILab/EAGLE captures layers 2, n // 2, n - 3, not {list(contract.layers)}; "
            f"{instead}"
        )
    return found


def _switches(head: Eagle3Head) -> dict[str, Any]:
    """What changes the forward pass; `norm_before_residual` always, as defaults differ."""
    settings, cap = head.settings, head.contract.logit_softcap
    fields: dict[str, Any] = {"norm_before_residual": settings.norm_before_residual}
    fields |= {"fc_norm": True} if settings.norm_features else {}
    fields |= {"norm_output": True} if settings.norm_output else {}
    fields |= {"norm_before_fc": True} if settings.norm_before_fc else {}
    # SGLang reads it; without it the ranking of drafts is the same.
    return fields | ({} if cap is None else {"final_logit_softcapping": cap})


def _captured_fields(contract: Contract) -> dict[str, Any]:
    """Each reader's list where the layers are not those that all of them take by default."""
    layers = contract.layers
    if is_default(layers, contract.num_layers):
        return {}
    nested = nested_ids(layers, contract.model_type)
    if nested is None:
        nested = [layer - 1 for layer in layers]
    return {
        IDS: list(layers),
        "num_aux_hidden_states": len(layers),
        "eagle_config": {"use_aux_hidden_state": True, IDS: nested},
    }


def _tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """A bound head's, by the published names."""
    found: dict[str, Tensor] = dict(head.state_dict())
    rows = found.pop("lm_head.weight", head.bound()[1])
    scale = head.contract.logit_scale
    found["lm_head.weight"] = rows if scale == 1.0 else rows.float() * scale
    for i in range(1, head.config.num_hidden_layers):
        found[f"layers.{i}.hidden_norm.weight"] = found[f"layers.{i}.input_layernorm.weight"]
    if head.config.num_hidden_layers > 1:
        return found
    # The one name that SafeAILab's code knows, and that the others know as well.
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: x
        for name, x in found.items()
    }


def _read(stored: Stored, asked: Asked) -> DraftHead:
    config, tensors, place = stored.config, plain_tensors(stored), stored.place
    tensors = {_current(name): tensor for name, tensor in tensors.items()}
    take_embedding(tensors, asked, place)
    geometry = geometry_of(config, tensors, place)
    text = asked.target.get_text_config()
    width = needed(tensors, "fc.weight", place).shape[1]
    if width % text.hidden_size:
        raise LayoutError(
            f"{place}: fc.weight takes {width} columns, which states of the target's width "
            f"{text.hidden_size} do not fill: it is another target's head"
        )
    count = width // text.hidden_size
    layers = captured_layers(config, count, text.num_hidden_layers, asked, place)
    contract = asked.contract_of(layers)
    check_sizes(geometry, contract, place)
    num_layers = _upper_norms(tensors, asked.producer, place)
    ids = _draft_ids(config, tensors, contract.vocab_size, place)
    own = _own_rows(config, tensors, ids, asked, contract, place)
    size = contract.vocab_size if ids is None else len(ids)
    settings = _settings(config, tensors, place) | {
        "draft_vocab_size": None if ids is None else size,
        "layers": layers,
        "own_rows": own,
        "num_layers": num_layers,
        "rope_theta": float(geometry["rope_parameters"]["rope_theta"]),
        "intermediate_size": geometry["intermediate_size"],
    }
    try:
        checked = Eagle3Settings.model_validate(settings)
    except ValidationError as error:
        raise LayoutError(f"{place}: {error.errors()[0]['msg']}") from error
    with torch.device("meta"):
        head = Eagle3Head(
            Eagle3Config(
                **geometry,
                draft_vocab_size=size,
                num_hidden_layers=num_layers,
                settings=checked.model_dump(mode="json"),
                contract=contract.model_dump(mode="json"),
            )
        )
    if ids is not None:
        tensors["d2t"], tensors["t2d"] = maps_of(ids, contract.vocab_size)
    return filled(head, tensors, place)


def _current(name: str) -> str:
    first, dot, rest = name.partition(".")
    return AUX_NORMS.get(first, first) + dot + rest


def _settings(config: dict[str, Any], tensors: dict[str, Tensor], place: str) -> dict[str, bool]:
    """The switches of a foreign config; LayoutError where the tensors contradict them."""
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise LayoutError(f"{place}: it captures no states (use_aux_hidden_state is false)")
    found = {
        "norm_features": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        "norm_before_fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
        "norm_output": bool(config.get("norm_output")),
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }
    for setting, field, tensor in (
        ("norm_features", "fc_norm", "fc_norm.0.weight"),
        ("norm_before_fc", "norm_before_fc", "input_norm.weight"),
    ):
        if found[setting] != (tensor in tensors):
            state = "has no" if found[setting] else "has"
            raise LayoutError(f"{place}: {field} is {found[setting]}, but it {state} {tensor}")
    return found


def _upper_norms(tensors: dict[str, Tensor], producer: str | None, place: str) -> int:
    """Leave one norm before attention, ours, in layers above the first; returns all layers."""
    numbers = layer_numbers(tensors)
    for i in sorted(numbers - {0}):
        other = tensors.pop(f"layers.{i}.hidden_norm.weight", None)
        name = f"layers.{i}.input_layernorm.weight"
        own = tensors.get(name)
        if other is None or (own is not None and torch.equal(own, other)):
            continue
        if own is not None and producer not in UPPER_NORM:
            raise LayoutError(
                f"{place}: layer {i} has two norms before attention, and vLLM reads another than "
                f"SGLang: say --producer {' or --producer '.join(UPPER_NORM)}"
            )
        if own is None or UPPER_NORM[producer or ""] == "hidden_norm":
            tensors[name] = other
    return len(numbers)


def _draft_ids(
    config: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int, place: str
) -> Tensor | None:
    """Take the map out: (Vd,) ascending target ids, or None for all; LayoutError if it is lost."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = config.get("draft_vocab_size")
    if d2t is not None:
        ids = kept_ids(d2t, t2d, vocab_size, place)
        if size is not None and size != len(ids):
            raise LayoutError(f"{place}: draft_vocab_size is {size}, d2t has {len(ids)} tokens")
        return None if len(ids) == vocab_size else ids
    rows = tensors.get("lm_head.weight")
    found = len(rows) if rows is not None else size or vocab_size
    if {found, size or vocab_size} != {vocab_size}:
        raise LayoutError(
            f"{place}: {found} of {vocab_size} tokens are drafted, and d2t, which says which, is "
            "missing; it may lie in a file beside the weights"
        )
    return None


def _own_rows(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    ids: Tensor | None,
    asked: Asked,
    contract: Contract,
    place: str,
) -> bool:
    """Whether the head has output rows of its own; a copy of the target's is taken out.

    Those left are without the target's scale of logits, which the head applies itself.
    """
    stored = tensors.pop("lm_head.weight", None)
    if stored is None:
        if ids is None and "draft_vocab_size" in config and config["draft_vocab_size"] is None:
            return False
        raise LayoutError(
            f"{place}: lm_head.weight is missing; a head over the target's own rows says so with "
            '"draft_vocab_size": null in its config.json'
        )
    borrowed = asked.rows if ids is None else asked.rows[ids.to(asked.rows.device)]
    scale = contract.logit_scale
    if is_copy(stored, borrowed if scale == 1.0 else borrowed.float() * scale):
        return False
    factor = float(config.get("logit_scale") or 1.0) / scale
    if factor != 1.0:
        stored = (stored.float() * factor).to(stored.dtype)
    tensors["lm_head.weight"] = stored
    return True


for _reader, _format, _consumer in (
    ("vLLM", "vllm", "vllm-0.32.0"),
    ("SGLang", "sglang", "sglang-0.5.23"),
    ("SafeAILab/EAGLE", "eagle", "eagle-cb7e0841"),
):
    register(
        Eagle3Layout(
            name=f"eagle3-{_format}",
            formats=(_format,),
            consumers=(f"{_consumer}-eagle3",),
            reader=_reader,
        )
    )
