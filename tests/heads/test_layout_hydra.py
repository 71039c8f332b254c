"""Hydra archives against the published formula, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import asked_of, assert_same, changed, made, opened, returned, without, written
from ladder import REDUCED, SIZE, ladder_batch, rollout
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.hydra import HydraHead, HydraSettings
from drafthead.heads.layouts.layout import LayoutError, layout_of
from drafthead.heads.layouts.recognise import layout_in
from drafthead.heads.layouts.schema import demand

BORROWED = HydraSettings(draft_vocab_size=None, unroll_steps=3)
OWN = HydraSettings(draft_vocab_size=None, unroll_steps=2, mlp_layers=2, own_rows=True, dropout=0.2)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def hydra(
    target: LlamaForCausalLM, settings: HydraSettings, ids: Tensor | None = None
) -> HydraHead:
    head = made(settings, target, ids)
    assert isinstance(head, HydraHead)
    return head


def served(
    tensors: dict[str, Tensor], heads: int, blocks: int, state: Tensor, ids: Tensor
) -> Tensor:
    """(K, V) logits after one state (D,) and the K tokens behind it."""
    seen, logits = [state], []
    for k in range(heads):
        seen.append(tensors["input_embed_fn.weight"][ids[k]])
        x = torch.cat(seen)
        for j in range(blocks):
            place = f"hydra_mlp.{k}.{j}"
            inner = tensors[f"{place}.linear.weight"] @ x + tensors[f"{place}.linear.bias"]
            if j == 0:
                x = tensors[f"{place}.res_connection.weight"] @ x
                x = x + tensors[f"{place}.res_connection.bias"]
            x = x + inner / (1 + (-inner).exp())
        rows = f"hydra_lm_head.{k}"
        logits.append(tensors[f"{rows}.weight"] @ x + tensors[f"{rows}.bias"])
    return torch.stack(logits)


@pytest.mark.parametrize("settings", [BORROWED, OWN])
def test_the_archive_drafts_as_the_head_and_comes_back_equal(
    settings: HydraSettings, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = hydra(target, settings)
    folder = written(layout_of("hydra", head), head, tmp_path / "out")
    tensors = torch.load(folder / "hydra_lm_head.pt", weights_only=True)
    assert all(type(x) is Tensor for x in tensors.values())
    text = torch.randint(0, 512, (1, 12), generator=torch.Generator().manual_seed(7))
    batch, K = ladder_batch(head, target, text), settings.unroll_steps
    state = batch.last_hidden[0, 6]
    logits = served(tensors, K, settings.mlp_layers, state, text[0, 7 : 7 + K])
    expected = rollout(head, batch, 0, 6, K)
    assert expected.std() > 0.05
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    assert_same(head, returned(folder, target))


def test_f68_an_archive_is_what_the_reference_takes() -> None:
    head = hydra(tiny_target(), OWN)
    layout = layout_of("hydra", head)
    stored = layout.write(head, torch.bfloat16)
    demand(stored, layout.consumers)
    for fault, problem in [
        (without(stored, "input_embed_fn.weight"), "input_embed_fn.weight is missing"),
        (without(stored, "hydra_mlp.1.1.linear.bias"), r"1\.1\.linear\.bias is missing"),
        (changed(stored, {"hydra_head_arch": "prefix-mlp"}), "hydra_head_arch"),
        (changed(stored, {"hydra_num_layers": 1}), r"hydra_mlp\.0\.1\.linear\.\w+ is nothing"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            demand(fault, layout.consumers)


def test_archives_of_others_are_read_or_refused_by_name(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, asked = hydra(target, BORROWED), asked_of(target)
    stored = opened(written(layout_of("hydra", head), head, tmp_path / "out"))
    layout = layout_in(stored)
    assert layout.name == "hydra"
    rows = [name for name in stored.tensors if name.startswith("hydra_lm_head")]
    plain = {"hydra_lm_head": None, "hidden_size": None, "vocab_size": None}
    assert_same(head, layout.read(changed(without(stored, *rows), plain), asked))
    other = torch.zeros_like(target.lm_head.weight)
    for fault, problem in [
        (changed(stored, {"hydra_head_arch": "prefix-mlp"}), "'prefix-mlp'; only 'mlp'"),
        (changed(stored, {"grounded_heads": False}), "not grounded"),
        (changed(stored, {"hidden_state_offset": 1}), "hidden_state_offset is 1"),
        (changed(stored, {"hydra_num_heads": 4}), "hydra_num_heads is 4, the tensors have 3"),
        (changed(stored, {"hydra_num_layers": 2}), "hydra_num_layers is 2"),
        (changed(stored, input_embed_fn__weight=other), "input_embed_fn.weight is not the target"),
        (changed(stored, hydra_lm_head__0__weight=other), "hydra_lm_head is 'target'"),
        (changed(without(stored, *rows), {"hydra_lm_head": "own"}), "output rows: none"),
        (without(stored, rows[0]), "for some depths only"),
        (without(stored, "hydra_mlp.0.0.linear.bias"), r"missing hydra_mlp\.0\.0\.linear\.bias"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            layout.read(fault, asked)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"prefix_attention": True}, r"head\.prefix_attention: false"),
        ({"mlp_layers": 3}, "mlp_layers of at most 2"),
        ({"draft_vocab_size": SIZE}, "--whole-vocabulary"),
        ({"draft_vocab_size": SIZE, "own_rows": True}, r"head\.draft_vocab_size: null"),
    ],
)
def test_what_the_reference_would_run_otherwise_is_refused(
    update: dict[str, object], reason: str
) -> None:
    ids = REDUCED if "draft_vocab_size" in update else None
    head = hydra(tiny_target(), BORROWED.model_copy(update=update), ids)
    with pytest.raises(LayoutError, match=reason):
        layout_of("hydra", head)
