"""Several prompts at a time: the same texts, slots that are refilled, time that is shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from drafts import AlwaysWrong, own_greedy
from tiny import CORPUS, tiny_head, tiny_tokenizer

from drafthead.data.conversations import Prompt
from drafthead.inference.answering import Answer, Turn, answer, answer_turns
from drafthead.inference.compare import line_up
from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter, LookupDrafter
from drafthead.inference.evaluate import PLAIN, Settings, evaluate, grouped
from drafthead.inference.identity import identity
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, parse_shape

PROMPTS = [Prompt(str(n), "ab"[n % 2], list(CORPUS[n : n + 1 + n % 2])) for n in range(4)]


@pytest.fixture(scope="module")
def drafters(chatting: Target) -> dict[str, Drafter]:
    head = tiny_head(chatting.model, layers=(1, 2, 3))
    return line_up(chatting, {"head": head}, [parse_shape("chain:2")], batch=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_depend_on_no_batch_order_or_drafter(
    chatting: Target, drafters: dict[str, Drafter], temperature: float
) -> None:
    """Noise is keyed by prompt and turn, never by a slot; the second turns' is another."""
    settings = Settings(max_new_tokens=6, temperature=temperature, seed=2)
    alone = evaluate(chatting, PROMPTS, {}, settings)
    together = evaluate(chatting, PROMPTS, drafters, settings, batch=3)
    texts = {a.place: a.ids for a in alone.answers[PLAIN]}
    assert len(texts) == sum(len(p.turns) for p in PROMPTS) == 6
    for given in together.answers.values():
        assert {a.place: a.ids for a in given} == texts
    assert not alone.failed + together.failed


def test_turns_of_one_prompt_have_noise_of_their_own(chatting: Target) -> None:
    """A template that forgets would put both answers at the same positions."""
    prompt = Prompt("twice", "a", ["Why?", "Why?"])
    settings = Settings(max_new_tokens=3, temperature=5.0)
    first, second = evaluate(chatting, [prompt], {}, settings).answers[PLAIN]
    start = second.prompt_length
    again = answer(chatting, None, second.ids[:start], settings, stream=0)
    assert again.new_ids != second.new_ids, "the first turn's noise gives another answer"
    assert answer(chatting, None, first.ids[: first.prompt_length], settings).ids == first.ids


def test_a_slot_that_ends_takes_the_next_prompt(
    chatting: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot waits for the longest of these texts, and no second is counted twice."""
    prompts = [[4 + n, 5, 6] for n in range(6)]
    texts = [own_greedy(chatting, ids, 12) for ids in prompts]
    ends = Target(chatting.model, tiny_tokenizer())
    assert ends.tokenizer is not None
    ends.tokenizer.eos_token = ends.tokenizer.convert_ids_to_tokens(texts[0][3 + 1])
    alone = [answer(ends, None, ids, Settings(12)) for ids in prompts]
    lengths = [len(a.rounds) for a in alone]
    assert len(set(lengths)) > 2
    assert min(lengths) == 0, "one ends with the prefill's token"
    running: list[int] = []
    monkeypatch.setattr(Decoder, "round", _counting(Decoder.round, running))
    given = answer_turns(ends, None, [Turn(ids) for ids in prompts], Settings(12), batch=2)
    assert [a.ids for a in given if isinstance(a, Answer)] == [a.ids for a in alone]
    assert sum(running) == sum(lengths)
    assert len(running) <= sum(lengths) / 2 + max(lengths) / 2
    shares = Counter(s for a in given if isinstance(a, Answer) for s in a.spent)
    assert sorted(shares.values()) == sorted(running), "a round's time is shared by its rows"


def _counting(round_: Any, running: list[int]) -> Any:
    def counted(self: Decoder) -> None:
        running.append(sum(row is not None and not row.done for row in self.rows))
        round_(self)

    return counted


def test_groups_keep_slots_busy_and_turns_in_order() -> None:
    """For one prompt at a time: prompt by prompt, turn by turn."""
    prompts = [Prompt(str(n), "a", ["x"] * (1 + n % 3)) for n in range(9)]
    assert grouped(prompts[:3], 1) == [[(0, 1)], [(1, 1)], [(1, 2)], [(2, 1)], [(2, 2)], [(2, 3)]]
    groups = grouped(prompts, 2)
    assert [len(group) for group in groups] == [4, 5, 6, 3]
    assert all(len({turn for _, turn in group}) == 1 for group in groups)
    assert sorted(place for group in groups for place in group) == sorted(
        place for group in grouped(prompts, 1) for place in group
    )


class Failing(LookupDrafter):
    """Breaks on the texts that hold a token."""

    def __init__(self, token: int) -> None:
        super().__init__(3)
        self.token = token

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Any
    ) -> list[Tree]:
        if any(self.token in row and depth for row, depth in zip(ids, depths, strict=True)):
            raise RuntimeError("no room\nat all")
        return super().propose(ids, depths, sampler)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_turn_that_fails_is_told_with_its_reason_and_costs_itself_only(
    chatting: Target, batch: int
) -> None:
    turns = [Turn([n, n + 1], prompt=str(n)) for n in (10, 20, 30, 40)]
    turns[1] = Turn([7] * 260, prompt="long")
    given = answer_turns(chatting, Failing(30), turns, Settings(6), batch=batch)
    assert [type(one) for one in given] == [Answer, str, str, Answer]
    assert "context of 256" in str(given[1])
    assert given[2] == "no room at all"
    for index in (0, 3):
        wanted = own_greedy(chatting, turns[index].ids, 6)
        assert given[index].ids == wanted  # type: ignore[union-attr]


def test_prompts_that_fail_for_all_or_for_one_are_in_the_result(chatting: Target) -> None:
    """The conversation whose second turn does not fit keeps its first."""
    long = " ".join(CORPUS)
    prompts = [
        Prompt("fits", "a", ["Why?"]),
        Prompt("grows", "a", ["Hi", long, "More?"]),
        Prompt("endless", "a", [long]),
    ]
    assert chatting.tokenizer is not None
    token = chatting.tokenizer("Hi", add_special_tokens=False).input_ids[0]
    failing = Failing(token)
    found = evaluate(chatting, prompts, {"failing": failing}, Settings(max_new_tokens=8))
    assert [a.place for a in found.answers[PLAIN]] == [("fits", 1), ("grows", 1)]
    assert [a.place for a in found.answers["failing"]] == [("fits", 1)]
    told = {(f.prompt, f.turn, f.drafter): f.reason for f in found.failed}
    assert list(told) == [
        ("grows", 1, "failing"), ("grows", 2, None), ("grows", 3, None), ("endless", 1, None)
    ]  # fmt: skip
    assert told["grows", 1, "failing"] == "no room at all"
    assert "context of 256" in told["grows", 2, None]
    assert "its turn 2 got no reply" in told["grows", 3, None]


def test_identity_in_a_batch_is_against_plain_decoding_alone(chatting: Target) -> None:
    prompts = [[4, 5, 6], [7, 8], [9]]
    wrong = AlwaysWrong([own_greedy(chatting, ids, 6) for ids in prompts])
    table = identity(chatting, prompts, {"wrong": wrong}, Settings(6), batch=2)
    assert (table["wrong"]["equal"], table["wrong"]["of"]) == (3, 3)
