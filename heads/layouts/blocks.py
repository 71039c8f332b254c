"""What the layouts of block heads share: names of tensors, the layers' config, the way to a head.

Two families run such heads. DFlash (arXiv 2602.06036) has a mask after its anchor for each draft;
DSpark (arXiv 2607.05147) adds a correction by the token before and a chance of acceptance, and its
anchor may predict. Both are stacks of Qwen3 layers, and read the sum of all states without a norm
of its own for each. The mask is a row of an embedding: where it was trained, vLLM takes it as one
more row behind the target's. It knows no engine's config beside the layers'.

Shapes: V target vocabulary, Vd draft vocabulary, D hidden width, L captured layers, r rank of the
correction, K depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from drafthead.heads.block import BlockConfig, BlockHead, BlockSettings
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.layouts.copies import filled, floats_in, is_copy, kept_ids
from drafthead.heads.layouts.fields import layer_fields, layer_numbers, rope_of
from drafthead.heads.layouts.layout import Asked, LayoutError
from drafthead.heads.layouts.limits import layer_limits
from drafthead.heads.layouts.recognise import plain_name
from drafthead.heads.vocabulary import maps_of

OURS = {
    "markov_head.markov_w1.weight": "markov_in.weight",
    "markov_head.markov_w2.weight": "markov_out.weight",
    "confidence_head.proj.weight": "confidence_head.weight",
    "confidence_head.proj.bias": "confidence_head.bias",
}
"""DSpark's own tensors, and what they are called here."""
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
UNKNOWN_TO_THEM = ("calibration", "mask_embedding.weight", "d2t", "t2d")

GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Fields that a head's own geometry has by the same names."""
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "use_gemma_norm": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "partial_rotary_factor": (1, 1.0),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (True,),
    "markov_head_type": ("vanilla", None),
    "projector_type": (None,),
    "selector_rank": (None, 0),
    "conv_kernel_size": (None, 0),
}
"""Fields whose other values change the forward pass, and the values that leave it as it is here."""


@dataclass(frozen=True)
class BlockFacts:
    """What a folder says of a block head, in whatever words."""

    layer: Mapping[str, Any]
    """Config of the layers: the fields of `layer_config`."""
    layers: tuple[int, ...]
    """Captured states, ids as in `contract`."""
    block_size: int
    """Inputs of a block, the anchor included."""
    anchor_predicts: bool
    causal: bool
    mask_token_id: int
    """A row of the target's embedding or, from V on, of the folder's."""
    markov_rank: int = 0
    confidence: bool = False
    confidence_reads_markov: bool = True
    temperatures: tuple[float, ...] | None = None
    """(K,) of the confidence; None: it is not calibrated."""

    @property
    def drafts(self) -> int:
        """K."""
        return self.block_size - (not self.anchor_predicts)


# Writing


def common_refusals(head: BlockHead) -> list[str]:
    """What neither family has."""
    found = layer_limits(head.config, "vLLM", scaled=True)
    if head.settings.norm_features:
        found.append(
            "no engine norms each captured state of a block head before they are fused: train with "
            "head.norm_features: false"
        )
    if LAST in head.contract.layers:
        found.append(
            f"engines capture no state after the final norm (head.layers: {LAST}): train with "
            f"layers in 1..{head.contract.num_layers}"
        )
    return found


def portable_refusals(head: BlockHead) -> list[str]:
    """What vLLM 0.32.0 alone runs."""
    found = []
    if head.reduced:
        instead = "train with head.draft_vocab_size: null, or use --format vllm"
        if not head.settings.markov_rank:
            instead = "write the whole one with --whole-vocabulary, or use --format vllm"
        found.append(f"only vLLM takes a reduced vocabulary of a block head: {instead}")
    if head.settings.mask_token_id is None:
        found.append(
            "only vLLM takes a trained mask: train with head.mask_token_id (a token that text "
            "never has), or use --format vllm"
        )
    last = head.contract.num_layers
    if last in head.contract.layers:
        found.append(
            f"transformers and the reference read state {last} after the final norm: train with "
            "smaller head.layers, or use --format vllm"
        )
    return found


def layer_config(head: BlockHead) -> dict[str, Any]:
    """Of the Qwen3 layers, nothing left to a default. `vocab_size` counts the embedding's rows."""
    config = head.config
    found = {
        "model_type": "qwen3",
        **layer_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": False,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "tie_word_embeddings": False,
    }
    if head.settings.mask_token_id is None:
        found |= {"vocab_size": config.vocab_size + 1, "target_vocab_size": config.vocab_size}
    return found


def mask_id(head: BlockHead) -> int:
    """The mask's row: of the target's embedding, or the one behind it where it was trained."""
    chosen = head.settings.mask_token_id
    return head.config.vocab_size if chosen is None else chosen


def tensors_of(head: BlockHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """By the engines' names; with borrowed rows and maps, or the embedding, only where an engine
    needs them: for a reduced vocabulary, and for a trained mask.
    """
    embedding, rows = head.bound()
    stored = head.state_dict()
    found = {THEIRS.get(n, n): x for n, x in stored.items() if n not in UNKNOWN_TO_THEM}
    if head.reduced:
        found["lm_head.weight"] = rows
        found["d2t"], found["t2d"] = maps_of(head.draft_ids, head.config.vocab_size)
    if head.settings.mask_token_id is None:
        mask = stored["mask_embedding.weight"]
        found["embed_tokens.weight"] = torch.cat((embedding, mask.to(embedding)))
        if head.settings.markov_rank:
            before = found["markov_head.markov_w1.weight"]
            # The mask is never the token before; its row is there for the shape.
            found["markov_head.markov_w1.weight"] = torch.cat(
                (before, before.new_zeros(1, *before.shape[1:]))
            )
    return floats_in(found, dtype)


# Reading


def nested(config: Mapping[str, Any], name: str) -> Any:
    """A field as engines look for it: inside dflash_config, then at the top; None for neither."""
    inner = config.get("dflash_config") or {}
    return inner[name] if name in inner else config.get(name)


def checked(config: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The config itself; LayoutError for layers that our block heads do not have."""
    for name, same in UNSUPPORTED.items():
        value = nested(config, name)
        if value not in same and value is not None:
            raise LayoutError(f"{place}: {name} is {value!r}, which no block head here computes")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise LayoutError(f"{place}: layers with {', '.join(sorted(kinds))} cannot be read")
    return config


def causal_in(config: Mapping[str, Any]) -> bool:
    """Whether inputs see the earlier ones of their block alone; full attention sees all of it."""
    said = config.get("is_causal")
    return bool(nested(config, "causal") if said is None else said)


def layers_in(config: Mapping[str, Any], asked: Asked, place: str) -> tuple[int, ...]:
    """Captured states by the contract's ids: DFlash counts outputs of layers, one less.

    Without any, those that the reference takes.
    """
    if asked.layers is not None:
        return asked.layers
    by_output = [i + 1 for i in nested(config, "target_layer_ids") or ()]
    by_state = list(config.get("eagle_aux_hidden_state_layer_ids") or ())
    if by_output and by_state and by_output != by_state:
        raise LayoutError(
            f"{place}: target_layer_ids, one more, are states {by_output}, and "
            f"eagle_aux_hidden_state_layer_ids {by_state}; say which with --layers"
        )
    return tuple(by_output or by_state) or usual_layers(config, asked)


def usual_layers(config: Mapping[str, Any], asked: Asked) -> tuple[int, ...]:
    """The reference's: of one draft layer the middle, else one for each, evenly from 2 to n - 2."""
    n, drafts = asked.target.get_text_config().num_hidden_layers, config["num_hidden_layers"]
    if drafts == 1:
        return (n // 2 + 1,)
    return tuple(round(1 + i * (n - 4) / (drafts - 1)) + 1 for i in range(drafts))


def head_of(
    facts: BlockFacts, tensors: Mapping[str, Tensor], asked: Asked, place: str
) -> BlockHead:
    """Make the head that a folder describes; ValueError where its tensors do not fit the facts."""
    contract = asked.contract_of(facts.layers)
    found = {OURS.get(name, name): x for name, x in _plain(tensors).items()}
    said, there = facts.layer["num_hidden_layers"], len(layer_numbers(found))
    if said != there:
        raise LayoutError(f"{place}: num_hidden_layers is {said}, the tensors have {there}")
    ids = _vocabulary(found, facts, contract, asked, place)
    mask = _mask(found, facts, asked, place)
    if facts.markov_rank and "markov_in.weight" in found:
        found["markov_in.weight"] = found["markov_in.weight"][: contract.vocab_size]
    settings = _settings(facts, ids, mask, place)
    if mask is not None:
        found["mask_embedding.weight"] = mask[None]
    if ids is not None:
        found["d2t"], found["t2d"] = maps_of(ids, contract.vocab_size)
    if facts.confidence:
        _add_confidence(found, facts, place)
    with torch.device("meta"):
        head = BlockHead(_config(facts, settings, contract, ids, place))
    filled(head, found, place)
    return head


def rope_in(layer: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Parameters of the layers' own turns; LayoutError where the base is left to a default."""
    given = layer.get("rope_parameters") or {}
    if given.get("rope_theta") is None and layer.get("rope_theta") is None:
        raise LayoutError(f"{place}: no rope_theta, for which engines have different defaults")
    return rope_of(layer, place)


def _settings(
    facts: BlockFacts, ids: Tensor | None, mask: Tensor | None, place: str
) -> BlockSettings:
    """What a user would have chosen for this head."""
    try:
        return BlockSettings(
            layers=facts.layers,
            draft_vocab_size=None if ids is None else len(ids),
            unroll_steps=facts.drafts,
            num_layers=facts.layer["num_hidden_layers"],
            intermediate_size=facts.layer["intermediate_size"],
            num_key_value_heads=facts.layer["num_key_value_heads"],
            rope_theta=rope_in(facts.layer, place)["rope_theta"],
            norm_features=False,
            causal=facts.causal,
            anchor_predicts=facts.anchor_predicts,
            mask_token_id=None if mask is not None else facts.mask_token_id,
            markov_rank=facts.markov_rank,
            confidence=facts.confidence,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise LayoutError(f"{place}: {first['loc'][0]}: {first['msg']}") from error


def _config(
    facts: BlockFacts, settings: BlockSettings, contract: Contract, ids: Tensor | None, place: str
) -> BlockConfig:
    """The folder's geometry, beside settings and contract."""
    layer = facts.layer
    if layer["hidden_size"] != contract.hidden_size:
        raise LayoutError(
            f"{place}: hidden_size is {layer['hidden_size']}, the target's {contract.hidden_size}; "
            "a block head has its target's width"
        )
    return BlockConfig(
        vocab_size=contract.vocab_size,
        draft_vocab_size=contract.vocab_size if ids is None else len(ids),
        rope_parameters=rope_in(layer, place),
        settings=settings.model_dump(mode="json"),
        contract=contract.model_dump(mode="json"),
        **{name: layer[name] for name in GEOMETRY},
    )


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {name: plain_name(name) for name in tensors}
    return {ALIASES.get(plain, plain): tensors[name] for name, plain in names.items()}


def _vocabulary(
    found: dict[str, Tensor], facts: BlockFacts, contract: Contract, asked: Asked, place: str
) -> Tensor | None:
    """Take maps and output rows out: (Vd,) target ids of a reduced vocabulary, or None."""
    d2t, t2d = found.pop("d2t", None), found.pop("t2d", None)
    rows = found.pop("lm_head.weight", None)
    if rows is None and d2t is not None:
        raise LayoutError(f"{place}: a reduced vocabulary (d2t) without lm_head.weight")
    ids = None
    if rows is not None and len(rows) != contract.vocab_size:
        if d2t is None:
            raise LayoutError(
                f"{place}: lm_head.weight has {len(rows)} rows, the target {contract.vocab_size}, "
                "and there is no d2t to say which they are"
            )
        ids = kept_ids(d2t, t2d, contract.vocab_size, place)
    size = contract.vocab_size if ids is None else len(ids)
    if facts.layer.get("draft_vocab_size", size) != size:
        raise LayoutError(
            f"{place}: draft_vocab_size is {facts.layer['draft_vocab_size']}, the tensors are for "
            f"{size} of {contract.vocab_size} tokens"
        )
    own = asked.rows if ids is None else asked.rows[ids.to(asked.rows.device)]
    if rows is not None and not is_copy(rows, own):
        raise LayoutError(
            f"{place}: lm_head.weight is not the target's: block heads here borrow their rows"
        )
    return ids


def _mask(found: dict[str, Tensor], facts: BlockFacts, asked: Asked, place: str) -> Tensor | None:
    """Take the embedding out: the trained mask (D,), or None where it is the target's own row."""
    table, V, row = (
        found.pop("embed_tokens.weight", None),
        len(asked.embedding),
        facts.mask_token_id,
    )
    if not 0 <= row < (V if table is None else len(table)):
        raise LayoutError(f"{place}: mask_token_id {row} is a row of no embedding")
    if table is None:
        if facts.layer.get("vocab_size", V) != V:
            raise LayoutError(
                f"{place}: vocab_size is {facts.layer['vocab_size']}, that of the target {V}: it "
                "is another target's head"
            )
        return None
    own = table[:V]
    # A mask is no token of a text: its row may have been trained in place.
    if len(own) != V or not all(
        is_copy(own[a:b], asked.embedding[a:b]) for a, b in ((0, row), (row + 1, V)) if a < b
    ):
        raise LayoutError(
            f"{place}: embed_tokens.weight is not the target's: block heads here borrow it"
        )
    return None if row < V and is_copy(own[row], asked.embedding[row]) else table[row]


def _add_confidence(found: dict[str, Tensor], facts: BlockFacts, place: str) -> None:
    """Widen a confidence that reads no correction, and add the temperatures."""
    weight = found.get("confidence_head.weight")
    if weight is not None and not facts.confidence_reads_markov and weight.dim() == 2:
        found["confidence_head.weight"] = torch.cat(
            (weight, weight.new_zeros(len(weight), facts.markov_rank)), dim=1
        )
    temperatures = facts.temperatures or (1.0,) * facts.drafts
    if len(temperatures) != facts.drafts:
        raise LayoutError(
            f"{place}: {len(temperatures)} temperatures of the confidence for {facts.drafts} drafts"
        )
    found["calibration"] = torch.tensor(temperatures)
