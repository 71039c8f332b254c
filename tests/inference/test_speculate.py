"""`generate(custom_generate=speculate(...))` does what `generate` does, or says what it cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from calls import batch_of, generate
from drafts import HalfRight, Oracle, Random, endless, ids_of, keyed, own_greedy, prompt_of
from torch import Tensor
from transformers import DynamicCache

from drafthead.heads.base import DraftHead
from drafthead.inference.drafters import Drafter
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.warps import UnsupportedSamplingError

TREE = "tree:3x3:8"


@pytest.mark.parametrize("tree", ["chain:3", TREE])
def test_greedy_equals_generate(target64: Target, head64: DraftHead, tree: str) -> None:
    for length in (1, 5, 20):
        out = generate(target64, head64, [prompt_of(length)], tree=tree, max_new_tokens=24)
        assert out[0].tolist() == own_greedy(target64, prompt_of(length), 24)
        assert out.dtype == torch.long


@pytest.mark.parametrize("pads", [0, 1, 9])
def test_f54_left_padding_is_never_seen(target64: Target, head64: DraftHead, pads: int) -> None:
    """Positions and noise exclude padding: a padded batch equals single runs, T = 0 and T = 1."""
    prompts = [prompt_of(n) for n in (2, 7, 12)]
    for sampled in (False, True):
        for drafter in (head64, None):
            out = generate(
                target64, drafter, prompts, tree=TREE, pads=pads, do_sample=sampled, seed=3
            )
            for row, prompt in enumerate(prompts):
                new = out[row, 12 + pads :].tolist()
                if sampled:
                    own = {"do_sample": True, "seed": 3, "streams": [row]}
                    single = generate(target64, None, [prompt], **own)
                    assert new == single[0, len(prompt) :].tolist()
                else:
                    assert prompt + new == own_greedy(target64, prompt, 12)


def test_f54_the_pad_token_inside_a_prompt_is_a_token(target64: Target, head64: DraftHead) -> None:
    prompts = [[5, 0, 0, 9], [0, 7]]
    out = generate(target64, head64, prompts, pads=1)
    assert out[0, 5:].tolist() == own_greedy(target64, prompts[0], 12)[4:]
    assert out[1, 5:].tolist() == own_greedy(target64, prompts[1], 12)[2:]


def test_sampled_text_is_decided_by_the_seed_alone(target64: Target, head64: DraftHead) -> None:
    """Head, forced drafter, tree, chain or none: the same, and equal to the library's own loop."""
    prompts = [prompt_of(4), prompt_of(9)]
    warps = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95}
    plain = generate(target64, None, prompts, seed=11, **warps).tolist()
    for drafter, tree in ((head64, "chain:3"), (head64, TREE), (HalfRight(plain, 2), "chain:4")):
        assert generate(target64, drafter, prompts, seed=11, tree=tree, **warps).tolist() == plain
    assert generate(target64, head64, prompts, seed=12, **warps).tolist() != plain
    sampler = keyed(target64, 2, seed=11, temperature=0.8, top_k=30, top_p=0.95)
    own = ids_of(target64, prompts, sampler, None, 12)
    assert [row[-12:] for row in plain] == [row[-12:] for row in own]


def test_streams_key_the_rows(target64: Target) -> None:
    prompt = prompt_of(4)
    out = generate(target64, None, [prompt] * 3, do_sample=True, seed=1, streams=[5, 6, 5])
    assert out[0].tolist() == out[2].tolist() != out[1].tolist()
    with pytest.raises(ValueError, match="streams: 2 given for 3 rows"):
        generate(target64, None, [prompt] * 3, do_sample=True, seed=1, streams=[5, 6])


def test_without_a_seed_one_is_drawn_from_torchs_generator(target64: Target) -> None:
    prompt = [prompt_of(4)]

    def run() -> list[int]:
        out: list[int] = generate(target64, None, prompt, do_sample=True)[0].tolist()
        return out

    torch.manual_seed(4)
    first, second = run(), run()
    torch.manual_seed(4)
    assert (run(), run()) == (first, second)
    assert first != second


def test_scores_and_logits_are_the_targets(target32: Target) -> None:
    """1e-5 in fp32 of what generate returns itself, behind every emitted token."""
    prompt = prompt_of(5)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = target32.model.generate(
        **batch_of([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, **asked
    )
    text = plain.sequences.tolist()
    for drafter in (None, Oracle(text), HalfRight(text, 2, tree=True)):
        ours = generate(target32, drafter, [prompt], **asked)
        assert torch.equal(ours.sequences, plain.sequences)
        for name in ("scores", "logits"):
            assert len(ours[name]) == 12
            for a, b in zip(ours[name], plain[name], strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    bare = generate(target32, None, [prompt], return_dict_in_generate=True)
    assert bare.scores is None
    assert bare.logits is None


def test_scores_of_sampling_are_warped(target64: Target, head64: DraftHead) -> None:
    out = generate(
        target64,
        head64,
        [prompt_of(4), prompt_of(8)],
        do_sample=True,
        top_k=7,
        seed=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert {int(row.isfinite().sum()) for step in out.scores for row in step} == {7}
    for step, scores in enumerate(out.scores):
        for row, token in enumerate(out.sequences[:, 8 + step].tolist()):
            assert scores[row, token].isfinite()


def test_f46_ended_rows_are_padded_and_others_go_on(target64: Target) -> None:
    """Equal to generate's own batch, the pad token included."""
    prompts = [prompt_of(4), prompt_of(9)]
    texts = [own_greedy(target64, p, 14) for p in prompts]
    eos = [texts[0][4 + 5], 511]
    settings = {"eos_token_id": eos, "max_new_tokens": 14}
    own = target64.model.generate(**batch_of(prompts), do_sample=False, pad_token_id=0, **settings)
    ours = generate(target64, HalfRight(texts, [3, 1], tree=True), prompts, **settings)
    assert torch.equal(ours, own)


def test_f46_an_end_token_in_the_prompt_ends_nothing(target64: Target) -> None:
    text = own_greedy(target64, [5, 6, 7, 8], 12)
    for drafter in (None, Oracle([text], 5)):
        out = generate(target64, drafter, [[5, 6, 7, 8]], eos_token_id=[6, 8])
        assert out[0].tolist() == text


def test_several_sequences_of_one_prompt(target64: Target, head64: DraftHead) -> None:
    """Each has its own stream, so they differ; the same with a head or without."""
    settings = {"do_sample": True, "seed": 9, "num_return_sequences": 2, "tree": TREE}
    ours = generate(target64, head64, [prompt_of(4), prompt_of(7)], **settings)
    plain = generate(target64, None, [prompt_of(4), prompt_of(7)], **settings)
    assert ours.shape == (4, 7 + 12)
    assert torch.equal(ours, plain)
    assert ours[0].tolist() != ours[1].tolist()


@pytest.mark.parametrize("sampled", [False, True])
def test_f53_rows_keep_their_texts_in_any_order_of_the_batch(
    target64: Target, head64: DraftHead, sampled: bool
) -> None:
    """With their streams; drafts accept nothing, one, three and all; one row ends early."""
    prompts = [prompt_of(n) for n in (1, 7, 20, 33)]
    settings = {"do_sample": sampled, "seed": 4, "max_new_tokens": 16, "top_k": 8}
    plain = generate(target64, None, prompts, **settings)
    texts = [[*p, *row[33:].tolist()] for p, row in zip(prompts, plain, strict=True)]
    settings["eos_token_id"] = texts[1][7 + 4]
    for drafter in (HalfRight(texts, [0, 1, 3, 5], 5), head64):
        for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1]):
            mixed = [prompts[i] for i in order]
            out = generate(target64, drafter, mixed, streams=order, tree=TREE, **settings)
            width = max(map(len, mixed))
            assert out.shape[1] == width + 16
            for row, i in enumerate(order):
                single = generate(target64, None, [prompts[i]], streams=[i], **settings)
                new = single[0, len(prompts[i]) :].tolist()
                assert out[row, width:].tolist() == [*new, *[0] * (16 - len(new))]
                assert (len(new) < 16) == (texts[1][7 + 4] in texts[i][len(prompts[i]) : -1])


def test_f57_a_prompt_of_one_token_is_enough(target64: Target, head64: DraftHead) -> None:
    for tree in ("chain:3", TREE):
        out = generate(target64, head64, [[7], [9, 8]], tree=tree)
        assert out[0, 2:].tolist() == own_greedy(target64, [7], 12)[1:]


EMPTY: dict[str, tuple[dict[str, Tensor], str]] = {
    "all padding": (batch_of([[], [4]], pads=2), "the prompt has no tokens"),
    "no rows": ({"input_ids": torch.zeros(0, 4).long()}, "input_ids has no rows"),
    "right padding": (
        {
            "input_ids": torch.tensor([[4, 5, 0], [6, 7, 8]]),
            "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        },
        "attention_mask hides tokens behind real ones: pad on the left",
    ),
    "a mask of another length": (
        {
            "input_ids": torch.tensor([[4, 5, 6]]),
            "attention_mask": torch.tensor([[0, 1]]),
        },
        r"one entry per token of input_ids, \(1, 3\): give as many",
    ),
    "a mask of another length that hides nothing": (
        {
            "input_ids": torch.tensor([[4, 5, 6]]),
            "attention_mask": torch.tensor([[1, 1]]),
        },
        r"one entry per token of input_ids, \(1, 3\): give as many",
    ),
    "a hole": (
        {
            "input_ids": torch.tensor([[4, 5, 0]]),
            "attention_mask": torch.tensor([[1, 0, 1]]),
        },
        "attention_mask hides tokens behind real ones: pad on the left",
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_f54_f57_prompts_that_are_none_are_refused_in_one_line(target64: Target, name: str) -> None:
    inputs, message = EMPTY[name]
    inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    with pytest.raises(ValueError, match=message) as caught:
        target64.model.generate(
            **inputs,
            max_new_tokens=3,
            pad_token_id=0,
            do_sample=False,
            custom_generate=speculate(None),
        )
    assert "\n" not in str(caught.value)


def test_f57_without_a_prompt_generate_begins_with_the_bos_token(target64: Target) -> None:
    asked = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False, "bos_token_id": 1}
    ours = target64.model.generate(**asked, custom_generate=speculate(None))
    assert torch.equal(ours, target64.model.generate(**asked))


# Refusals, each by name and in one line


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2 cannot be honoured"),
    "groups": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        "num_beams=4|num_beam_groups=2",
    ),
    "contrast": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 cannot"),
    "layers": ({"dola_layers": "low"}, "dola_layers='low' cannot"),
    "forced words": ({"force_words_ids": [[5]], "num_beams": 2}, "force_words_ids=|num_beams=2"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 cannot"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1 cannot"),
    "chunks": ({"prefill_chunk_size": 2}, "prefill_chunk_size=2 cannot"),
    "offloading": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded' can"),
    "logits": ({"logits_to_keep": 3}, "logits_to_keep=3 cannot"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds is not supported"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions=True cannot",
    ),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states=True cannot",
    ),
    "rule": ({"rule": "lucky"}, "rule 'lucky': choose one of coupled, rejection"),
    "lossy rule": ({"rule": "typical"}, "rule 'typical' changes the target's distribution"),
    "context": ({"max_new_tokens": 300}, "exceed the target's context of 256"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_f51_f52_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    settings, message = REFUSED[name]
    model = endless(num_layers=2)
    model.set_attn_implementation("eager")  # generate itself refuses attentions of sdpa
    forwards: list[object] = []
    model.register_forward_hook(lambda *args: forwards.append(args))
    with pytest.raises(ValueError, match=message) as caught:
        generate(Target(model), None, [prompt_of(4)], **settings)
    assert "\n" not in str(caught.value)
    assert not forwards, "refused before any work"


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_cache_of_the_callers_own_is_refused(target32: Target, tokens: int) -> None:
    """Filled or empty: it would come back as it was."""
    ids = torch.tensor([prompt_of(6)])
    cache = DynamicCache()
    if tokens:
        target32.model(ids[:, :tokens], use_cache=True, cache=cache)
    with pytest.raises(UnsupportedSamplingError, match="a cache cannot be taken over") as caught:
        generate(target32, None, ids.tolist(), cache=cache)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_settings_that_cannot_change_the_text_are_left_alone(
    target64: Target, settings: dict[str, Any]
) -> None:
    text = own_greedy(target64, prompt_of(5), 12)
    out = generate(target64, Oracle([text]), [prompt_of(5)], **settings)
    assert out[0].tolist() == text


def test_a_lossy_rule_is_told(target64: Target, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        generate(target64, None, [prompt_of(5)], rule="typical", lossy=True)
        generate(target64, None, [prompt_of(5)], rule="rejection", lossy=True)
    assert [r.getMessage() for r in caplog.records if "lossy" in r.getMessage()] == [
        "rule 'typical' is lossy: the text is not the target's own"
    ]


def test_rules_refuse_what_they_cannot_verify_in_one_line(
    target64: Target, head64: DraftHead
) -> None:
    """A tree whose shape depends on its draws, and for block verification any tree."""
    wrong: list[tuple[str, Drafter | DraftHead, str]] = [
        ("rejection", head64, TREE),
        ("block", head64, TREE),
        ("block", Random(0, tree=True), "chain:4"),
    ]
    for rule, drafter, tree in wrong:
        with pytest.raises(ValueError, match=f"'{rule}'") as caught:
            generate(
                target64, drafter, [prompt_of(5)], do_sample=True, rule=rule, tree=tree, seed=0
            )
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_ratio_rules_are_decided_by_the_seed(
    target64: Target, head64: DraftHead, rule: str
) -> None:
    """In any batch; under a penalty that the draft does not know of, too."""
    prompts = [prompt_of(3), prompt_of(8)]
    settings = {"do_sample": True, "rule": rule, "seed": 2, "repetition_penalty": 1.3, "top_k": 9}
    out = generate(target64, head64, prompts, tree="chain:3", **settings)
    assert torch.equal(generate(target64, head64, prompts, tree="chain:3", **settings), out)
    for row, prompt in enumerate(prompts):
        single = generate(target64, head64, [prompt], tree="chain:3", streams=[row], **settings)
        assert single[0, len(prompt) :].tolist() == out[row, 8:].tolist()


def test_the_ratio_rule_is_greedy_at_temperature_zero(target64: Target, head64: DraftHead) -> None:
    out = generate(target64, head64, [prompt_of(5)], rule="rejection")
    assert out[0].tolist() == own_greedy(target64, prompt_of(5), 12)
