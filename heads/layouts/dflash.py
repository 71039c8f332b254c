"""DFlash (arXiv 2602.06036), flat, as vLLM 0.32.0, SGLang 0.5.23 and transformers 5.24 read it.

One directory for all, and for the reference (z-lab): vLLM and SGLang look into `dflash_config`
first, transformers at the top, so ids of states, mask and block size stand in both places. Those
ids count outputs of layers, one less than the contract's; vLLM also knows a list that counts as the
contract does. What only vLLM takes, a reduced vocabulary or a trained mask, has a layout of its own
with the tensors that it needs for that.

A soft cap or scale of the target's logits is not in the file (vLLM reads a scale): it keeps their
order, and these engines draft greedily.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.block import BlockHead
from drafthead.heads.layouts.blocks import (
    BlockFacts,
    causal_in,
    checked,
    common_refusals,
    head_of,
    layer_config,
    layers_in,
    mask_id,
    nested,
    portable_refusals,
    tensors_of,
)
from drafthead.heads.layouts.copies import count
from drafthead.heads.layouts.fields import dtype_fields
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.layouts.recognise import says

OFF = ("anchor_predicts", "markov_rank", "confidence")
"""Settings of a block head that a DFlash head has not."""


@dataclass(frozen=True)
class DFlashLayout:
    """A block of an anchor and masks."""

    kind: ClassVar = "block"
    name: str
    formats: tuple[str, ...]
    consumers: tuple[str, ...]
    portable: bool
    """For every engine, or for vLLM alone."""

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, BlockHead)
        on = [f"head.{name} is {getattr(head.settings, name)}" for name in OFF]
        on = [text for text, name in zip(on, OFF, strict=True) if getattr(head.settings, name)]
        if on:
            return [f"no DFlash head: {', '.join(on)}"]
        return common_refusals(head) + (portable_refusals(head) if self.portable else [])

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        assert isinstance(head, BlockHead)
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        return Stored(flat_config(head, "DFlashDraftModel", dtype), tensors_of(head, dtype))

    def recognises(self, stored: Stored) -> bool:
        config = stored.config
        plain = "speculators_config" not in config and not nested(config, "markov_rank")
        return plain and (says(config, "DFlash") or "dflash_config" in config)

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        place = stored.place or "the checkpoint"
        anchor = bool(nested(stored.config, "sample_from_anchor"))
        return head_of(flat_facts(stored, asked, anchor), stored.tensors, asked, place)


def flat_config(head: BlockHead, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the flat formats of both families have."""
    contract = head.contract
    reads = {
        "target_layer_ids": [layer - 1 for layer in contract.layers],
        "mask_token_id": mask_id(head),
        "block_size": head.size,
    }
    config = {
        "architectures": [architecture],
        **layer_config(head),
        "num_target_layers": contract.num_layers,
        "is_causal": head.settings.causal,
        **reads,
        "dflash_config": dict(reads),
        "eagle_aux_hidden_state_layer_ids": list(contract.layers),
        **dtype_fields(dtype),
    }
    if contract.logit_scale != 1.0:
        config["logit_scale"] = contract.logit_scale
    return config


def flat_facts(
    stored: Stored,
    asked: Asked,
    anchor_predicts: bool,
    markov_rank: int = 0,
    confidence: bool = False,
    confidence_reads_markov: bool = True,
    temperatures: tuple[float, ...] | None = None,
) -> BlockFacts:
    """Read the fields of both families; LayoutError where one is missing or not to be had here."""
    place = stored.place or "the checkpoint"
    config = checked(stored.config, place)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if config.get(name) is None]
    missing += [name for name in ("block_size", "mask_token_id") if nested(config, name) is None]
    if missing:
        raise LayoutError(f"{place}: config.json has no {', '.join(missing)}")
    n = asked.target.get_text_config().num_hidden_layers
    if (config.get("num_target_layers") or n) != n:
        raise LayoutError(
            f"{place}: num_target_layers is {config['num_target_layers']}, the target has {n}: it "
            "is another target's head"
        )
    heads = count(config["num_attention_heads"], "num_attention_heads", place)
    layer: dict[str, Any] = {
        # What transformers' Qwen3 config has where these are left out.
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    }
    layer |= {name: value for name, value in config.items() if value is not None}
    block_size = count(nested(config, "block_size"), "block_size", place)
    if block_size == 1 and not anchor_predicts:
        raise LayoutError(f"{place}: block_size is 1: an anchor alone drafts nothing")
    return BlockFacts(
        layer,
        layers_in(config, asked, place),
        block_size,
        anchor_predicts,
        causal_in(config),
        int(nested(config, "mask_token_id")),
        markov_rank,
        confidence,
        confidence_reads_markov,
        temperatures,
    )


VLLM = "vllm-0.32.0-dflash"
EVERY = (VLLM, "sglang-0.5.23-dflash", "transformers-5.24.0-dflash", "dflash-44947fbf-dflash")
register(DFlashLayout("dflash", ("dflash", "vllm", "sglang"), EVERY, portable=True))
register(DFlashLayout("dflash-vllm", ("vllm",), (VLLM,), portable=False))
