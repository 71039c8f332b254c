"""An evaluation reports what its rounds say, on equal terms for every drafter."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafts import AlwaysWrong, HalfRight, endless, own_greedy
from tiny import tiny_head, tiny_tokenizer
from torch import nn

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt
from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.inference import identity as identities
from drafthead.inference.compare import line_up, records_of, spread
from drafthead.inference.drafters import (
    Drafter,
    HeadDrafter,
    LookupDrafter,
    MergedDrafter,
    heads_of,
)
from drafthead.inference.evaluate import (
    PLAIN,
    Answer,
    Settings,
    answer,
    evaluate,
)
from drafthead.inference.identity import identity
from drafthead.inference.lineup import named
from drafthead.inference.metrics import acceptance
from drafthead.inference.records import agreement
from drafthead.inference.simulate import simulate
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, parse_shape

PROMPTS = [
    Prompt("a", "chat", ["What is the capital of France?", "And of the river?"]),
    Prompt("b", "maths", ["Three apples and four pears make how many?"]),
    Prompt("c", "chat", ["Write a function."], system="Be short."),
]
SETTINGS = Settings(max_new_tokens=24)

SPEEDUPS = {"speedup", "speedup_interval", "cpu_speedup", "cpu_speedup_interval"}
PLAIN_RECORD = {
    "name", "tokens_per_s", "cpu_tokens_per_s", "tokens_per_s_spread", "round_ms",
    "first_token_ms", "new_tokens", "repeated",
}  # fmt: skip
RECORD = SPEEDUPS | {
    "name", "tokens_per_s", "cpu_tokens_per_s", "tokens_per_s_spread", "round_ms",
    "first_token_ms", "speedup_spread", "median_prompt_speedup", "tau", "tau_interval", "cut",
    "survival", "survival_interval", "conditional", "conditional_interval", "rounds", "drafted",
    "accepted", "emitted", "accepted_per_drafted", "accepted_per_verified", "by_source",
    "by_category", "by_language", "by_context", "identical", "agreement", "repeated", "lossy",
}  # fmt: skip
GROUP = SPEEDUPS | {"prompts", "rounds", "tau", "tau_interval", "survival"}


def texts_of(target: Target, prompts: list[Prompt], tokens: int) -> list[list[int]]:
    """Plain greedy texts of the first turns."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    texts = []
    for prompt in prompts:
        system = [Message("system", prompt.system)] if prompt.system else []
        ids = chat.prompt_ids([*system, Message("user", prompt.turns[0])])
        texts.append(own_greedy(target, ids, tokens))
    return texts


@pytest.fixture(scope="module")
def trained(chatting: Target) -> DraftHead:
    """A head that has learnt what `chatting` answers, so that some of its drafts are right."""
    head = tiny_head(chatting.model, layers=(1, 2, 3)).train()
    batches = []
    for text in texts_of(chatting, PROMPTS, 40):
        ids = torch.tensor([text])
        features, last_hidden = chatting.states(ids, head.contract.layers)
        mask = torch.arange(len(text))[None] >= len(text) - 40
        batches.append(TeacherBatch(ids, mask, features, last_hidden, top=ids))
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for step in range(60):
        batch = batches[step % len(batches)]
        losses = []
        for prediction in head.unroll(batch, 3):
            labels = batch.ids[0, prediction.teacher + 1]
            losses.append(nn.functional.cross_entropy(prediction.logits, labels))
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return head.eval()


@pytest.fixture(scope="module")
def drafters(chatting: Target, trained: DraftHead) -> dict[str, Drafter]:
    wrong = AlwaysWrong(texts_of(chatting, PROMPTS, 24))
    return {
        **line_up(chatting, {"head": trained}, [parse_shape("chain:3"), parse_shape("tree:3x3:8")]),
        "wrong": wrong,
    }


@pytest.fixture(scope="module")
def answers(chatting: Target, drafters: dict[str, Drafter]) -> dict[str, list[Answer]]:
    return evaluate(chatting, PROMPTS, drafters, SETTINGS).answers


@pytest.fixture(scope="module")
def records(
    chatting: Target, drafters: dict[str, Drafter], answers: dict[str, list[Answer]]
) -> dict[str, Any]:
    prompts = [a.ids[: a.prompt_length] for a in answers[PLAIN][:2]]
    same = identity(chatting, prompts, drafters, Settings(max_new_tokens=8))
    return records_of([answers], same)


def test_records_have_the_documented_keys(records: dict[str, Any]) -> None:
    assert list(records) == [
        "plain", "lookup", "head chain:3", "head tree:3x3:8", "merged", "wrong"
    ]  # fmt: skip
    assert set(records["plain"]) == PLAIN_RECORD
    for name, made in records.items():
        assert made["name"] == name
        if name != PLAIN:
            assert set(made) == RECORD
            assert set(made["by_category"]) == {"chat", "maths"}
            for by in ("by_category", "by_language", "by_context"):
                assert all(set(group) == GROUP for group in made[by].values())
            assert set(made["round_ms"]) == {"draft", "verify", "accept", "commit", "other"}


def test_f61_f64_an_always_wrong_drafter_is_reported_as_it_is(records: dict[str, Any]) -> None:
    made = records["wrong"]
    assert made["tau"] == 1.0
    assert made["survival"] == made["conditional"] == []
    assert made["accepted_per_drafted"] == 0.0
    expected = made["tokens_per_s"] / records["plain"]["tokens_per_s"]
    assert made["speedup"] == pytest.approx(expected), "not raised to 1, not left out"
    # A draft costs time and gains nothing; the machine is shared, so this is not exact.
    assert made["speedup"] < 1.3


def test_every_drafter_answers_as_plain_does(
    answers: dict[str, list[Answer]], records: dict[str, Any]
) -> None:
    """Greedy in fp32: same ids, so equal counts (F63); later turns continue the same replies."""
    for name, given in answers.items():
        assert [a.ids for a in given] == [a.ids for a in answers[PLAIN]]
        assert [a.prompt for a in given] == ["a", "a", "b", "c"]
        if name != PLAIN:
            assert records[name]["agreement"] == {"equal": 4, "of": 4, "largest_gap": None}
            same = records[name]["identical"]
            told = {"equal": 2, "of": 2, "new_tokens": 8, "dtype": "float32"}
            assert same == told | {"tied": 0, "largest_gap": None, "tie": None}
    first, second = answers[PLAIN][:2]
    assert second.prompt_length > len(first.ids) - 24


def test_f63_counts_are_of_ids_on_both_sides(
    chatting: Target, answers: dict[str, list[Answer]], records: dict[str, Any]
) -> None:
    """This target's text tokenises to another count, so a count of text would show."""
    assert chatting.tokenizer is not None
    plain = answers[PLAIN]
    assert records["plain"]["new_tokens"] == sum(len(a.new_ids) for a in plain) == 4 * 24
    again = [len(chatting.tokenizer(chatting.tokenizer.decode(a.new_ids)).input_ids) for a in plain]
    assert sum(again) != 4 * 24
    for given in answers.values():
        assert [a.timed_tokens for a in given] == [len(a.new_ids) - 1 for a in given]


def test_f63_counts_are_taken_after_the_end_token(chatting: Target) -> None:
    text = texts_of(chatting, PROMPTS[1:2], 24)[0]
    start = len(text) - 24
    ends = Target(chatting.model, tiny_tokenizer())
    assert ends.tokenizer is not None
    ends.tokenizer.eos_token = ends.tokenizer.convert_ids_to_tokens(text[start + 7])
    wanted = text[start : text.index(text[start + 7], start) + 1]
    for right in (0, 6):
        drafter = HalfRight([text], right, 6)
        given = answer(ends, drafter, text[:start], SETTINGS)
        assert given.new_ids == wanted
        assert given.timed_tokens == len(wanted) - 1
        figures = acceptance([given.rounds])
        assert figures.tau == pytest.approx((len(wanted) - 1) / len(given.rounds))
        assert figures.tau == pytest.approx(1 + sum(figures.survival) - figures.cut)


@pytest.mark.parametrize(("side", "batch"), [(PLAIN, 1), ("lookup", 1), ("lookup", 2)])
def test_f64_a_slow_first_call_on_either_side_is_in_no_figure(
    chatting: Target, side: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side is warmed up before it is timed."""
    lookup, settings = LookupDrafter(3), Settings(max_new_tokens=6)
    slow: list[float] = []
    if side == PLAIN:
        handle = chatting.model.register_forward_pre_hook(lambda *args: delay(slow))
    else:
        propose = lookup.propose

        def delayed(*args: Any) -> Any:
            delay(slow)
            return propose(*args)

        monkeypatch.setattr(lookup, "propose", delayed)
    try:
        given = evaluate(chatting, PROMPTS[1:2], {"lookup": lookup}, settings, batch=batch).answers
    finally:
        if side == PLAIN:
            handle.remove()
    assert len(slow) == 1, "the delay was there"
    for made in records_of([given], {}).values():
        assert sum(made["round_ms"].values()) < 1500 / 5
        assert made["first_token_ms"] < 1500


def delay(done: list[float]) -> None:
    """Wait two seconds, once."""
    if not done:
        done.append(2.0)
        time.sleep(2.0)


def test_prefill_is_in_no_figure(chatting: Target) -> None:
    """A slow forward over the prompt does not slow the rounds."""

    def slow_prompt(module: object, args: tuple[Any, ...]) -> None:
        if args[0].shape[1] > 8:
            time.sleep(1.0)

    handle = chatting.model.register_forward_pre_hook(slow_prompt)
    try:
        given = answer(chatting, None, list(range(3, 30)), Settings(max_new_tokens=4))
    finally:
        handle.remove()
    assert given.seconds < 0.9
    assert len(given.rounds) == 3


def test_simulated_tau_equals_the_decoded_one(
    chatting: Target, trained: DraftHead, answers: dict[str, list[Answer]]
) -> None:
    """The training unroll on the texts the target gave, walked in rounds: exact in fp32."""
    given = answers["head chain:3"]
    decoded = acceptance([a.rounds for a in given])
    told = simulate(trained, chatting, [(a.ids, a.prompt_length) for a in given], 3)
    assert decoded.survival[0] > 0.2, "some drafts are right, or this would show nothing"
    assert told.tau == decoded.tau
    assert told.survival == decoded.survival
    assert (told.rounds, told.emitted, told.drafted) == (
        decoded.rounds, decoded.emitted, decoded.drafted
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_simulated_tau_equals_the_decoded_one_at_every_depth(
    chatting: Target, trained: DraftHead, depth: int
) -> None:
    """Also deeper than the head was trained, and where an end token cuts a block."""
    drafter = HeadDrafter(trained, Shape(depth, 1, depth))
    texts = texts_of(chatting, PROMPTS, 40)
    ends = Target(chatting.model, tiny_tokenizer())
    assert ends.tokenizer is not None
    ends.tokenizer.eos_token = ends.tokenizer.convert_ids_to_tokens(texts[0][-20])
    settings = Settings(max_new_tokens=40)
    given = [answer(ends, drafter, text[:-40], settings) for text in texts]
    assert len(given[0].new_ids) < 40
    told = simulate(trained, ends, [(a.ids, a.prompt_length) for a in given], depth)
    assert told.tau == acceptance([a.rounds for a in given]).tau


def test_sampled_answers_are_the_same_for_every_drafter(
    chatting: Target, trained: DraftHead
) -> None:
    """Coupled: streams are the prompts' places; another seed gives other answers."""
    drafters = line_up(chatting, {"head": trained}, [parse_shape("chain:2")])
    settings = Settings(max_new_tokens=10, temperature=0.8, top_p=0.9, seed=3)
    given = evaluate(chatting, PROMPTS[1:], drafters, settings).answers
    for ours in given.values():
        assert [a.ids for a in ours] == [a.ids for a in given[PLAIN]]
    other = Settings(max_new_tokens=10, temperature=0.8, top_p=0.9, seed=4)
    again = evaluate(chatting, PROMPTS[1:], {}, other).answers
    assert [a.ids for a in again[PLAIN]] != [a.ids for a in given[PLAIN]]


def test_a_difference_from_plain_is_counted_with_its_gap(chatting: Target) -> None:
    """Plain's top-two gap where the texts first part; here made by another head of logits."""
    plain = answer(chatting, None, [4, 5, 6], SETTINGS, name="a", keep_gaps=True)
    same, other = (replace(plain, prompt=name) for name in "ab")
    other.ids = [*other.ids[: 3 + 2], (other.ids[3 + 2] + 1) % 512, *other.ids[3 + 3 :]]
    made = agreement([other, same], [plain, replace(plain, prompt="b")])
    best = chatting.model(torch.tensor([plain.ids[:5]])).logits[0, -1].topk(2).values
    gap = float(best[0] - best[1])
    # Two forwards of fp32, of one token and of five: equal up to rounding.
    assert made == {"equal": 1, "of": 2, "largest_gap": pytest.approx(gap, abs=1e-5)}


def test_identity_counts_differences(chatting: Target) -> None:
    """It looks at ids: one drafter is exact, a broken rule would not be."""
    prompts = [[4, 5, 6], [7, 8]]
    table = identity(chatting, prompts, {"lookup": LookupDrafter(3)}, SETTINGS)
    assert (table["lookup"]["equal"], table["lookup"]["of"], table["lookup"]["tied"]) == (2, 2, 0)
    assert table["lookup"]["largest_gap"] is table["lookup"]["tie"] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f39_a_first_difference_is_a_tie_only_within_the_targets_own_rounding(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Of a target that knows two words for one thing: the other one is a tie, any third is none."""
    settings = Settings(3, temperature, seed=1)
    target, ids, twin = Target(endless(num_layers=4)), [4, 5, 6], 500
    word = answer(target, None, ids, settings).new_ids[1]
    target.model.lm_head.weight[twin] = target.model.lm_head.weight[word]
    same = answer(target, None, [7, 8], settings, stream=1)
    own = answer(target, None, ids, settings)
    chosen = own.new_ids[1]
    for token, tied in ((twin + word - chosen, int(temperature == 0)), (300, 0)):
        other = replace(own, ids=[*own.ids[:4], token, *own.ids[5:]])
        monkeypatch.setattr(identities, "answer_turns", lambda *a, o=other, **k: [o, same])
        table = identity(target, [ids, [7, 8]], {"x": LookupDrafter(2)}, settings)
        told = table["x"]
        assert (told["equal"], told["of"], told["tied"]) == (1, 2, tied)
        assert (told["largest_gap"] <= told["tie"]) == bool(tied)
        assert 0 < told["tie"] < 1e-3
    short = replace(own, ids=own.ids[:-1])
    monkeypatch.setattr(identities, "answer_turns", lambda *a, **k: [short, same])
    table = identity(target, [ids, [7, 8]], {"x": LookupDrafter(2)}, settings)
    assert (table["x"]["tied"], table["x"]["largest_gap"]) == (0, math.inf), "no tie to blame"


def test_the_baselines_name_is_taken(chatting: Target) -> None:
    with pytest.raises(ValueError, match="'plain' is the baseline's name"):
        evaluate(chatting, PROMPTS, {"plain": LookupDrafter(3)}, SETTINGS)


def test_prompts_are_taken_from_the_categories_in_turn() -> None:
    prompts = [Prompt(str(i), c, ["x"]) for i, c in enumerate("aabacb")]
    assert [p.id for p in spread(prompts, 9)] == ["0", "2", "4", "1", "5", "3"]
    assert [p.id for p in spread(prompts, 4)] == ["0", "2", "4", "1"]


def test_one_tree_is_called_head_several_by_their_shape(chatting: Target) -> None:
    head = tiny_head(chatting.model, layers=(1, 2, 3))
    assert list(line_up(chatting, {"head": head}, [Shape(2, 1, 2)])) == ["lookup", "head", "merged"]
    two = line_up(chatting, {"head": head}, [Shape(2, 1, 2), Shape(2, 2, 4)])
    assert list(two) == ["lookup", "head chain:2", "head tree:2x2:4", "merged"]


def test_every_head_of_several_has_a_merged_row_of_its_own(chatting: Target) -> None:
    """Or the first one's would be read as that of all."""
    heads = {n: tiny_head(chatting.model, layers=(1, 2, 3), seed=s) for s, n in enumerate("ab")}
    table = line_up(chatting, heads, [Shape(2, 1, 2), Shape(2, 2, 4)])
    assert [*table][-2:] == ["merged a", "merged b"]
    for name, head in heads.items():
        merged = table[f"merged {name}"]
        assert heads_of(merged) == [head]
        assert isinstance(merged, MergedDrafter)
        assert merged.others == (table[f"{name} chain:2"],), "with its first shape"


def test_the_names_of_other_rows_are_taken() -> None:
    for name in ("plain", "merged", "merged a"):
        with pytest.raises(ValueError, match="the name is taken"):
            named([f"{name}=x", "b=y"], "head")


def test_texts_of_another_draw_are_not_held_against_plain(
    answers: dict[str, list[Answer]], records: dict[str, Any]
) -> None:
    """A ratio rule keeps the law and not the very draw: a count of equal texts would mislead."""
    made = records_of([answers], {}, same_draw=False)
    drafted = [r for name, r in made.items() if name != PLAIN]
    assert drafted
    assert all(r["agreement"] is None and r["identical"] is None for r in drafted)
    assert all(r["agreement"] for n, r in records.items() if n != PLAIN)
