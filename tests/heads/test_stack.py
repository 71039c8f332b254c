"""EAGLE-3 heads of several layers: their tensors, packed rows, starts, and what is recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_batch, tiny_head, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads import stack
from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings
from drafthead.heads.load import load_head

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


def make_head(target: LlamaForCausalLM, layers: int = 2) -> Eagle3Head:
    return tiny_head(target, Eagle3Settings(draft_vocab_size=None, num_layers=layers))


def make_batch(target: LlamaForCausalLM) -> TeacherBatch:
    """Three rows of 18 tokens, supervised up to different ends."""
    ids = torch.randint(0, 512, (3, 18), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(18) < torch.tensor([[18], [9], [13]])
    return tiny_batch(target, ids, mask & (torch.arange(18) >= 3), LAYERS)


def test_upper_layers_have_the_names_and_shapes_of_ordinary_ones(target: LlamaForCausalLM) -> None:
    """Serving engines read them so: the first layer's attention is 2 D wide, the others' D."""
    one, two = (make_head(target, layers).state_dict() for layers in (1, 2))
    ordinary = {
        name.removeprefix("model."): tensor.shape
        for name, tensor in target.state_dict().items()
        if name.startswith("model.layers.1.")
    }
    added = {name: tensor.shape for name, tensor in two.items() if name not in one}
    assert added == ordinary
    assert make_head(target, 2).config.num_hidden_layers == 2


def test_a_stored_head_of_two_layers_drafts_the_same(
    target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("head")
    head, batch = make_head(target), make_batch(target)
    head.save_pretrained(folder)
    loaded = load_head(folder)
    loaded.bind(target)
    for mine, theirs in zip(head.unroll(batch, 2), loaded.unroll(batch, 2), strict=True):
        assert mine.logits.equal(theirs.logits)


def test_f36_packed_rows_equal_rows_alone(target: LlamaForCausalLM) -> None:
    head, batch = make_head(target, 3), make_batch(target)
    packed = batch.packed()
    T = packed.ids.shape[1]
    for together, alone in zip(head.unroll(packed, 3), head.unroll(batch, 3), strict=True):
        labels = packed.ids.flatten()[together.teacher + 1]
        assert T == 18 + 9 + 13
        assert labels.equal(batch.ids.flatten()[alone.teacher + 1])
        torch.testing.assert_close(together.logits, alone.logits, atol=1e-5, rtol=0)


def test_a_long_prompt_is_taken_in_by_portions(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, batch = make_head(target), make_batch(target)
    given = batch.features, batch.ids.roll(-1, dims=1), torch.tensor([17, 8, 12])
    whole = head.extend(head.open(3, 20), *given)
    monkeypatch.setattr(stack, "CHUNK", 5)
    torch.testing.assert_close(head.extend(head.open(3, 20), *given), whole, atol=1e-6, rtol=0)


def test_recomputing_changes_no_gradient_of_any_layer(target: LlamaForCausalLM) -> None:
    """F38: every layer's weights learn from every depth."""
    head, batch = make_head(target, 3), make_batch(target)

    def gradients(depth: int) -> dict[str, Tensor]:
        head.zero_grad()
        list(head.unroll(batch, depth + 1))[depth].logits.logsumexp(-1).sum().backward()
        return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}

    for depth in range(3):
        head.gradient_checkpointing = False
        kept = gradients(depth)
        head.gradient_checkpointing = True
        again = gradients(depth)
        assert kept.keys() == dict(head.named_parameters()).keys()
        for name, gradient in kept.items():
            assert gradient.any(), name
            torch.testing.assert_close(again[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_batch_with_nothing_supervised_still_reaches_every_weight(
    target: LlamaForCausalLM,
) -> None:
    """F27: ranks that sum gradients must sum the same ones."""
    head, batch = make_head(target, 3), make_batch(target)
    blank = replace(batch, mask=torch.zeros_like(batch.mask))
    total = torch.zeros(())
    for prediction in head.unroll(blank, 2):
        total = total + prediction.logits.sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in head.parameters())


def test_the_closed_form_start_goes_through_upper_layers_unchanged(
    target: LlamaForCausalLM,
) -> None:
    batch, made = make_batch(target), {}
    for layers in (1, 3):
        settings = Eagle3Settings(draft_vocab_size=None, num_layers=layers)
        torch.manual_seed(0)
        head = settings.build(describe(target, None, LAYERS, {}), target.config, None)
        head.bind(target)
        head.layers[0].mlp.down_proj.weight.data.zero_()  # it starts at random, by its own scale
        head.warm_start([batch])
        made[layers] = next(iter(head.unroll(batch, 1))).logits
    assert made[1].std() > 0.01
    torch.testing.assert_close(made[1], made[3], atol=1e-5, rtol=0)
