"""DSpark folders against plain maths on what is in them, and back; what cannot be expressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    asked_of,
    assert_same,
    changed,
    made,
    opened,
    returned,
    served_block,
    without,
    written,
)
from ladder import REDUCED, SIZE, ladder_batch, rollout
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.block import BlockHead, BlockSettings
from drafthead.heads.layouts.layout import LayoutError, layout_of
from drafthead.heads.layouts.recognise import layout_in
from drafthead.heads.layouts.schema import demand

PORTABLE = BlockSettings(
    draft_vocab_size=None,
    unroll_steps=4,
    norm_features=False,
    markov_rank=16,
    mask_token_id=9,
)
VLLM_ONLY = PORTABLE.model_copy(update={"draft_vocab_size": SIZE, "mask_token_id": None})
FILLING_IN = VLLM_ONLY.model_copy(update={"anchor_predicts": False, "confidence": False})
HEADS = [
    ("sglang", PORTABLE, None),
    ("vllm", VLLM_ONLY, REDUCED),
    ("vllm", FILLING_IN, REDUCED),
]
every_head = pytest.mark.parametrize(("format", "settings", "ids"), HEADS)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def block(
    target: LlamaForCausalLM, settings: BlockSettings, ids: Tensor | None = None
) -> BlockHead:
    head = made(settings, target, ids)
    assert isinstance(head, BlockHead)
    if settings.confidence:
        head.calibration.copy_(torch.tensor([0.5, 0.8, 1.25, 2.0]))
    return head


@every_head
def test_the_folder_drafts_as_the_head_and_comes_back_equal(
    format: str,
    settings: BlockSettings,
    ids: Tensor | None,
    target: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    head = block(target, settings, ids)
    folder = written(layout_of(format, head), head, tmp_path / "out")
    text = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(7))
    batch = ladder_batch(head, target, text)
    logits, chance = served_block(folder, target, text[0], 8, 4)
    expected = rollout(head, batch, 0, 8, 4)
    assert expected.std() > 0.05
    torch.testing.assert_close(logits[:, head.draft_ids], expected, atol=1e-6, rtol=0)
    if settings.confidence:
        assert chance is not None
        told = [p.confidence[8] for p in head.unroll(batch, 4) if p.confidence is not None]
        torch.testing.assert_close(chance, torch.stack(told), atol=1e-6, rtol=0)
    assert_same(head, returned(folder, target))


@every_head
def test_f68_a_folder_is_what_its_consumers_take(
    format: str, settings: BlockSettings, ids: Tensor | None
) -> None:
    head = block(tiny_target(), settings, ids)
    layout = layout_of(format, head)
    stored = layout.write(head, torch.bfloat16)
    demand(stored, layout.consumers)
    wrong = [
        (without(stored, "markov_head.markov_w1.weight"), "markov_w1.weight is missing"),
        (changed(stored, {"markov_rank": 8}), "markov_w1.weight has shape"),
        (changed(stored, {"sample_from_anchor": "yes"}), "sample_from_anchor = 'yes'"),
    ]
    if settings.confidence:
        wrong.append((without(stored, "confidence_head.proj.bias"), "bias is missing"))
    for fault, problem in wrong:
        with pytest.raises(LayoutError, match=problem):
            demand(fault, layout.consumers)


@pytest.mark.parametrize(
    ("format", "update", "reason"),
    [
        ("vllm", {"norm_features": True}, r"head\.norm_features: false"),
        ("vllm", {"markov_rank": 0}, r"head\.markov_rank is 0"),
        ("sglang", {"draft_vocab_size": SIZE}, r"head\.draft_vocab_size: null, or use"),
        ("sglang", {"anchor_predicts": False}, "whose anchor predicts nothing"),
        ("dflash", {}, r"no DFlash head: head\.anchor_predicts is True, head\.markov_rank is 16"),
    ],
)
def test_what_an_engine_would_run_otherwise_is_refused(
    format: str, update: dict[str, Any], reason: str
) -> None:
    ids = REDUCED if "draft_vocab_size" in update else None
    head = block(tiny_target(), PORTABLE.model_copy(update=update), ids)
    with pytest.raises(LayoutError, match=reason) as caught:
        layout_of(format, head)
    assert "\n" not in str(caught.value)


def test_folders_of_others_are_read_or_refused_by_name(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = block(target, PORTABLE)
    stored = opened(written(layout_of("vllm", head), head, tmp_path / "out"))
    layout, asked = layout_in(stored), asked_of(target)
    assert layout.name == "dspark"
    # A published config has no temperatures and says nothing nested.
    bare = {"confidence_temperatures": None, "dflash_config": None, "sample_from_anchor": None}
    bare |= {"eagle_aux_hidden_state_layer_ids": None, "is_causal": None}
    back = layout.read(changed(stored, bare), asked)
    assert isinstance(back, BlockHead)
    assert back.settings.anchor_predicts
    assert torch.equal(back.calibration, torch.ones(4, dtype=torch.float64))
    # A confidence that reads no correction is one whose weights for it are zero.
    narrow = stored.tensors["confidence_head.proj.weight"][:, :64].clone()
    told = {"confidence_head_with_markov": False}
    back = layout.read(changed(stored, told, confidence_head__proj__weight=narrow), asked)
    assert torch.equal(back.state_dict()["confidence_head.weight"][:, :64], narrow)
    assert not back.state_dict()["confidence_head.weight"][:, 64:].any()
    for fault, problem in [
        (changed(stored, {"enable_confidence_head": False}), "but there is one"),
        (changed(stored, {"markov_rank": 8}), "markov_in.weight has shape"),
        (changed(stored, {"markov_head_type": "gated"}), "markov_head_type is 'gated'"),
        (changed(stored, {"confidence_temperatures": [1.0]}), "1 temperatures"),
        (changed(stored, {"block_size": None, "dflash_config": None}), "no block_size"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            layout.read(fault, asked)
