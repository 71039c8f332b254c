"""EAGLE-1 as vLLM 0.32.0, SGLang 0.5.23 and SafeAILab/EAGLE cb7e0841 load it.

The three disagree on `architectures` (vLLM rejects SGLang's) and on the bias of `fc`: vLLM has none
and drops one without a word, SGLang always has one and leaves it random where the file does not
set it. So a bias is always written, zeros by default, and `"bias": false` always says that
attention has none. Embedding and output rows are the target's in all of them, read without the
scale that targets like Gemma apply, as the head does: nothing of them is written, and a reduced
vocabulary cannot be expressed.

Shapes: H query heads, d head width, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import LAST
from drafthead.heads.eagle import EagleConfig, EagleHead, EagleSettings
from drafthead.heads.layouts.copies import filled, floats_in, is_copy
from drafthead.heads.layouts.fields import dtype_fields, geometry_of, layer_fields, needed
from drafthead.heads.layouts.foreign import check_sizes, plain_tensors, take_embedding
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.layouts.limits import layer_limits
from drafthead.heads.layouts.recognise import family


@dataclass(frozen=True)
class EagleLayout:
    """One reader's way to store EAGLE-1; tensors are the same for all."""

    name: str
    formats: tuple[str, ...]
    consumers: tuple[str, ...]
    reader: str
    """Who loads it, for errors."""
    architecture: str
    biased: bool
    """Whether the reader has a bias in `fc`."""
    published: bool = False
    """Whether the reader is the published code, where the config's `bias` switches that bias."""
    kind: str = "eagle"

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, EagleHead)
        config = head.config
        found = layer_limits(config, self.reader, scaled=not self.published)
        if head.reduced:
            found.append(
                f"{self.reader} drafts from all of the target's rows with EAGLE-1, the head from "
                f"{config.draft_vocab_size} of them; add --whole-vocabulary"
            )
        joined = config.num_attention_heads * config.head_dim
        if self.published and joined != config.hidden_size:
            found.append(
                f"{self.reader} joins heads to the width {config.hidden_size} only, not "
                f"{joined}; use --format vllm or sglang"
            )
        if not self.biased and bool(head.fc.bias.any()):
            found.append(f"{self.reader} drops the bias of fc; train with head.fc_bias=false")
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        assert isinstance(head, EagleHead)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "llama",
            **layer_fields(head.config),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bias": self.published and bool(head.fc.bias.any()),
            **logit_fields(head),
            **dtype_fields(dtype),
        }
        return Stored(config, floats_in(head.state_dict(), dtype))

    def recognises(self, stored: Stored) -> bool:
        return family(stored) == "eagle"

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        return _read(stored, asked)


def logit_fields(head: DraftHead) -> dict[str, float]:
    """What the target does to logits; vLLM reads the scale, SGLang the cap.

    Neither changes which token is likeliest, so a reader that knows one not drafts the same chain.
    """
    contract, fields = head.contract, {}
    if contract.logit_scale != 1.0:
        fields["logit_scale"] = contract.logit_scale
    if contract.logit_softcap is not None:
        fields["final_logit_softcapping"] = contract.logit_softcap
    return fields


def _read(stored: Stored, asked: Asked) -> DraftHead:
    tensors, place = plain_tensors(stored), stored.place
    if asked.layers not in (None, (LAST,)):
        raise LayoutError(f"{place}: EAGLE-1 reads the target's last state alone; drop --layers")
    take_embedding(tensors, asked, place)
    rows: Tensor | None = tensors.pop("lm_head.weight", None)
    if rows is not None and not is_copy(rows, asked.rows):
        raise LayoutError(
            f"{place}: lm_head.weight differs from the target's output rows, which EAGLE-1 drafts "
            "from: it is another target's head"
        )
    contract = asked.contract_of((LAST,))
    geometry = geometry_of(stored.config, tensors, place)
    check_sizes(geometry, contract, place)
    settings = EagleSettings(
        draft_vocab_size=None,
        fc_bias="fc.bias" in tensors,
        rope_theta=float(geometry["rope_parameters"]["rope_theta"]),
        intermediate_size=geometry["intermediate_size"],
    )
    if not settings.fc_bias:
        tensors["fc.bias"] = torch.zeros_like(needed(tensors, "fc.weight", place)[:, 0])
    config = EagleConfig(
        **geometry,
        draft_vocab_size=contract.vocab_size,
        settings=settings.model_dump(mode="json"),
        contract=contract.model_dump(mode="json"),
    )
    with torch.device("meta"):
        head = EagleHead(config)
    return filled(head, tensors, place)


register(
    EagleLayout(
        name="eagle-vllm",
        formats=("vllm",),
        consumers=("vllm-0.32.0-eagle",),
        reader="vLLM",
        architecture="LlamaForCausalLM",
        biased=False,
    )
)
register(
    EagleLayout(
        name="eagle-sglang",
        formats=("sglang",),
        consumers=("sglang-0.5.23-eagle",),
        reader="SGLang",
        architecture="LlamaForCausalLMEagle",
        biased=True,
    )
)
register(
    EagleLayout(
        name="eagle-published",
        formats=("eagle",),
        consumers=("eagle-cb7e0841-eagle",),
        reader="SafeAILab/EAGLE",
        architecture="LlamaForCausalLM",
        biased=True,
        published=True,
    )
)
