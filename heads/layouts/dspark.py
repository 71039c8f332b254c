"""DSpark (arXiv 2607.05147), flat, as vLLM 0.32.0 and SGLang 0.5.23 read it (`Qwen3DSparkModel`).

A DFlash stack whose anchor may predict, with a correction by the token before (`markov_head`) and
a chance that the draft after it is accepted (`confidence_head`). vLLM runs it in its second model
runner alone. It adds correction and logits before the target's logit scale, as here; a soft cap of
the target is in neither engine, which leaves the order of logits as it is.

Both engines take the chance for one that is calibrated, or calibrate it on their own; the
temperatures of this library stand in the config (`confidence_temperatures`), where they read none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.block import BlockHead
from drafthead.heads.layouts.blocks import (
    common_refusals,
    head_of,
    nested,
    portable_refusals,
    tensors_of,
)
from drafthead.heads.layouts.dflash import flat_config, flat_facts
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.layouts.recognise import says

TEMPERATURES = "confidence_temperatures"


@dataclass(frozen=True)
class DSparkLayout:
    """See the module docstring."""

    kind: ClassVar = "block"
    name: str
    formats: tuple[str, ...]
    consumers: tuple[str, ...]
    portable: bool
    """For both engines, or for vLLM alone."""

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, BlockHead)
        if not head.settings.markov_rank:
            return ["no DSpark head: head.markov_rank is 0"]
        found = common_refusals(head)
        if self.portable:
            found += portable_refusals(head)
            if not head.settings.anchor_predicts:
                found.append(
                    "only vLLM runs a DSpark head whose anchor predicts nothing: train with "
                    "head.anchor_predicts: true, or use --format vllm"
                )
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        assert isinstance(head, BlockHead)
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        config = flat_config(head, "Qwen3DSparkModel", dtype) | markov_config(head)
        return Stored(config, tensors_of(head, dtype))

    def recognises(self, stored: Stored) -> bool:
        config = stored.config
        marked = says(config, "DSpark") or bool(nested(config, "markov_rank"))
        return "speculators_config" not in config and marked

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        config, place = stored.config, stored.place or "the checkpoint"
        rank = nested(config, "markov_rank")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise LayoutError(f"{place}: markov_rank is {rank!r}, which makes no DSpark head")
        anchor = nested(config, "sample_from_anchor")
        confidence = "confidence_head.proj.weight" in stored.tensors
        said = nested(config, "enable_confidence_head")
        if said is not None and bool(said) != confidence:
            has = "there is one" if confidence else "there is none"
            raise LayoutError(f"{place}: enable_confidence_head is {said}, but {has}")
        temperatures = config.get(TEMPERATURES)
        facts = flat_facts(
            stored,
            asked,
            anchor_predicts=True if anchor is None else bool(anchor),
            markov_rank=rank,
            confidence=confidence,
            confidence_reads_markov=bool(nested(config, "confidence_head_with_markov")),
            temperatures=None if temperatures is None else tuple(map(float, temperatures)),
        )
        return head_of(facts, stored.tensors, asked, place)


def markov_config(head: BlockHead) -> dict[str, Any]:
    """DSpark's own fields."""
    settings = head.settings
    config: dict[str, Any] = {
        "sample_from_anchor": settings.anchor_predicts,
        "markov_rank": settings.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": settings.confidence,
        "confidence_head_with_markov": settings.confidence,
    }
    if settings.confidence:
        config[TEMPERATURES] = head.calibration.float().tolist()
    return config


VLLM = "vllm-0.32.0-dspark"
register(DSparkLayout("dspark", ("vllm", "sglang"), (VLLM, "sglang-0.5.23-dspark"), portable=True))
register(DSparkLayout("dspark-vllm", ("vllm",), (VLLM,), portable=False))
