"""F52: processors that look back act at each drafted node as they do token by token.

The truth is transformers' own `generate` with the same settings, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import generate, own
from drafts import AlwaysWrong, HalfRight, Oracle, Random, prompt_of
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.drafters import Drafter
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.warps import UnsupportedSamplingError

PROMPTS = [prompt_of(n) for n in (2, 7, 12)]
"""Their plain continuations come to repeat single tokens and runs of three."""
TOKENS = 24


def even(_: int, ids: Tensor) -> list[int]:
    """Allow even tokens, but not the last token again."""
    return [token for token in range(0, 512, 2) if token != ids[-1]]


# Settings by the plain continuation of a prompt, so that each changes it.
Made = Callable[[Sequence[int]], dict[str, Any]]
CONTENT: dict[str, Made] = {
    "repetition": lambda new: {"repetition_penalty": 1.3},
    "n-grams": lambda new: {"no_repeat_ngram_size": 3},
    "bad words": lambda new: {"bad_words_ids": [[new[1], new[2]], [new[5]], [9, 8, 7]]},
    "bias": lambda new: {"sequence_bias": {(new[3],): -9.0, (new[0], new[1]): -9.0, (77,): 0.5}},
    "suppress": lambda new: {"suppress_tokens": [new[4], new[7]]},
    "suppress first": lambda new: {"begin_suppress_tokens": [new[0]]},
    "least new": lambda new: {"min_new_tokens": 9, "eos_token_id": [new[4], new[6]]},
    "forced end": lambda new: {"forced_eos_token_id": 511},
    "decay": lambda new: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 500},
    "prefix": lambda new: {"prefix_allowed_tokens_fn": even},
    "several": lambda new: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[new[1], new[2]]],
        "suppress_tokens": [new[4]],
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
}
LENGTH: dict[str, Made] = {
    "least length": lambda new: {"min_length": 12 + 9, "eos_token_id": [new[4], new[6]]},
}
"""Where `generate` counts the padding, so that a row is not its own single run."""


def drafters(texts: Sequence[Sequence[int]]) -> dict[str, Drafter]:
    return {
        "oracle chain": Oracle(texts, 5),
        "oracle tree": Oracle(texts, 5, tree=True),
        "half-right tree": HalfRight(texts, 2, 5, tree=True),
    }


@pytest.mark.parametrize("name", [*CONTENT, *LENGTH])
def test_f52_a_processor_sees_each_nodes_own_path(target64: Target, name: str) -> None:
    for prompt in PROMPTS:
        plain = own(target64, [prompt], max_new_tokens=TOKENS)
        settings = (CONTENT | LENGTH)[name](plain[0, len(prompt) :].tolist())
        settings["max_new_tokens"] = TOKENS
        truth = own(target64, [prompt], **settings)
        if name != "least length" or len(prompt) == 12:
            assert not torch.equal(truth, plain), "or the setting does nothing"
        for kind, drafter in drafters(truth.tolist()).items():
            ours = generate(target64, drafter, [prompt], **settings)
            assert torch.equal(ours, truth), kind


@pytest.mark.parametrize("name", [*CONTENT, *LENGTH])
def test_f52_a_padded_row_is_processed_as_alone(target64: Target, name: str) -> None:
    """Equal to generate's own batch, and to single runs wherever it counts no padding."""
    plain = own(target64, PROMPTS[:1], max_new_tokens=TOKENS)[0, 2:].tolist()
    settings = {**(CONTENT | LENGTH)[name](plain), "max_new_tokens": TOKENS}
    truth = own(target64, PROMPTS, **settings)
    texts = []
    for row, prompt in enumerate(PROMPTS):
        texts.append([*prompt, *truth[row, 12:].tolist()])
        if name in CONTENT:
            single = own(target64, [prompt], **settings)[0].tolist()
            assert texts[-1][: len(single)] == single
    for kind, drafter in drafters(texts).items():
        assert torch.equal(generate(target64, drafter, PROMPTS, **settings), truth), kind


@pytest.mark.parametrize("pad", [0, 445])
def test_f54_a_pad_token_is_no_repetition(target64: Target, pad: int) -> None:
    """445 is what the first prompt goes on with; in front of it, it must not be punished."""
    settings = {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "pad_token_id": pad}
    out = generate(target64, None, PROMPTS[:1], pads=9, **settings)
    assert torch.equal(out[:, 9:], own(target64, PROMPTS[:1], **settings))
    assert 445 in out[0, 11:]


def test_a_first_token_may_be_forced(target64: Target) -> None:
    for prompt in ([5], [5, 6]):
        truth = own(target64, [prompt], forced_bos_token_id=99)
        drafter = Oracle(truth.tolist(), 5)
        assert torch.equal(generate(target64, drafter, [prompt], forced_bos_token_id=99), truth)
        assert (truth[0, len(prompt)] == 99) == (len(prompt) == 1)


def test_a_prefix_function_is_told_the_prompts_number(target64: Target) -> None:
    """Also where each prompt has several rows."""

    def allowed(prompt: int, ids: Tensor) -> list[int]:
        return list(range(100 * prompt, 100 * prompt + 90))

    out = generate(
        target64,
        HalfRight([[0]], 1),
        PROMPTS[:2],
        prefix_allowed_tokens_fn=allowed,
        do_sample=True,
        seed=1,
        num_return_sequences=2,
    )
    assert [set((row[7:] // 100).tolist()) for row in out] == [{0}, {0}, {1}, {1}]


def test_a_prefix_function_is_shown_each_text_once_in_order(target64: Target) -> None:
    """And may keep what it is shown."""
    kept: list[Tensor] = []

    def allowed(_: int, ids: Tensor) -> list[int]:
        kept.append(ids)
        return list(range(512))

    text = own(target64, PROMPTS[:1])[0].tolist()
    for drafter in (Oracle([text], 4), HalfRight([text], 2, tree=True)):
        kept.clear()
        generate(target64, drafter, PROMPTS[:1], prefix_allowed_tokens_fn=allowed)
        assert [ids.tolist() for ids in kept] == [text[:n] for n in range(2, 14)]


def test_what_a_prefix_function_keeps_does_not_change(target64: Target) -> None:
    """Block verification looks past what it keeps, at texts that then go on otherwise."""
    shown: list[tuple[Tensor, list[int]]] = []

    def allowed(_: int, ids: Tensor) -> list[int]:
        shown.append((ids, ids.tolist()))
        return list(range(512))

    generate(
        target64,
        AlwaysWrong([own(target64, PROMPTS[:1])[0].tolist()], 4),
        PROMPTS[:1],
        prefix_allowed_tokens_fn=allowed,
        do_sample=True,
        temperature=0.05,
        rule="block",
        seed=0,
    )
    assert len(shown) > 13, "some texts were looked at in vain"
    assert [ids.tolist() for ids, _ in shown] == [ids for _, ids in shown]


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_k": 0, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_f52_sampled_text_is_the_seeds_alone_under_a_penalty(
    target64: Target, head64: DraftHead, temperature: float, cut: dict[str, Any]
) -> None:
    """Whoever drafts, in chains or trees, alone or in any order of the batch (F53)."""
    sampled = {"do_sample": True, "temperature": temperature, "seed": 3, **cut}
    settings = {**sampled, "repetition_penalty": 1.5, "max_new_tokens": TOKENS}
    plain = generate(target64, None, PROMPTS, **settings)
    bare = generate(target64, None, PROMPTS, **sampled, max_new_tokens=TOKENS)
    assert not torch.equal(plain, bare), "or the penalty does nothing"
    texts = [[*p, *row[12:].tolist()] for p, row in zip(PROMPTS, plain, strict=True)]
    forced = drafters(texts).values()
    for drafter in (*forced, Random(1), Random(2, tree=True), head64):
        assert torch.equal(generate(target64, drafter, PROMPTS, **settings), plain)
    assert torch.equal(generate(target64, head64, PROMPTS, tree="tree:3x3:8", **settings), plain)
    order = [2, 0, 1]
    mixed = [PROMPTS[i] for i in order]
    out = generate(target64, HalfRight(texts, [0, 2, 5]), mixed, streams=order, **settings)
    assert torch.equal(out, plain[order])


ASKED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("rows", [1, 3])
def test_f52_scores_are_processed_on_the_rows_own_paths(target64: Target, rows: int) -> None:
    """As generate gives them itself, which is in fp32, up to the end of each row."""
    settings = {
        **ASKED,
        "max_new_tokens": 16,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
    }
    prompts = PROMPTS[-rows:]
    first = own(target64, prompts, **settings, eos_token_id=511)
    settings["eos_token_id"] = ends = [511, int(first.sequences[0, 12 + 8])]
    truth = own(target64, prompts, **settings)
    texts = [[*p, *row[12:].tolist()] for p, row in zip(prompts, truth.sequences, strict=True)]
    for drafter in (None, *drafters(texts).values()):
        ours = generate(target64, drafter, prompts, **settings)
        assert torch.equal(ours.sequences, truth.sequences)
        for name in ("scores", "logits"):
            assert len(ours[name]) == len(truth[name])
            for row, text in enumerate(texts):
                end = next((i for i, t in enumerate(text[len(prompts[row]) :]) if t in ends), 99)
                for a, b in zip(ours[name][: end + 1], truth[name][: end + 1], strict=True):
                    torch.testing.assert_close(a[row].float(), b[row], atol=1e-5, rtol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "watermark": ({"watermarking_config": {"bias": 2.5}}, "watermarking_config"),
    "encoder penalty": ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty"),
    "encoder n-grams": ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
}


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_f44_nothing_left_to_draw_is_an_error_and_never_token_zero(
    target64: Target, head64: DraftHead, rule: str
) -> None:
    """As in generate itself: at the first token, or after drafted ones were kept."""
    several = {"bad_words_ids": [[t] for t in range(3, 512)], "no_repeat_ngram_size": 1}
    for settings in ({"suppress_tokens": list(range(512))}, several):
        with pytest.raises(UnsupportedSamplingError, match="leave no token to draw"):
            generate(
                target64, head64, [prompt_of(4)], do_sample=True, rule=rule, seed=3, **settings
            )


@pytest.mark.parametrize("name", REFUSED)
def test_f52_processors_with_a_state_of_their_own_are_refused(target64: Target, name: str) -> None:
    settings, setting = REFUSED[name]
    with pytest.raises(UnsupportedSamplingError, match=rf"\({setting}\) cannot be hono") as caught:
        generate(target64, None, PROMPTS[:1], **settings)
    assert "\n" not in str(caught.value)


def test_f52_a_users_own_processor_is_refused(target64: Target) -> None:
    def nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(UnsupportedSamplingError, match="function cannot be honoured"):
        target64.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[nothing],
            max_new_tokens=3,
            pad_token_id=0,
            custom_generate=speculate(None),
        )
