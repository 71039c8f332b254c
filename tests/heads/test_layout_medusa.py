"""Medusa folders against the published formula, in every naming, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported import (
    asked_of,
    assert_same,
    changed,
    made,
    opened,
    returned,
    without,
    written,
)
from ladder import REDUCED, SIZE, ladder_batch, rollout
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.layouts.files import write_folder
from drafthead.heads.layouts.layout import LayoutError, Stored, layout_of
from drafthead.heads.layouts.recognise import layout_in
from drafthead.heads.layouts.schema import demand
from drafthead.heads.medusa import MedusaHead, MedusaSettings
from drafthead.heads.medusa2 import Medusa2Settings

BORROWED = MedusaSettings(draft_vocab_size=None, unroll_steps=3)
OWN = MedusaSettings(draft_vocab_size=None, unroll_steps=2, blocks=2, own_rows=True)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def medusa(
    target: LlamaForCausalLM, settings: MedusaSettings, ids: Tensor | None = None
) -> MedusaHead:
    head = made(settings, target, ids)
    assert isinstance(head, MedusaHead)
    return head


def served(tensors: dict[str, Tensor], heads: int, blocks: int, state: Tensor) -> Tensor:
    """(K, V) logits of one state (D,): blocks x + SiLU(Wx + b), then the head's own rows."""
    logits = []
    for k in range(heads):
        x = state
        for j in range(blocks):
            inner = tensors[f"{k}.{j}.linear.weight"] @ x + tensors[f"{k}.{j}.linear.bias"]
            x = x + inner / (1 + (-inner).exp())
        logits.append(tensors[f"{k}.{blocks}.weight"] @ x)
    return torch.stack(logits)


@pytest.mark.parametrize("settings", [BORROWED, OWN])
def test_f70_the_folder_drafts_as_the_head_and_comes_back_equal(
    settings: MedusaSettings, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = medusa(target, settings)
    layout = layout_of("vllm", head)
    folder = written(layout, head, tmp_path / "out")
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    text = torch.randint(0, 512, (1, 12), generator=torch.Generator().manual_seed(7))
    batch = ladder_batch(head, target, text)
    K = settings.unroll_steps
    logits = served(tensors, K, settings.blocks, batch.last_hidden[0, 6])
    expected = rollout(head, batch, 0, 6, K)
    assert expected.std() > 0.05
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    rows = [tensors[f"{k}.{settings.blocks}.weight"] for k in range(K)]
    if not settings.own_rows:  # one storage before, none lost and none shared now
        assert all(torch.equal(own, target.lm_head.weight) for own in rows)
    assert len({own.data_ptr() for own in rows}) == K
    assert_same(head, returned(folder, target))


def test_f68_a_folder_is_what_its_consumers_take() -> None:
    head = medusa(tiny_target(), BORROWED)
    layout = layout_of("medusa", head)
    stored = layout.write(head, torch.float16)
    demand(stored, layout.consumers)
    assert {name.split("-")[0] for name in layout.consumers} == {"vllm", "tgi", "medusa"}
    for fault, problem in [
        (without(stored, "1.0.linear.bias"), r"1\.0\.linear\.bias is missing"),
        (without(stored, "2.1.weight"), r"2\.1\.weight is missing"),
        (changed(stored, {"medusa_fc_bias": False}), "medusa_fc_bias = False"),
        (changed(stored, {"hidden_size": None}), "hidden_size is missing"),
        (changed(stored, {"medusa_num_heads": 2}), r"2\.0\.linear\.weight is nothing"),
        (changed(stored, {"truncated_vocab_size": 8}), "truncated"),
        (changed(stored, {"base_model_name_or_path": "/data/target"}), "a place of this machine"),
        (replace(stored, weights="model.safetensors"), "tensors are in model.safetensors"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            demand(fault, layout.consumers)


def test_every_published_naming_is_read(target: LlamaForCausalLM, tmp_path: Path) -> None:
    head, asked = medusa(target, OWN), asked_of(target)
    stored = opened(written(layout_of("vllm", head), head, tmp_path / "own"))
    layout = layout_in(stored)
    assert layout.name == "medusa"
    old = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "someone/it"}
    prefixed = {f"medusa_heads.{name}": x for name, x in stored.tensors.items()}
    new = {
        f"lm_heads.{n.split('.')[0]}.weight"
        if "linear" not in n
        else "blocks.{}.layers.{}.{}".format(*n.replace(".linear", "").split(".")): x
        for n, x in stored.tensors.items()
    }
    for tensors in (stored.tensors, prefixed, new):
        assert_same(head, layout.read(Stored(old, tensors), asked))
    # A pickle of tensors alone, as the reference writes it.
    folder = write_folder(Stored(old, stored.tensors, "medusa_lm_head.pt"), tmp_path / "pt")
    assert_same(head, returned(folder, target))
    # "v2": the trainer stored no rows, which are the target's.
    borrowed = medusa(target, BORROWED)
    written_out = layout_of("medusa", borrowed).write(borrowed, torch.float64)
    version2 = without(written_out, *[f"{k}.1.weight" for k in range(3)])
    named = {"medusa_lm_head": None, "medusa_fc_bias": None, "version": "2"}
    assert_same(borrowed, layout.read(changed(version2, named), asked))
    # One set of rows for all heads, the target's or not.
    one = {"medusa_lm_head": None, "original_lm_head": True}
    rows = target.lm_head.weight.detach()
    shared = layout.read(changed(version2, one, lm_head__weight=rows), asked)
    assert_same(borrowed, shared)
    trained = layout.read(changed(version2, one, lm_head__weight=rows + 1), asked)
    trained.bind(target)
    text = torch.arange(5, 17)[None]
    batch = ladder_batch(borrowed, target, text)
    assert isinstance(trained, MedusaHead)
    expected = served(
        {**version2.tensors, **{f"{k}.1.weight": rows + 1 for k in range(3)}},
        3,
        1,
        batch.last_hidden[0, 4],
    )
    torch.testing.assert_close(rollout(trained, batch, 0, 4, 3), expected, atol=1e-9, rtol=0)


def test_f74_a_config_of_another_layout_is_refused(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    own, borrowed = medusa(target, OWN), medusa(target, BORROWED)
    with_rows = layout_of("vllm", own).write(own, torch.float64)
    without_rows = layout_of("medusa", borrowed).write(borrowed, torch.float64)
    layout, asked = layout_in(with_rows), asked_of(target)
    bare = without(without_rows, *[f"{k}.1.weight" for k in range(3)])
    shared = changed(bare, lm_head__weight=target.lm_head.weight.detach())
    for config, tensors, problem in [
        (without_rows.config, with_rows.tensors, "says 3 heads, the tensors have 2"),
        (with_rows.config, without_rows.tensors, "says 2 heads, the tensors have 3"),
        (with_rows.config | {"medusa_num_heads": 3}, bare.tensors, "says 2 blocks in each head"),
        (without_rows.config | {"medusa_lm_head": "own"}, bare.tensors, "no head has output rows"),
        (with_rows.config | {"medusa_lm_head": "target"}, with_rows.tensors, "are not the target"),
        (
            without_rows.config | {"original_lm_head": True},
            without_rows.tensors,
            "do not share one",
        ),
        (without_rows.config, shared.tensors, "original_lm_head is not true"),
        (without_rows.config | {"medusa_fc_bias": False}, bare.tensors, "blocks have biases"),
        (without_rows.config | {"hidden_size": 32}, bare.tensors, "says 32 as hidden width"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            layout.read(Stored(config, tensors, place="a folder"), asked)
    for tensors, problem in [
        ({**bare.tensors, "0.0.norm.weight": torch.ones(2)}, r"not of a Medusa head: 0\.0\.norm"),
        ({n: t for n, t in bare.tensors.items() if n != "1.0.linear.weight"}, r"block 1\.0"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            layout.read(Stored(without_rows.config, tensors, place="a folder"), asked)


def test_what_a_reader_would_run_otherwise_is_refused() -> None:
    target = tiny_target()
    own = medusa(target, OWN)
    with pytest.raises(LayoutError, match=r"repeats one block .* use --format vllm"):
        layout_of("medusa", own)
    with torch.no_grad():  # as the reference would have trained them
        for sequence in own.medusa_head:
            sequence[1].load_state_dict(sequence[0].state_dict())  # type: ignore[index]
    assert layout_of("medusa", own).name == "medusa"
    reduced = MedusaSettings(draft_vocab_size=SIZE, unroll_steps=2)
    with pytest.raises(LayoutError, match="--whole-vocabulary"):
        layout_of("vllm", medusa(target, reduced, REDUCED))
    trained = reduced.model_copy(update={"own_rows": True})
    with pytest.raises(LayoutError, match=r"head\.draft_vocab_size: null"):
        layout_of("vllm", medusa(target, trained, REDUCED))
    with pytest.raises(LayoutError, match=r"no medusa heads; use --format medusa or vllm"):
        layout_of("sglang", own)
    adapted = made(Medusa2Settings(draft_vocab_size=None, unroll_steps=2), target)
    with pytest.raises(LayoutError, match="its own adapter changes it"):
        layout_of("vllm", adapted)


def test_a_scale_of_the_target_is_told() -> None:
    head = medusa(tiny_target(), BORROWED)
    head.contract = head.contract.model_copy(update={"logit_scale": 0.3})
    layout = layout_of("medusa", head)
    stored = layout.write(head, torch.float32)
    assert stored.config["logit_scale"] == 0.3
    demand(stored, layout.consumers)
