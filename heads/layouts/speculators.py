"""The format of vllm-project/speculators 0.9.0, which vLLM 0.32.0 serves as it is.

One directory, `config.json` and `model.safetensors`, known by `speculators_config`. The config of
the draft layers is nested and complete, since vLLM reads it with no defaults. EAGLE-3 has our own
tensor names; ids of captured states are those of our own contract.

Shapes: V target vocabulary, Vd draft vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafthead.heads.base import DraftHead
from drafthead.heads.block import BlockHead
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import LAST, Contract, default_layers
from drafthead.heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Settings
from drafthead.heads.layouts.blocks import (
    BlockFacts,
    checked,
    common_refusals,
    head_of,
    tensors_of,
)
from drafthead.heads.layouts.copies import count, filled, floats_in, is_copy, kept_ids
from drafthead.heads.layouts.dspark import TEMPERATURES
from drafthead.heads.layouts.fields import dtype_fields, geometry_of, layer_fields
from drafthead.heads.layouts.foreign import take_embedding
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.layouts.limits import layer_limits
from drafthead.heads.vocabulary import maps_of

VERSION = "0.9.0"
ASSUMED = {"speculators": False, "vllm": True}
"""What a missing `norm_before_residual` stands for, by who reads the folder."""
FULL = {"full_attention"}


class Eagle3Speculators:
    """`eagle3`: embedding and output rows are in the file, copies of the target's or trained."""

    kind, name = "eagle3", "eagle3-speculators"
    formats = ("speculators",)
    consumers = (f"speculators-{VERSION}-eagle3",)

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, Eagle3Head)
        found = layer_limits(head.config, "vLLM", scaled=True)
        if LAST in head.contract.layers:
            found.append(
                "vLLM captures no state after the final norm; train without head.layers -1"
            )
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        assert isinstance(head, Eagle3Head)
        settings, layers = head.settings, list(head.contract.layers)
        embedding, rows = head.bound()
        tensors = {"embed_tokens.weight": embedding, "lm_head.weight": rows, **head.state_dict()}
        layer = layer_config(head, "llama")
        if len(layers) != 3:
            # Where vLLM looks for it with a Llama layer: the list of ids alone fails there.
            layer["num_aux_hidden_states"] = len(layers)
        config = common(head, "eagle3", "Eagle3Speculator", settings.unroll_steps, dtype) | {
            "transformer_layer_config": layer,
            "norm_before_residual": settings.norm_before_residual,
            "norm_before_fc": settings.norm_before_fc,
            "fc_norm": settings.norm_features,
            "norm_output": settings.norm_output,
            "eagle_aux_hidden_state_layer_ids": layers,
            "embed_requires_grad": False,
        }
        return Stored(config, floats_in(tensors, dtype))

    def recognises(self, stored: Stored) -> bool:
        """Its own, and those of which nothing here knows more than the name."""
        return algorithm_of(stored) not in ("", "dflash", "dspark")

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        kind = algorithm_of(stored)
        if kind != "eagle3":
            raise LayoutError(
                f"{stored.place}: heads of type {kind!r} of speculators are not read here "
                "(known: eagle3, dflash, dspark)"
            )
        try:
            return _read_eagle3(stored, asked)
        except ValidationError as error:
            raise LayoutError(f"{stored.place}: {error.errors()[0]['msg']}") from error


def _read_eagle3(stored: Stored, asked: Asked) -> DraftHead:
    config, tensors, place = stored.config, dict(stored.tensors), stored.place
    number = asked.target.get_text_config().num_hidden_layers
    layers = asked.layers or config.get("eagle_aux_hidden_state_layer_ids")
    contract = asked.contract_of(tuple(layers or default_layers(number)))
    layer = layer_of(config, contract, place)
    take_embedding(tensors, asked, place)
    ids = _vocabulary(config, tensors, contract, place)
    own = _own_rows(tensors, asked, ids)
    size = contract.vocab_size if ids is None else len(ids)
    geometry = geometry_of(layer, tensors, place)
    settings = Eagle3Settings(
        layers=contract.layers,
        num_layers=layer["num_hidden_layers"],
        unroll_steps=tokens_of(config, place),
        draft_vocab_size=None if ids is None else size,
        norm_features=bool(config.get("fc_norm")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_before_residual=_residual(config, asked, place),
        norm_output=bool(config.get("norm_output")),
        own_rows=own,
        rope_theta=geometry["rope_parameters"]["rope_theta"],
        intermediate_size=geometry["intermediate_size"],
    )
    with torch.device("meta"):
        head = Eagle3Head(
            Eagle3Config(
                **geometry,
                num_hidden_layers=layer["num_hidden_layers"],
                draft_vocab_size=size,
                settings=settings.model_dump(mode="json"),
                contract=contract.model_dump(mode="json"),
            )
        )
    return filled(head, tensors, place)


class BlockSpeculators:
    """`dflash` and `dspark`: embeddings are never stored, rows only of a reduced vocabulary."""

    kind = "block"
    formats = ("speculators",)

    def __init__(self, algorithm: str, architecture: str) -> None:
        self.algorithm, self.architecture = algorithm, architecture
        self.name = f"{algorithm}-speculators"
        self.consumers = (f"speculators-{VERSION}-{algorithm}",)

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, BlockHead)
        settings, found = head.settings, common_refusals(head)
        found += layer_limits(head.config, "vLLM", scaled=True)
        if settings.mask_token_id is None:
            found.append(
                "speculators stores no trained mask: train with head.mask_token_id (a token that "
                "text never has)"
            )
        if settings.causal:
            found.append("speculators has no causal blocks: train with head.causal: false")
        dflash = not (settings.markov_rank or settings.confidence)
        if dflash and settings.anchor_predicts:
            found.append(
                "vLLM runs no dflash head whose anchor predicts: train with "
                "head.anchor_predicts: false, or with a correction (head.markov_rank)"
            )
        if dflash != (self.algorithm == "dflash"):
            found = found or [f"this is no {self.algorithm} head"]
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        assert isinstance(head, BlockHead)
        settings = head.settings
        tokens, architecture = settings.unroll_steps, self.architecture
        config = common(head, self.algorithm, architecture, tokens, dtype) | {
            "transformer_layer_config": layer_config(head, "qwen3"),
            "aux_hidden_state_layer_ids": list(head.contract.layers),
            "block_size": head.size,
            "mask_token_id": settings.mask_token_id,
            # False is what the library writes for full attention, and vLLM then makes all causal.
            "sliding_window_non_causal": True,
            "sample_from_anchor": settings.anchor_predicts,
        }
        if self.algorithm == "dspark":
            config |= {
                "markov_rank": settings.markov_rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": settings.confidence,
                "confidence_head_with_markov": settings.confidence and settings.markov_rank > 0,
            }
        if settings.confidence:
            # Read by none but us: engines have no temperatures.
            config[TEMPERATURES] = head.calibration.tolist()
        return Stored(config, tensors_of(head, dtype))

    def recognises(self, stored: Stored) -> bool:
        return algorithm_of(stored) == self.algorithm

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        config, place, dspark = stored.config, stored.place, self.algorithm == "dspark"
        layers = asked.layers or config.get("aux_hidden_state_layer_ids")
        if not layers:
            raise LayoutError(f"{place}: no aux_hidden_state_layer_ids; name them with --layers")
        mask = config.get("mask_token_id")
        if not isinstance(mask, int):
            raise LayoutError(f"{place}: mask_token_id is {mask!r}, not a token's id")
        checked(config, place)
        layer = layer_of(config, asked.contract_of(tuple(layers)), place)
        if config.get("draft_vocab_size") is not None:
            layer |= {"draft_vocab_size": config["draft_vocab_size"]}
        confident = dspark and bool(config.get("enable_confidence_head", True))
        temperatures = config.get(TEMPERATURES) if confident else None
        facts = BlockFacts(
            layer=layer,
            layers=tuple(layers),
            block_size=count(config.get("block_size"), "block_size", place),
            anchor_predicts=bool(config.get("sample_from_anchor", dspark)),
            causal=False,
            mask_token_id=mask,
            markov_rank=config.get("markov_rank", 256) if dspark else 0,
            confidence=confident,
            confidence_reads_markov=bool(config.get("confidence_head_with_markov", True)),
            temperatures=None if temperatures is None else tuple(temperatures),
        )
        return head_of(facts, stored.tensors, asked, place)


# Writing


def common(
    head: BorrowingHead, algorithm: str, architecture: str, tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Fields that all algorithms have; tokens: of one draft."""
    contract = head.contract
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(contract.model_type)
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [greedy | {"accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": contract.target,
                "architectures": [known] if isinstance(known, str) else [],
            },
        },
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **dtype_fields(dtype),
    }


def layer_config(head: BorrowingHead, model_type: str) -> dict[str, Any]:
    """The draft layers' geometry, with nothing left to a default."""
    kinds = {"layer_types": ["full_attention"] * head.config.num_hidden_layers}
    return {
        "model_type": model_type,
        **layer_fields(head.config),
        **(kinds if model_type == "qwen3" else {"mlp_bias": False}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }


# Reading


def algorithm_of(stored: Stored) -> str:
    """The type of head that a folder of this format says it holds; "" for any other folder."""
    if "speculators_config" not in stored.config:
        return ""
    return str(stored.config.get("speculators_model_type") or "of no name")


def tokens_of(config: Mapping[str, Any], place: str) -> int:
    """Tokens of one draft: those of the first method, which is the one that vLLM reads."""
    try:
        tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        tokens = None
    return count(tokens, "speculators_config: speculative_tokens", place)


def layer_of(config: Mapping[str, Any], contract: Contract, place: str) -> dict[str, Any]:
    """The draft layers' config, missing fields as the library fills them.

    LayoutError for layers that heads here do not have.
    """
    given = config.get("transformer_layer_config")
    if not isinstance(given, dict):
        raise LayoutError(f"{place}: config.json has no transformer_layer_config")
    kind = given.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise LayoutError(f"{place}: draft layers of type {kind!r} are not read here")
    layer: dict[str, Any] = CONFIG_MAPPING[kind](**given).to_dict()
    expected = {
        "hidden_size": contract.hidden_size,
        "vocab_size": contract.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name, value in expected.items():
        if layer.get(name, value) != value:
            raise LayoutError(
                f"{place}: transformer_layer_config.{name} is {layer[name]}, and not {value} as in "
                f"every head of {contract.target!r} here"
            )
    if {*(layer.get("layer_types") or ())} - FULL:
        raise LayoutError(f"{place}: draft layers with a window are not read here")
    return layer


def _residual(config: Mapping[str, Any], asked: Asked, place: str) -> bool:
    """`norm_before_residual`, which means one thing to the library and another to vLLM if missing.

    LayoutError where nobody says which.
    """
    found = config.get("norm_before_residual", ASSUMED.get(asked.producer or ""))
    if found is None:
        raise LayoutError(
            f"{place}: config.json does not say norm_before_residual, which the library takes for "
            "false and vLLM for true: say for which of them it was made with --producer "
            f"{' or --producer '.join(ASSUMED)}"
        )
    return bool(found)


def _vocabulary(
    config: Mapping[str, Any], tensors: dict[str, Tensor], contract: Contract, place: str
) -> Tensor | None:
    """(Vd,) target ids of a reduced vocabulary, whose maps are put in order; None for all."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = count(config.get("draft_vocab_size"), "draft_vocab_size", place)
    if size == contract.vocab_size:  # the library ignores maps then
        return None
    if d2t is None or len(d2t) != size:
        found = "there is none" if d2t is None else f"it has {len(d2t)}"
        raise LayoutError(
            f"{place}: draft_vocab_size is {size} of {contract.vocab_size} tokens; d2t has to say "
            f"which, and {found}"
        )
    if "lm_head.weight" not in tensors:
        raise LayoutError(f"{place}: no lm_head.weight, which a reduced vocabulary has to have")
    ids = kept_ids(d2t, t2d, contract.vocab_size, place)
    tensors["d2t"], tensors["t2d"] = maps_of(ids, contract.vocab_size)
    return ids


def _own_rows(tensors: dict[str, Tensor], asked: Asked, ids: Tensor | None) -> bool:
    """Whether the output rows are the head's own; a copy of the target's is taken out."""
    rows = tensors.get("lm_head.weight")
    if rows is None:
        return False
    if not is_copy(rows, asked.rows if ids is None else asked.rows[ids.to(asked.rows.device)]):
        return True
    del tensors["lm_head.weight"]
    return False


register(Eagle3Speculators())
register(BlockSpeculators("dflash", "DFlashSpeculator"))
register(BlockSpeculators("dspark", "DSparkSpeculator"))
