"""DFlash folders against plain maths on what is in them, and back; what cannot be expressed."""

from __future__ import annotations

from dataclasses import replace
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
from transformers import AutoConfig, LlamaForCausalLM
from transformers.cache_utils import DFlashCache

from drafthead.heads.block import BlockHead, BlockSettings
from drafthead.heads.layouts.layout import LayoutError, layout_of
from drafthead.heads.layouts.recognise import layout_in
from drafthead.heads.layouts.schema import demand

PORTABLE = BlockSettings(
    draft_vocab_size=None,
    unroll_steps=4,
    num_layers=2,
    anchor_predicts=False,
    norm_features=False,
    markov_rank=0,
    confidence=False,
    mask_token_id=9,
)
VLLM_ONLY = PORTABLE.model_copy(
    update={
        "draft_vocab_size": SIZE,
        "mask_token_id": None,
        "causal": True,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "layers": (1, 4, 8),
    }
)
HEADS = [("dflash", PORTABLE, None), ("vllm", VLLM_ONLY, REDUCED)]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def block(
    target: LlamaForCausalLM, settings: BlockSettings, ids: torch.Tensor | None = None
) -> BlockHead:
    head = made(settings, target, ids)
    assert isinstance(head, BlockHead)
    return head


@pytest.mark.parametrize(("format", "settings", "ids"), HEADS)
def test_the_folder_drafts_as_the_head_and_comes_back_equal(
    format: str,
    settings: BlockSettings,
    ids: torch.Tensor | None,
    target: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    head = block(target, settings.model_copy(update={"layers": (1, 4, 6)}), ids)
    folder = written(layout_of(format, head), head, tmp_path / "out")
    text = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(7))
    logits, chance = served_block(folder, target, text[0], 8, 4)
    expected = rollout(head, ladder_batch(head, target, text), 0, 8, 4)
    assert expected.std() > 0.05
    assert chance is None
    torch.testing.assert_close(logits[:, head.draft_ids], expected, atol=1e-6, rtol=0)
    assert_same(head, returned(folder, target))


def test_transformers_finds_what_it_drafts_by(tmp_path: Path) -> None:
    head = block(tiny_target(), PORTABLE.model_copy(update={"rope_theta": 5e5}))
    config = AutoConfig.from_pretrained(written(layout_of("dflash", head), head, tmp_path / "out"))
    assert config.target_layer_ids == [1, 2, 3, 4, 5]
    assert (config.block_size, config.mask_token_id, config.num_hidden_layers) == (5, 9, 2)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert len(DFlashCache(config=config).layers) == 2


@pytest.mark.parametrize(("format", "settings", "ids"), HEADS)
def test_f68_a_folder_is_what_its_consumers_take(
    format: str, settings: BlockSettings, ids: torch.Tensor | None
) -> None:
    head = block(tiny_target(), settings.model_copy(update={"layers": (1, 4, 6)}), ids)
    layout = layout_of(format, head)
    stored = layout.write(head, torch.bfloat16)
    demand(stored, layout.consumers)
    assert "vllm-0.32.0-dflash" in layout.consumers
    wrong = [
        (without(stored, "layers.1.self_attn.k_norm.weight"), "k_norm.weight is missing"),
        (changed(stored, {"target_layer_ids": [1, 4, 6]}), "otherwise than the fields at the top"),
        (
            changed(
                stored,
                {
                    "target_layer_ids": [1, 4, 6],
                    "dflash_config": {
                        **stored.config["dflash_config"],
                        "target_layer_ids": [1, 4, 6],
                    },
                },
            ),
            "count states, one more",
        ),
        (changed(stored, {"mask_token_id": 600}), "mask_token_id is a row of no embedding"),
        (changed(stored, extra__weight=torch.ones(1)), "extra.weight is nothing that it reads"),
        (changed(stored, norm__weight=torch.ones(64)), "several dtypes: bfloat16, float32"),
        (changed(stored, {"base": "/home/someone/model"}), "config.base is nothing"),
        (changed(stored, {"layer_types": ["sliding_attention"] * 2}), "layer_types"),
    ]
    if ids is not None:
        wrong.append((without(stored, "d2t"), "d2t is missing"))
        wrong.append((without(stored, "embed_tokens.weight"), "embed_tokens.weight is missing"))
    else:
        row = torch.zeros(512, dtype=torch.int64)
        wrong.append((changed(stored, d2t=row), "d2t is (there without|nothing)"))
    for fault, problem in wrong:
        with pytest.raises(LayoutError, match=problem):
            demand(fault, layout.consumers)


@pytest.mark.parametrize(
    ("format", "update", "reason"),
    [
        ("vllm", {"norm_features": True}, r"head\.norm_features: false"),
        ("dflash", {"anchor_predicts": True}, r"no DFlash head: head\.anchor_predicts is True"),
        ("sglang", {"mask_token_id": None}, r"only vLLM takes a trained mask"),
        ("dflash", {"draft_vocab_size": SIZE}, r"--whole-vocabulary, or use --format vllm"),
        ("dflash", {"layers": (1, 4, 8)}, r"read state 8 after the final norm"),
        ("vllm", {"layers": (-1, 4)}, r"no state after the final norm"),
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
    folder = written(layout_of("dflash", head), head, tmp_path / "out")
    asked, stored = asked_of(target), opened(folder)
    layout = layout_in(stored)
    # The reference's own words: ids and mask inside alone, or no ids, and a prefix.
    assert head.contract.layers == (2, 3, 4, 5, 6)
    inside = {"target_layer_ids": None, "mask_token_id": None, "block_size": None}
    plain = changed(stored, inside | {"eagle_aux_hidden_state_layer_ids": None, "is_causal": None})
    prefixed = replace(plain, tensors={f"model.{n}": t for n, t in plain.tensors.items()})
    back = layout.read(prefixed, asked)
    back.bind(target)
    assert_same(head, back)
    two = block(target, PORTABLE.model_copy(update={"num_layers": 5}))
    whole = layout_of("dflash", two).write(two, torch.float64)
    nowhere = {k: v for k, v in whole.config["dflash_config"].items() if k != "target_layer_ids"}
    left = {"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": None}
    default = layout.read(changed(whole, left | {"dflash_config": nowhere}), asked)
    assert default.contract.layers == (2, 3, 4, 5, 6)  # round(1 + i * 4 / 4), one more

    embedding = target.get_input_embeddings().weight.detach().clone()
    shipped = changed(stored, embed_tokens__weight=embedding)
    assert layout.read(shipped, asked).settings == back.settings
    embedding[9] += 1.0  # the mask's own row, trained
    masked = layout.read(changed(stored, embed_tokens__weight=embedding), asked)
    assert torch.equal(masked.state_dict()["mask_embedding.weight"][0], embedding[9])

    embedding[10] += 1.0
    for fault, problem in [
        (
            changed(stored, embed_tokens__weight=embedding),
            "embed_tokens.weight is not the target's",
        ),
        (changed(stored, lm_head__weight=embedding), "lm_head.weight is not the target's"),
        (changed(stored, lm_head__weight=embedding[:100]), "no d2t to say which they are"),
        (changed(stored, {"attention_bias": True}), "attention_bias is True"),
        (changed(stored, {"layer_types": ["sliding_attention"]}), "sliding_attention"),
        (changed(stored, {"rope_theta": None, "rope_parameters": None}), "no rope_theta"),
        (changed(stored, {"hidden_size": 128}), "hidden_size is 128"),
        (changed(stored, {"num_hidden_layers": 1}), "num_hidden_layers is 1, the tensors have 2"),
        (changed(stored, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}), "--layers"),
        (without(stored, "norm.weight"), r"missing norm\.weight"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            layout.read(fault, asked)


def test_a_head_of_one_layer_reads_the_middle_where_nothing_is_said() -> None:
    """And the names that its context had at first."""
    target = tiny_target()
    head = block(target, PORTABLE.model_copy(update={"num_layers": 1, "layers": (5,)}))
    head.contract = head.contract.model_copy(update={"logit_scale": 0.5})
    layout = layout_of("dflash", head)
    stored = layout.write(head, torch.float32)
    assert stored.config["logit_scale"] == 0.5
    demand(stored, layout.consumers)
    nowhere = {"target_layer_ids": None, "eagle_aux_hidden_state_layer_ids": None}
    inner = {"mask_token_id": 9, "block_size": 5}
    bare = changed(stored, nowhere | {"dflash_config": inner})
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    old = replace(bare, tensors={names.get(n, n): t for n, t in bare.tensors.items()})
    read = layout_in(old).read(old, asked_of(target))
    assert read.contract.layers == (5,)
    assert read.state_dict()["fc.weight"].equal(stored.tensors["fc.weight"])
