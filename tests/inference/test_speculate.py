"""`generate(custom_generate=speculate(...))` does what `generate` does, or says what it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafts import HalfRight, Oracle, Random, endless, ids_of, keyed, own_greedy, prompt_of
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from drafthead.heads.base import DraftHead
from drafthead.inference.drafters import Drafter
from drafthead.inference.sampling import UnsupportedSamplingError
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target

TREE = "tree:3x3:8"


def batch_of(prompts: list[list[int]], pads: int = 0, pad: int = 0) -> dict[str, Tensor]:
    """Prompts padded on the left to the longest, and by `pads` more."""
    width = max(map(len, prompts)) + pads
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(target: Target, drafter: Any, prompts: list[list[int]], **settings: Any) -> Any:
    """Call generate on prompts, left-padded if need be; `speculate` takes its settings by name."""
    own = {
        k: settings.pop(k) for k in ("tree", "rule", "seed", "streams", "streamer") if k in settings
    }
    pads = settings.pop("pads", 0)
    return target.model.generate(
        **batch_of(prompts, pads),
        **{"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **settings},
        custom_generate=speculate(drafter, **own),
    )


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


class Kept(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.puts = 0
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()
        self.puts += 1

    def end(self) -> None:
        self.ended = True


def test_streamers_get_every_token_as_rounds_end(target64: Target) -> None:
    text = own_greedy(target64, prompt_of(5), 12)
    streamer = Kept()
    generate(target64, Oracle([text]), [prompt_of(5)], streamer=streamer)
    assert streamer.ids == text
    assert streamer.ended
    assert streamer.puts == 2 + 3, "prompt, the prefill's token, and rounds of 5, 5 and 1"
    with pytest.raises(UnsupportedSamplingError, match="a streamer shows one row"):
        generate(target64, None, [prompt_of(5)] * 2, streamer=Kept())


def test_text_streamers_print_the_text(
    target64: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    text = own_greedy(target64, prompt_of(5), 12)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    generate(target64, HalfRight([text], 2), [prompt_of(5)], streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(text[5:]).rstrip("\n")


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


class AfterToken(StoppingCriteria):
    """Stops behind a token; notes the texts it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.seen += input_ids.tolist()
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("length", [1, 3, 6])
def test_stopping_criteria_see_every_token_in_order(target64: Target, length: int) -> None:
    text = own_greedy(target64, prompt_of(5), 12)
    criterion = AfterToken(text[5 + 6])
    out = generate(
        target64,
        Oracle([text], length),
        [prompt_of(5)],
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    end = text.index(text[5 + 6], 5) + 1
    assert out[0].tolist() == text[:end]
    assert criterion.seen == [text[:n] for n in range(6, end + 1)]


@pytest.mark.parametrize("length", range(1, 6))
def test_f49_a_stop_string_over_two_tokens_inside_a_block(target64: Target, length: int) -> None:
    tokenizer = tiny_tokenizer()
    text = own_greedy(target64, prompt_of(5), 20)
    pairs = [tokenizer.decode(text[at : at + 2]) for at in range(5 + 3, 5 + 18)]
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    outs = []
    for drafter in (None, Oracle([text], length)):
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
        out = generate(
            target64, drafter, [prompt_of(5)], stopping_criteria=criteria, max_new_tokens=20
        )
        outs.append(out[0].tolist())
    own = target64.model.generate(
        **batch_of([prompt_of(5)]),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=0,
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    assert outs[0] == outs[1] == own[0].tolist()
    assert len(outs[0]) < 25


def test_f46_ended_rows_are_padded_and_others_go_on(target64: Target) -> None:
    """Equal to generate's own batch, the pad token included."""
    prompts = [prompt_of(4), prompt_of(9)]
    texts = [own_greedy(target64, p, 14) for p in prompts]
    eos = [texts[0][4 + 5], 511]
    settings = {"eos_token_id": eos, "max_new_tokens": 14}
    own = target64.model.generate(**batch_of(prompts), do_sample=False, pad_token_id=0, **settings)
    ours = generate(target64, HalfRight(texts, [3, 1], tree=True), prompts, **settings)
    assert torch.equal(ours, own)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 13])
def test_f48_max_length_counts_the_prompt(target64: Target, length: int) -> None:
    text = own_greedy(target64, prompt_of(5), 13)
    out = generate(
        target64, Oracle([text], 6), [prompt_of(5)], max_new_tokens=None, max_length=5 + length
    )
    assert out[0].tolist() == text[: 5 + length]


def test_several_sequences_of_one_prompt(target64: Target, head64: DraftHead) -> None:
    """Each has its own stream, so they differ; the same with a head or without."""
    settings = {"do_sample": True, "seed": 9, "num_return_sequences": 2, "tree": TREE}
    ours = generate(target64, head64, [prompt_of(4), prompt_of(7)], **settings)
    plain = generate(target64, None, [prompt_of(4), prompt_of(7)], **settings)
    assert ours.shape == (4, 7 + 12)
    assert torch.equal(ours, plain)
    assert ours[0].tolist() != ours[1].tolist()


# Refusals, each by name and in one line


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams > 1"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions=True is not available",
    ),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states=True is not available",
    ),
    "repetition": ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor cannot be"),
    "n-grams": ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor cannot be"),
    "least length": (
        {"min_new_tokens": 3, "eos_token_id": 4},
        "MinLengthLogitsProcessor cannot be|MinNewTokens.* cannot be",
    ),
    "bad words": ({"bad_words_ids": [[5]]}, "NoBadWordsLogitsProcessor|SequenceBias"),
    "rule": ({"rule": "lucky"}, "rule 'lucky': choose one of coupled, rejection"),
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


def test_a_filled_cache_is_refused(target32: Target) -> None:
    ids = torch.tensor([prompt_of(6)])
    filled = DynamicCache()
    target32.model(ids[:, :4], use_cache=True, cache=filled)
    with pytest.raises(UnsupportedSamplingError, match="a filled cache cannot be taken over"):
        target32.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=filled,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            custom_generate=speculate(None),
        )


def test_the_ratio_rule_refuses_trees_in_one_line(target64: Target, head64: DraftHead) -> None:
    """A head's tree and any other drafter's."""
    prompt = prompt_of(5)
    wrong: list[tuple[Drafter | DraftHead, str]] = [
        (head64, TREE),
        (Random(0, tree=True), "chain:4"),
    ]
    for drafter, tree in wrong:
        with pytest.raises(ValueError, match="'rejection' verifies chains only") as caught:
            generate(
                target64, drafter, [prompt], do_sample=True, rule="rejection", tree=tree, seed=0
            )
        assert "\n" not in str(caught.value)


def test_the_ratio_rule_is_greedy_at_temperature_zero(target64: Target, head64: DraftHead) -> None:
    out = generate(target64, head64, [prompt_of(5)], rule="rejection")
    assert out[0].tolist() == own_greedy(target64, prompt_of(5), 12)
