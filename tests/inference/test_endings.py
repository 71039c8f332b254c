"""Where a text may begin and must end, and what stops decoding instead of a wrong token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from drafts import (
    AlwaysWrong,
    HalfRight,
    Oracle,
    Random,
    endless,
    ids_of,
    keyed,
    own_greedy,
    prompt_of,
    rows_of_run,
)
from tiny import tiny_head, tiny_tokenizer
from torch import Tensor

from drafthead.inference.decoder import decode
from drafthead.inference.evaluate import Settings, answer
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape

TREE = "tree:3x3:8"


# Non-finite logits


def spoilt(
    target: Target, spoil: Callable[[Tensor], None], layer: int | None = None, alone: bool = False
) -> Any:
    """Change logits, or what leaves a layer, wherever a forward has two tokens or more; with
    `alone` where it has one too. Returns the hook's handle.
    """

    def hook(module: object, inputs: object, rows: Tensor) -> Tensor:
        if alone or rows.shape[1] > 1:
            rows = rows.clone()
            spoil(rows)
        return rows

    model = target.model
    return (model.lm_head if layer is None else model.model.layers[layer]).register_forward_hook(
        hook
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f44_a_broken_branch_that_is_not_kept_changes_nothing(
    target32: Target, value: float, temperature: float
) -> None:
    def sampler() -> Sampler:
        return keyed(target32) if temperature else Sampler()

    prompts = [prompt_of(5)]
    texts = ids_of(target32, prompts, sampler(), None, 12)
    handle = spoilt(target32, lambda logits: logits[:, 1:].fill_(value))
    try:
        for tree in (False, True):
            drafter = AlwaysWrong(texts, tree=tree)
            assert ids_of(target32, prompts, sampler(), drafter, 12) == texts
    finally:
        handle.remove()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layer", [0, 3, 5])
def test_f44_a_branch_that_poisons_its_root_is_dropped_with_the_whole_draft(
    target32: Target, layer: int, value: float, temperature: float
) -> None:
    """Attention weighs what it must not see by 0, and 0 times NaN is NaN: nothing of it may stay
    in the cache either. Beside it, a row whose draft is right.
    """

    def sampler() -> Sampler:
        return keyed(target32, 2) if temperature else Sampler()

    prompts = [prompt_of(1, seed) for seed in (1, 2)]  # of one token, so that prefills are sound
    texts = ids_of(target32, prompts, sampler(), None, 12)
    handle = spoilt(target32, lambda rows: rows[:, 1:].fill_(value), layer)
    try:
        for tree in (False, True):
            drafter = HalfRight(texts, [0, 4], tree=tree)
            assert ids_of(target32, prompts, sampler(), drafter, 12) == texts
    finally:
        handle.remove()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_f44_a_broken_root_is_an_error_and_never_token_zero(
    target32: Target, value: float, rule: str
) -> None:
    """The root's own row, whether drafts are verified beside it or not."""
    sampler = Sampler() if rule == "greedy" else keyed(target32, rule=rule)
    handle = spoilt(target32, lambda logits: logits[:, 0].fill_(value), alone=True)
    try:
        for drafter in (Random(1), None):
            with pytest.raises(FloatingPointError, match="not finite at a committed token"):
                ids_of(target32, [prompt_of(5)], sampler, drafter, 12)
    finally:
        handle.remove()


def test_f44_one_nan_among_good_logits_is_an_error(target32: Target) -> None:
    handle = spoilt(target32, lambda logits: logits[:, 0, 7].fill_(float("nan")), alone=True)
    try:
        with pytest.raises(FloatingPointError):
            ids_of(target32, [prompt_of(5)], Sampler(), Random(1), 12)
    finally:
        handle.remove()


# Where a text ends


@pytest.mark.parametrize("length", range(1, 9))
def test_f46_an_end_token_inside_a_block_ends_the_text(target32: Target, length: int) -> None:
    prompt = prompt_of(4)
    text = own_greedy(target32, prompt, 24)
    eos = text[4 + 5]
    wanted = text[: text.index(eos, 4) + 1]
    for tree in (False, True):
        drafter = Oracle([text], length, tree=tree)
        (row,) = rows_of_run(target32, [prompt], drafter, 24, [eos])
        assert row.ids == wanted
        assert row.new_ids.count(eos) == 1
        assert sum(r.emitted for r in row.rounds) == len(row.new_ids) - 1, "counted to the end only"


def test_f47_every_declared_end_token_ends_the_text() -> None:
    """The union of the generation config's and the tokenizer's, plain and drafted."""
    model = endless(num_layers=3)
    target = Target(model, tiny_tokenizer())
    prompt = prompt_of(4)
    text = own_greedy(target, prompt, 24)
    model.generation_config.eos_token_id = [511, text[4 + 6]]
    settings = Settings(max_new_tokens=24)
    end = text.index(text[4 + 6], 4)
    for drafter in (None, Oracle([text], 6)):
        assert answer(target, drafter, prompt, settings).ids == text[: end + 1]
    target.tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(text[4 + 3])
    end = min(end, text.index(text[4 + 3], 4))
    for drafter in (None, Oracle([text], 6)):
        assert answer(target, drafter, prompt, settings).ids == text[: end + 1]


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13])
def test_f48_exactly_as_many_tokens_as_asked_for(target32: Target, tokens: int) -> None:
    """Blocks of 6; the drafter is asked for no more than is left."""
    prompt = prompt_of(4)
    text = own_greedy(target32, prompt, 30)
    for tree in (False, True):
        (row,) = rows_of_run(target32, [prompt], Oracle([text], 6, tree=tree), tokens)
        assert row.ids == text[: 4 + tokens]
        assert all(r.accepted + 1 == r.emitted for r in row.rounds), "nothing was cut"


def test_f48_no_tokens_at_all_is_refused(target32: Target) -> None:
    with pytest.raises(ValueError, match="max_new_tokens is 0: ask for at least 1"):
        decode(target32, [[3]], Sampler(), max_new_tokens=0)


# Prompts and limits


def test_f57_an_empty_prompt_is_refused(target64: Target) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens: give at least one"):
        decode(target64, [[4], []], Sampler(), max_new_tokens=4)


def test_a_prompt_longer_than_the_context_is_refused(target64: Target) -> None:
    with pytest.raises(ValueError, match=r"prompt of 250 tokens \+ 7 new ones exceed .* 256"):
        decode(target64, [prompt_of(250)], Sampler(), max_new_tokens=7)
    text = own_greedy(target64, prompt_of(250), 6)
    drafter = Oracle([text], 6, tree=True)
    assert ids_of(target64, [prompt_of(250)], Sampler(), drafter, 6) == [text]


def test_f55_past_the_drafts_own_limit_decoding_goes_on_with_one_notice(
    target64: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Draft limit 64, prompt 50, 60 new tokens."""
    head = tiny_head(endless()).double()
    head.bind(target64.model, check=False)
    head.config.max_position_embeddings = 64
    prompt = prompt_of(50)
    text = own_greedy(target64, prompt, 60)
    with caplog.at_level(logging.WARNING):
        for shape in ("chain:3", TREE):
            drafter = HeadDrafter(head, parse_shape(shape))
            assert ids_of(target64, [prompt], Sampler(), drafter, 60) == [text]
    notices = [r for r in caplog.records if "made for 64 positions" in r.getMessage()]
    assert len(notices) == 1
