"""The embedded samples keep what their data card promises."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from drafthead.data.conversations import read_conversations, read_prompts
from drafthead.data.embedded import sample_path

Row = dict[str, object]
RUN = 13
"""No run of so many words may stand on both sides of the split."""


def rows_of(split: str) -> list[Row]:
    with gzip.open(sample_path(split), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def family(row: Row) -> str:
    return str(row["id"]).rsplit("-", 1)[0]


def runs(rows: list[Row], role: str) -> Iterator[tuple[str, ...]]:
    for row in rows:
        for message in row["messages"]:  # type: ignore[attr-defined]
            if message["role"] == role:
                words = re.findall(r"\w+", message["content"].lower())
                yield from (tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1))


@pytest.fixture(scope="module")
def split() -> dict[str, list[Row]]:
    return {name: rows_of(name) for name in ("train", "test")}


def test_there_are_enough_prompts_of_enough_kinds(split: dict[str, list[Row]]) -> None:
    rows = split["train"] + split["test"]
    assert len({row["id"] for row in rows}) == len(rows) >= 1200
    families = defaultdict(set)
    for row in rows:
        families[row["category"]].add(family(row))
    assert len(families) >= 8
    assert min(len(names) for names in families.values()) >= 12
    assert max(Counter(map(family, rows)).values()) <= 15


def test_two_families_of_each_category_are_held_out(split: dict[str, list[Row]]) -> None:
    train, test = ({family(row) for row in split[name]} for name in ("train", "test"))
    assert not train & test
    held = Counter(name.rsplit("-", 1)[0] for name in test)
    assert set(held.values()) == {2}
    assert set(held) == {row["category"] for row in split["train"]}


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_run_of_13_words_stands_on_both_sides(split: dict[str, list[Row]], role: str) -> None:
    seen = set(runs(split["train"], role))
    assert not [run for run in runs(split["test"], role) if run in seen]


def test_every_row_is_a_conversation_that_can_be_trained_on_and_asked_again() -> None:
    for name in ("train", "test"):
        path = sample_path(name)
        for read in (read_conversations, read_prompts):
            found, skips = read(path)
            assert len(found) == len(rows_of(name))
            assert skips.total == 0


def test_the_files_are_small() -> None:
    assert sum(sample_path(name).stat().st_size for name in ("train", "test")) <= 3 * 2**20
