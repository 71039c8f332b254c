"""Every figure of an evaluation is made of its table of rounds, and anyone can make it again."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluations
import pandas as pd
import pytest
from tiny import tiny_tokenizer

from drafthead.inference.answering import Answer, Spent
from drafthead.inference.compare import records_of
from drafthead.inference.log import Cell, answers_table, rounds_table
from drafthead.inference.metrics import Round
from drafthead.inference.records import Side, bucket, finite, paired
from drafthead.inference.report import write_evaluation
from drafthead.inference.samples import samples
from drafthead.inference.tables import table_rows

PARTS = (0.1, 0.6, 0.1, 0.1)
"""Shares of a round's seconds."""


def scripted(
    matches: list[list[int]], *, name: str = "p", seconds: float = 0.5, ids: list[int] | None = None
) -> Answer:
    """An answer whose chains agree with the target where a round's vector is 1."""
    rounds = []
    for row in matches:
        kept = row.index(0) if 0 in row else len(row)
        rounds.append(Round(len(row), kept, kept + 1, "head", len(row)))
    tokens = 1 + sum(r.emitted for r in rounds)
    spent = [Spent(seconds, seconds / 2, tuple(seconds * share for share in PARTS))] * len(rounds)
    text = [5, 6, 7, *(ids or range(10, 10 + tokens))]
    return Answer(name, "chat", text, 3, rounds, spent, 0.2, language="en")


def plain_of(given: Answer, seconds: float = 0.5) -> Answer:
    """Plain decoding of the same text."""
    tokens = len(given.new_ids) - 1
    spent = [Spent(seconds, seconds / 2, tuple(seconds * share for share in PARTS))] * tokens
    rounds = [Round(0, 0, 1)] * tokens
    return Answer(given.prompt, given.category, given.ids, 3, rounds, spent, 0.2, language="en")


def test_f61_figures_of_scripted_rounds_as_reported() -> None:
    """Only tokens before the first refusal count: [1, 0, 1, 0] accepts one."""
    given = scripted([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    made = records_of([{"plain": [plain_of(given)], "head": [given]}], {})["head"]
    assert (made["accepted"], made["drafted"], made["rounds"], made["emitted"]) == (5, 12, 3, 8)
    assert made["accepted_per_drafted"] == pytest.approx(0.4167, abs=1e-4)
    assert made["accepted_per_verified"] == 5 / 15
    assert made["tau"] == pytest.approx(2.667, abs=1e-3)
    assert made["survival"] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert made["conditional"] == pytest.approx([2 / 3, 1 / 2, 1, 1])
    assert made["cut"] == 0
    for key in ("tau_interval", "speedup_interval", "cpu_speedup_interval"):
        assert made[key] is made["by_category"]["chat"].get(key) is None, "of a single prompt"
    assert made["survival_interval"] == made["conditional_interval"] == [None] * 4
    # Eight tokens in three rounds of half a second, beside as many in eight: 8 / 3 times as fast.
    assert made["speedup"] == made["cpu_speedup"] == pytest.approx(8 / 3)
    assert made["first_token_ms"] == pytest.approx(200)


@pytest.mark.parametrize(("matches", "share"), [([[1] * 4], 1.0), ([[0] * 4], 0.0)])
def test_f61_oracle_is_one_and_always_wrong_is_zero_as_reported(
    matches: list[list[int]], share: float
) -> None:
    given = scripted(matches * 3)
    made = records_of([{"plain": [plain_of(given)], "head": [given]}], {})["head"]
    assert made["accepted_per_drafted"] == share
    assert made["survival"] == made["conditional"] == ([1.0] * 4 if share else [])


def test_f64_a_draft_that_only_costs_is_reported_as_it_is() -> None:
    """Each round of an always-wrong draft takes twice plain's, in every prompt and repeat alike."""
    repeats = []
    for seconds in (0.5, 0.4, 0.6):
        wrong = [scripted([[0, 0]] * 5, name=name, seconds=2 * seconds) for name in "ab"]
        repeats.append({"plain": [plain_of(a, seconds) for a in wrong], "wrong": wrong})
    made = records_of(repeats, {})
    for key in ("speedup", "cpu_speedup", "median_prompt_speedup"):
        assert made["wrong"][key] == pytest.approx(0.5)
    for key in ("speedup_interval", "cpu_speedup_interval", "speedup_spread"):
        assert made["wrong"][key] == pytest.approx([0.5, 0.5])
    assert made["plain"]["tokens_per_s_spread"] == pytest.approx([1 / 0.6, 1 / 0.4])
    assert made["wrong"]["repeated"] == {"equal": 4, "of": 4}


def test_another_text_in_a_later_repeat_is_reported() -> None:
    first = scripted([[1, 0]], ids=[10, 11, 12])
    other = scripted([[1, 0]], ids=[10, 11, 13])
    made = records_of([{"plain": [first]}, {"plain": [other]}, {"plain": [first]}], {})
    assert made["plain"]["repeated"] == {"equal": 1, "of": 2}


def test_f64_a_second_run_is_within_the_spread_of_the_first() -> None:
    """On a machine that is slower now and then, for one side more than for the other."""
    rng = random.Random(3)

    def run(repeats: int) -> dict[str, Any]:
        sides = []
        for _ in range(repeats):
            given = [scripted([[1, 0]] * 9, name=n, seconds=rng.uniform(0.7, 1.3)) for n in "abc"]
            plain = [plain_of(a, rng.uniform(0.4, 0.6)) for a in given]
            sides.append({"plain": plain, "head": given})
        made: dict[str, Any] = records_of(sides, {})["head"]
        return made

    low, high = run(8)["speedup_spread"]
    assert low < run(3)["speedup"] < high
    assert 1.1 * low < high


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rounds of three prompts, one with two turns, in two repeats; contexts over two buckets."""
    rng = random.Random(0)
    measured: dict[Cell, dict[str, list[Answer]]] = {}
    for repeat in (1, 2):
        sides: dict[str, list[Answer]] = {"plain": [], "head": []}
        for name, category, turns in (("a", "x", 2), ("b", "y", 1), ("c", "y", 1)):
            for turn in range(1, turns + 1):
                rows = [[rng.randint(0, 1) for _ in range(3)] for _ in range(60)]
                given = scripted(rows, name=name, seconds=rng.uniform(0.1, 0.2))
                for side, one in (("head", given), ("plain", plain_of(given, 0.07))):
                    one.category, one.turn, one.language = category, turn, "ende"[: 2 * turn][-2:]
                    one.ids, one.prompt_length = [0] * 197 + one.ids, 200
                    sides[side].append(one)
        measured[Cell(repeat, 0.0, 1)] = sides
    return rounds_table(measured), answers_table(measured, lambda given: "")


def test_f62_every_figure_is_recomputed_from_the_table_of_rounds() -> None:
    """By pandas alone, as the README says how."""
    from drafthead.inference.records import records

    rounds, answers = tables()
    made = records(rounds, answers)
    for name in ("plain", "head"):
        r = rounds[rounds.drafter == name]
        speed = r.emitted.sum() / r.seconds.sum()
        assert made[name]["tokens_per_s"] == pytest.approx(speed, rel=1e-12)
    ours, plain, told = r, rounds[rounds.drafter == "plain"], made["head"]
    survival = [(ours.accepted >= k).mean() for k in range(1, ours.accepted.max() + 1)]
    assert told["tau"] == ours.emitted.sum() / len(ours)
    assert told["survival"] == pytest.approx(survival, abs=1e-12)
    assert told["accepted_per_verified"] == ours.accepted.sum() / (ours.drafted.sum() + len(ours))
    ratio = speed / (plain.emitted.sum() / plain.seconds.sum())
    assert told["speedup"] == pytest.approx(ratio, rel=1e-12)
    products = list(itertools.accumulate(told["conditional"], lambda a, b: a * b))
    assert products == pytest.approx(survival, abs=1e-9)
    assert told["tau"] == pytest.approx(1 + sum(survival) - told["cut"], abs=1e-12)
    contexts = {"0-255": (0, 256), "256-511": (256, 512)}
    groups = {
        "by_category": {c: ours.category == c for c in ("x", "y")},
        "by_language": {c: ours.language == c for c in ("en", "de")},
        "by_context": {n: ours.context.between(*c, "left") for n, c in contexts.items()},
    }
    for by, parts in groups.items():
        assert told[by].keys() == parts.keys()
        for label, mine in parts.items():
            part, found = ours[mine], told[by][label]
            assert found["tau"] == pytest.approx(part.emitted.mean(), rel=1e-12)
            assert (found["rounds"], found["prompts"]) == (len(part), part.prompt.nunique())
            if found["prompts"] == 1:
                assert found["tau_interval"] is found["speedup_interval"] is None
                continue
            low, high = found["tau_interval"]
            assert low <= found["tau"] <= high
            low, high = found["speedup_interval"]
            assert low <= found["speedup"] * (1 + 1e-12)
            assert high >= found["speedup"] * (1 - 1e-12)
    for key in ("survival", "conditional"):
        for value, (low, high) in zip(told[key], told[f"{key}_interval"], strict=True):
            assert low <= value <= high


def test_a_clock_that_saw_no_time_pass_gives_no_speed(tmp_path: Path) -> None:
    """As a coarse CPU clock may: unknown everywhere, the rest stands."""
    given = [scripted([[1, 0]] * 4, name=name) for name in "ab"]
    for one in given:
        one.spent = [Spent(s.seconds, 0.0, s.parts) for s in one.spent]
    stopped = [replace(one, spent=[Spent(0.0, 0.0, (0.0,) * 4)] * 4) for one in given]
    plain = [plain_of(one) for one in given]
    made = finite(records_of([{"plain": plain, "head": given, "still": stopped}], {}))
    assert made["head"]["cpu_speedup"] is made["head"]["cpu_speedup_interval"] is None
    assert made["head"]["speedup"] == pytest.approx(2.0)
    assert made["still"]["speedup"] is made["still"]["tokens_per_s"] is None
    assert made["still"]["tau"] == 2.0
    result = evaluations.result(temperatures=(0.0,))
    for cell in result["cells"]:
        cell["records"] = made
    shown = write_evaluation(tmp_path, result).read_text(encoding="utf-8")
    assert "The fastest drafter at temperature 0 and batch 1 is “head”: 2.00 times" in shown
    assert "nan" not in shown.split("<h2>How it was measured")[0].split("</style>")[1].lower()
    assert [row[4:6] for row in table_rows(made)][1:] == [["2.00 (2.00–2.00)", "–"], ["–", "–"]]
    for cell in result["cells"]:
        cell["records"] = {name: made[name] for name in ("plain", "still")}
    shown = write_evaluation(tmp_path, result).read_text(encoding="utf-8")
    assert "no speed is known. “still” had 2.00 tokens" in shown


def test_speed_ups_are_on_the_turns_that_both_sides_answered() -> None:
    """A prompt that plain decoding failed on would else count for one side only."""
    given = [scripted([[1, 0]] * 4, name=name) for name in "ab"]
    plain = [plain_of(given[0])]
    made = records_of([{"plain": plain, "head": given}], {})["head"]
    assert made["rounds"] == 8
    assert made["speedup"] == pytest.approx(2)
    assert made["agreement"] == {"equal": 1, "of": 1, "largest_gap": None}
    cell = {Cell(1, 0.0, 1): {"plain": plain, "head": given}}
    rounds, answers = rounds_table(cell), answers_table(cell, lambda a: "")
    sides = [Side(*(t[t.drafter == n] for t in (rounds, answers))) for n in ("head", "plain")]
    assert [len(part) for part in paired(*sides)] == [4, 8]


def test_a_group_without_a_round_is_told_as_none() -> None:
    """Its answer ended with the prefill's token."""
    given = scripted([[1, 0]] * 3)
    short = scripted([], name="q")
    short.category = "short"
    sides = {"plain": [plain_of(given), short], "head": [given, short]}
    made = records_of([sides], {})["head"]["by_category"]
    assert made["short"] is None
    assert made["chat"]["prompts"] == 1
    assert records_of([{"plain": [short]}], {}) == {}, "nothing was timed"


def test_buckets_of_contexts_double() -> None:
    found = [bucket(n) for n in (0, 255, 256, 511, 512, 1024, 4095)]
    assert found == [
        (0, 255), (0, 255), (256, 511), (256, 511), (512, 1023), (1024, 2047), (2048, 4095)
    ]  # fmt: skip


def test_what_json_does_not_know_is_none() -> None:
    nan = float("nan")
    assert finite({"a": [1.0, nan, (nan, 2)], "b": "x"}) == {"a": [1.0, None, [None, 2]], "b": "x"}


def test_samples_tell_what_was_drafted_and_where_a_draft_fell() -> None:
    """A round cut at its end emits no token of the target's own; special tokens have no text."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer("What is the capital", add_special_tokens=False).input_ids
    given = scripted([[1, 0, 1], [1, 1, 1]], ids=[*ids, *[tokenizer.eos_token_id] * 7][:7])
    given.rounds[1] = Round(3, 3, 3, "head", 3)
    given.ids = given.ids[: 3 + 6]
    (made,) = samples({"head": [given]}, tokenizer)
    assert (made["prompt"], made["category"], made["drafter"]) == ("p", "chat", "head")
    assert [(t["depth"], t["fell"]) for t in made["tokens"]] == [
        (0, False), (1, False), (0, True), (1, False), (2, False), (3, False)
    ]  # fmt: skip
    text = tokenizer.decode(given.new_ids, skip_special_tokens=True)
    assert "".join(t["text"] for t in made["tokens"]) == text
