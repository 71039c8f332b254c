"""What `speculate` finds out about the model it is used with, and leaves as it was."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest
import torch
from drafts import endless, own_greedy, prompt_of
from tiny import tiny_head, tiny_target
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TypicalLogitsWarper,
)

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import ContractError
from drafthead.inference import grow
from drafthead.inference.drafters import LookupDrafter, MergedDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sibling import Sibling
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape
from drafthead.inference.warps import UnsupportedSamplingError


def run(model: PreTrainedModel, method: Any, prompts: list[list[int]], **settings: Any) -> Any:
    ids = torch.tensor(prompts)
    asked = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **settings}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, custom_generate=method, **asked)


@pytest.mark.parametrize("merged", [False, True])
def test_f23_other_weights_are_told_once_and_keep_their_own_text(
    merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Both models in turn through one `speculate`: nothing of the first is left in the second."""
    mine = endless()
    other = tiny_target(num_layers=6, seed=9)
    other.generation_config.eos_token_id = None
    head = tiny_head(mine)
    drafter: Any = HeadDrafter(head, parse_shape("chain:3")) if merged else head
    method = speculate(MergedDrafter(LookupDrafter(3), drafter) if merged else drafter)
    for model, warnings in ((mine, 0), (other, 1), (other, 1), (mine, 1)):
        with caplog.at_level(logging.WARNING):
            out = run(model, method, [prompt_of(5)])
        assert out[0].tolist() == own_greedy(Target(model), prompt_of(5), 12)
        told = [r.message for r in caplog.records if "drafts may be useless" in r.message]
        assert len(told) == warnings
    assert "fingerprint" in told[0]


def test_f59_a_model_of_another_shape_is_refused_in_one_line() -> None:
    head = tiny_head(endless())
    for model in (tiny_target(num_layers=6, vocab_size=300), tiny_target(num_layers=3)):
        with pytest.raises(ContractError, match="the head was made for target") as caught:
            run(model, speculate(head), [prompt_of(5, vocab_size=300)])
        assert "\n" not in str(caught.value)


def test_an_encoder_with_a_decoder_is_refused_for_what_it_is() -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    with pytest.raises(ValueError, match="t5: its attention looks ahead"):
        run(T5ForConditionalGeneration(config), speculate(None), [prompt_of(5, vocab_size=64)])


def test_ids_come_as_generate_gives_them(target64: Target) -> None:
    """Whatever integers the prompt is made of."""
    for kind in (torch.int32, torch.int64):
        ids = torch.tensor([prompt_of(5)], dtype=kind)
        texts = [
            target64.model.generate(
                ids, max_new_tokens=3, pad_token_id=0, do_sample=False, custom_generate=method
            )
            for method in (speculate(None), None)
        ]
        assert texts[0].dtype == texts[1].dtype
        assert torch.equal(*texts)


def test_a_head_on_another_device_is_refused_in_one_line() -> None:
    head = tiny_head(endless()).to("meta")
    with pytest.raises(ValueError, match="the head is on meta, the model on cpu: move it"):
        run(endless(), speculate(head), [prompt_of(5)])


@pytest.mark.parametrize("tree", ["chain:3", "tree:2x2:4", "static:0,1,0.0,1.0"])
def test_a_sibling_drafts_too(target64: Target, tree: str) -> None:
    """One that is the target itself, so that every draft is right, and one that is not."""
    prompts = [prompt_of(5, seed) for seed in (1, 2)]
    texts = [own_greedy(target64, prompt, 12) for prompt in prompts]
    for model in (endless().double(), tiny_target(num_layers=2, seed=5).double()):
        sibling = Sibling.of(model, None, target64, check=False)
        assert run(target64.model, speculate(sibling, tree=tree), prompts).tolist() == texts


@pytest.mark.parametrize("shared", ["a method", "a head"])
def test_calls_from_several_threads_take_turns(shared: str) -> None:
    """Whether they share a method or only the head: none meets another's states."""
    model = endless()
    head = tiny_head(model)
    prompts = [prompt_of(n) for n in (3, 9, 17, 30)]
    texts = [own_greedy(Target(model), prompt, 30) for prompt in prompts]
    one = speculate(head, tree="tree:3x3:9")
    methods = [one if shared == "a method" else speculate(head) for _ in prompts]

    def work(number: int) -> list[list[int]]:
        settings = {"max_new_tokens": 30}
        return [
            run(model, methods[number], [prompts[number]], **settings)[0].tolist() for _ in range(3)
        ]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(work, range(len(prompts)))) == [[text] * 3 for text in texts]


def test_a_processor_may_decode_with_the_same_method() -> None:
    model = endless()
    method = speculate(tiny_head(model))
    inner: list[list[int]] = []

    def allowed(_: int, ids: Tensor) -> list[int]:
        if not inner:
            inner.append(run(model, method, [prompt_of(7)])[0].tolist())
        return list(range(512))

    out = run(model, method, [prompt_of(5)], prefix_allowed_tokens_fn=allowed)
    assert out[0].tolist() == own_greedy(Target(model), prompt_of(5), 12)
    assert inner == [own_greedy(Target(model), prompt_of(7), 12)]


def test_an_auto_tree_is_measured_once_for_each_model_and_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = endless(), endless()
    method = speculate(tiny_head(mine), tree="auto:2x2:4")
    measured: list[tuple[PreTrainedModel, int]] = []

    def measure(target: Target, head: DraftHead, **asked: Any) -> Any:
        measured.append((target.model, asked["batch"]))
        return costs(target, head, **asked)

    costs = grow.measure
    monkeypatch.setattr(grow, "measure", measure)
    for model, rows in ((mine, 1), (mine, 1), (mine, 2), (other, 1), (mine, 1)):
        run(model, method, [prompt_of(5)] * rows, max_new_tokens=4)
    assert measured == [(mine, 1), (mine, 2), (other, 1)]


def test_nothing_of_a_run_is_held_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's keys and values are as long as the text."""
    model = endless()
    head = tiny_head(model)
    states: list[ref[object]] = []
    begin = type(head).open

    def noting(self: DraftHead, batch: int, capacity: int) -> Any:
        state = begin(self, batch, capacity)
        states.append(ref(state))
        return state

    monkeypatch.setattr(type(head), "open", noting)
    method = speculate(head)
    run(model, method, [prompt_of(5)])
    gc.collect()
    assert len(states) == 1
    assert states[0]() is None


def test_what_is_no_drafter_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="give a bound head, a drafter or None, not 'runs/head'"):
        speculate("runs/head")  # type: ignore[arg-type]


def test_training_modules_stay_in_training_mode() -> None:
    model = endless().train()
    model.lm_head.eval()
    run(model, speculate(None), [prompt_of(5)])
    assert not model.lm_head.training
    assert all(m.training for m in model.modules() if m is not model.lm_head)


def test_f46_padding_without_a_pad_token_is_the_first_end_token(target64: Target) -> None:
    """As in generate itself."""
    prompts = [prompt_of(5, seed) for seed in (1, 2)]
    ends = [own_greedy(target64, prompts[0], 12)[5 + 5], 511]
    settings = {"eos_token_id": ends, "pad_token_id": None}
    model = endless().double()
    model.generation_config.pad_token_id = None
    ours = run(model, speculate(None), prompts, **settings)
    assert torch.equal(ours, run(model, None, prompts, **settings))
    assert ours[0, -1] == ends[0]


@pytest.mark.parametrize("tree", ["chain:3", "tree:3x3:8"])
def test_f52_a_processor_acts_on_greedy_text_too(
    target64: Target, head64: DraftHead, tree: str
) -> None:
    """Typical decoding may remove the likeliest token."""

    def typical() -> LogitsProcessorList:
        return LogitsProcessorList([TypicalLogitsWarper(0.05)])

    prompt = [prompt_of(5)]
    own = run(target64.model, None, prompt, logits_processor=typical())
    ours = run(target64.model, speculate(head64, tree=tree), prompt, logits_processor=typical())
    assert torch.equal(ours, own)
    assert own[0].tolist() != own_greedy(target64, prompt[0], 12)


def test_f54_positions_of_the_callers_own_are_refused(target64: Target) -> None:
    ids = [prompt_of(5)]
    own: Tensor = torch.arange(5)[None]
    run(target64.model, speculate(None), ids, position_ids=own)
    with pytest.raises(UnsupportedSamplingError, match=r"position_ids other than 0, 1, 2, …"):
        run(target64.model, speculate(None), ids, position_ids=own + 3)


def test_logits_of_a_half_precision_model_come_in_float32() -> None:
    asked = {"return_dict_in_generate": True, "output_logits": True}
    out = run(endless().bfloat16(), speculate(None), [prompt_of(5)], **asked)
    assert {step.dtype for step in out.logits} == {torch.float32}
