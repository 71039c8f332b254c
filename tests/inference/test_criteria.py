"""Stopping criteria are asked for every token in order, whatever was drafted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from calls import generate, own
from drafts import HalfRight, Oracle, own_greedy, prompt_of
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.warps import UnsupportedSamplingError

PROMPT = prompt_of(5)


def stopping(*criteria: StoppingCriteria) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList(criteria)}


class AfterToken(StoppingCriteria):
    """Stops behind a token; notes the texts it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.seen += input_ids.tolist()
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("length", [1, 3, 6])
def test_criteria_see_every_token_in_order(target64: Target, length: int) -> None:
    text = own_greedy(target64, PROMPT, 12)
    criterion = AfterToken(text[5 + 6])
    out = generate(target64, Oracle([text], length), [PROMPT], **stopping(criterion))
    end = text.index(text[5 + 6], 5) + 1
    assert out[0].tolist() == text[:end]
    assert criterion.seen == [text[:n] for n in range(6, end + 1)]


def test_criteria_are_asked_about_the_last_token_too(target64: Target) -> None:
    """As generate asks them at its limit."""
    mine, theirs = AfterToken(-1), AfterToken(-1)
    text = own_greedy(target64, PROMPT, 12)
    generate(target64, Oracle([text], 5), [PROMPT], **stopping(mine))
    own(target64, [PROMPT], **stopping(theirs))
    assert mine.seen == theirs.seen
    assert mine.seen[-1] == text


def test_f54_criteria_see_the_padding_that_lengths_count(target64: Target) -> None:
    prompts = [prompt_of(4), prompt_of(9)]
    texts = [own_greedy(target64, p, 12) for p in prompts]
    mine, theirs = AfterToken(-1), AfterToken(-1)
    generate(target64, HalfRight(texts, [3, 1]), prompts, **stopping(mine))
    own(target64, prompts, **stopping(theirs))
    assert sorted(mine.seen) == sorted(theirs.seen)


@pytest.mark.parametrize("old", [False, True])
def test_each_row_ends_by_its_own_verdict(target64: Target, old: bool) -> None:
    """Verdicts of shape (B,), (B, 1) as documented, or a plain bool as before."""
    prompts = [prompt_of(4), prompt_of(9)]
    texts = [own_greedy(target64, p, 12) for p in prompts]
    token = texts[0][4 + 5]
    assert token not in texts[1][9:]

    class After(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
            return int(input_ids[0, -1]) == token if old else (input_ids[:, -1:] == token)

    out = generate(target64, HalfRight(texts, [3, 1]), prompts, **stopping(After()))
    end = texts[0].index(token, 4) + 1
    assert out[0, 9:].tolist() == [*texts[0][4:end], *[0] * (12 - (end - 4))]
    assert out[1].tolist() == texts[1]


def test_verdicts_about_other_rows_are_refused(target64: Target) -> None:
    class Fixed(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
            return input_ids[:, -1] == torch.tensor([3, 4])

    with pytest.raises(UnsupportedSamplingError, match="Fixed gave 2 verdicts for one row"):
        generate(target64, None, [prompt_of(4), prompt_of(9)], **stopping(Fixed()))


def test_a_criterion_that_needs_scores_is_refused(target64: Target) -> None:
    """By its type, or as soon as it looks where generate would have shown it scores."""

    class Sure(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: object) -> Tensor:
            return scores is not None and scores[-1].amax(-1) > 1e9

    for criterion in (ConfidenceCriteria(0.4), Sure()):
        with pytest.raises(UnsupportedSamplingError, match="scores") as caught:
            generate(
                target64,
                None,
                [PROMPT],
                return_dict_in_generate=True,
                output_scores=True,
                **stopping(criterion),
            )
        assert "\n" not in str(caught.value)
    assert generate(target64, None, [PROMPT], **stopping(Sure())).shape == (1, 17)


def test_time_runs_out(target64: Target) -> None:
    """At the token that comes after it: never before the first one."""
    text = own_greedy(target64, PROMPT, 12)
    for drafter in (None, Oracle([text])):
        out = generate(target64, drafter, [PROMPT], max_time=1e-9)
        assert out[0].tolist() == text[:6]
        late = MaxTimeCriteria(60, initial_timestamp=time.time())
        assert generate(target64, drafter, [PROMPT], **stopping(late))[0].tolist() == text


# Limits


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13])
def test_f48_limits_count_as_generate_counts_them(target64: Target, tokens: int) -> None:
    """`max_new_tokens`, `max_length` with the prompt, and a criterion of the caller's own."""
    text = own_greedy(target64, PROMPT, 13)
    forms: list[dict[str, Any]] = [
        {"max_new_tokens": tokens},
        {"max_new_tokens": None, "max_length": 5 + tokens},
        {"max_new_tokens": 13, **stopping(MaxLengthCriteria(5 + tokens))},
    ]
    for settings in forms:
        for tree in (False, True):
            out = generate(target64, Oracle([text], 6, tree=tree), [PROMPT], **settings)
            assert out[0].tolist() == text[: 5 + tokens]


def test_f48_no_tokens_at_all(target64: Target) -> None:
    """What generate refuses is refused; where its loop emits one token in any case, so do we."""
    for none in ({"max_new_tokens": 0}, {"max_new_tokens": None, "max_length": 5}):
        for call in (own, lambda *args, **kw: generate(args[0], None, args[1], **kw)):
            with pytest.raises(
                ValueError, match=r"`max_length` is set to 5|must be greater than 0"
            ):
                call(target64, [PROMPT], **none)
    short = stopping(MaxLengthCriteria(3))
    assert torch.equal(
        generate(target64, None, [PROMPT], **short), own(target64, [PROMPT], **short)
    )


# Stop strings


def stop_in(text: list[int], at: int) -> str:
    """What two tokens of a continuation read, the first of such pairs from `at` on that is text."""
    tokenizer = tiny_tokenizer()
    pairs = (tokenizer.decode(text[i : i + 2]) for i in range(5 + at, len(text)))
    return next(str(pair) for pair in pairs if "\ufffd" not in pair and len(pair) > 1)


@pytest.mark.parametrize("length", range(1, 6))
def test_f49_a_stop_string_over_two_tokens_inside_a_block(target64: Target, length: int) -> None:
    """Or over two blocks, by the block's length: equal to generate's own."""
    tokenizer = tiny_tokenizer()
    text = own_greedy(target64, PROMPT, 20)
    for at in (3, 7):
        asked = {"max_new_tokens": 20, "stop_strings": stop_in(text, at), "tokenizer": tokenizer}
        truth = own(target64, [PROMPT], **asked)
        assert truth.shape[1] < 25
        for tree in (False, True):
            out = generate(target64, Oracle([text], length, tree=tree), [PROMPT], **asked)
            assert torch.equal(out, truth)
        criterion = StopStringCriteria(tokenizer, [asked["stop_strings"]])
        again = stopping(criterion)
        out = generate(target64, Oracle([text], length), [PROMPT], max_new_tokens=20, **again)
        assert torch.equal(out, truth)


def test_f49_a_stop_string_in_the_prompt_stops_nothing(target64: Target) -> None:
    """Nor one whose last part alone was generated: it must end in the new token."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer("one two. three", add_special_tokens=False).input_ids
    text = own_greedy(target64, ids, 12)
    for stops in (["two"], ["one", "three"]):
        asked = {"stop_strings": stops, "tokenizer": tokenizer}
        truth = own(target64, [ids], **asked)
        out = generate(target64, Oracle([text], 5), [ids], **asked)
        assert torch.equal(out, truth)
        assert out[0].tolist() == text
    # A string that begins in the prompt and ends in the first new token does stop.
    joined = str(tokenizer.decode([ids[-1]])) + str(tokenizer.decode([text[len(ids)]]))
    if "\ufffd" not in joined:
        asked = {"stop_strings": [joined], "tokenizer": tokenizer}
        assert generate(target64, None, [ids], **asked).shape[1] == len(ids) + 1


def test_f54_the_padding_completes_no_stop_string(target64: Target) -> None:
    """The pad token's own text in front of the first real one."""
    tokenizer = tiny_tokenizer()
    pad = tokenizer.pad_token_id
    asked = {"stop_strings": ["d|>aa"], "tokenizer": tokenizer, "pad_token_id": pad}
    first = tokenizer("a", add_special_tokens=False).input_ids
    assert str(tokenizer.decode([pad, *first, *first])).endswith("d|>aa")

    def run(pads: int) -> list[int]:
        bias = {"sequence_bias": {(first[0],): 1e4}}  # each new token is "a"
        out = generate(target64, None, [first], pads=pads, **asked, **bias)
        new: list[int] = out[0, pads:].tolist()
        return new

    assert run(3) == run(0) == first * 13


def test_stop_strings_without_a_tokenizer_are_refused(target64: Target) -> None:
    ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match=r"give it to speculate\(tokenizer=\.\.\.\)") as caught:
        target64.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stop_strings=["x"],
            tokenizer=tiny_tokenizer(),
            custom_generate=speculate(None),
            max_new_tokens=3,
            pad_token_id=0,
        )
    assert "\n" not in str(caught.value)
