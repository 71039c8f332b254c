"""The part file and what becomes of each conversation, whoever answers."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from drafthead.data.conversations import Prompt, read_conversations
from drafthead.inference.answers import (
    DROPPED,
    VERSION,
    Answer,
    Report,
    Talk,
    answer_all,
    kinds,
    part_path,
)

PROMPTS = [Prompt(f"p{i}", "chat", [f"Question {i}?", "And then?"]) for i in range(5)]
HEADER = {"target": "t"}
MADE = {"target": "t", "temperature": 0.7}
REPLIES = {
    0: [Answer("One.", "stop", 3, [5, 6, 2]), Answer("Two.", "stop", 3, [7, 8, 2])],
    1: [Answer("One.", "stop", 3, [5, 6, 2]), Answer("Cut", "length", 2, [7, 8])],
    2: [Answer("a a a a", "loop", 48, [9] * 48)],
    3: [Answer("", "stop", 1, [2]), Answer("Two.", "stop", 3, [7, 8, 2])],
    4: [],
}
"""By the prompt's place; the last one is too long for its first turn."""


def answerer(talks: Sequence[Talk]) -> Iterator[Talk]:
    """Gives the replies of the table, the last conversation first."""
    for talk in reversed(talks):
        for answer in REPLIES[talk.index]:
            over = talk.take(answer)
        if not REPLIES[talk.index]:
            talk.give_up("too long")
        else:
            assert over
        yield talk


def write(out: Path, drop: frozenset[str] = DROPPED) -> Report:
    return answer_all(answerer, PROMPTS, out, HEADER, MADE, drop=drop)


def test_loops_cuts_and_empty_answers_are_counted_and_dropped_as_asked(tmp_path: Path) -> None:
    report = write(tmp_path / "usual.jsonl")
    assert (report.written, dict(report.kept)) == (2, {"cut": 1})
    assert dict(report.skipped) == {"loop": 1, "empty": 1, "too long": 1}
    report = write(tmp_path / "strict.jsonl", frozenset({"loop", "cut", "empty"}))
    assert (report.written, dict(report.kept)) == (1, {})
    assert dict(report.skipped) == {"cut": 1, "loop": 1, "empty": 1, "too long": 1}
    report = write(tmp_path / "all.jsonl", frozenset())
    assert (report.written, dict(report.skipped)) == (4, {"too long": 1})
    assert dict(report.kept) == {"cut": 1, "loop": 1, "empty": 1}
    assert report.new_tokens == 3 + 3 + 3 + 2 + 48 + 1 + 3


def test_rows_hold_ids_finish_and_what_made_them(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", frozenset())
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["p0", "p1", "p2", "p3"]
    assert [row["finish"] for row in rows] == ["stop", "length", "length", "stop"]
    assert [row.get("loop") for row in rows] == [None, None, True, None]
    assert all(row["made"] == MADE for row in rows)
    assert rows[1]["messages"] == [
        {"role": "user", "content": "Question 1?"},
        {"role": "assistant", "content": "One.", "ids": [5, 6, 2]},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Cut", "ids": [7, 8]},
    ]


def test_what_is_written_is_read_as_conversations(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    write(out)
    found, skips = read_conversations(out, strict=True)
    assert ([c.finish for c in found], skips.total) == (["stop", "length"], 0)
    assert b'"ids"' in gzip.decompress(out.read_bytes())


def test_a_later_turn_that_gets_no_reply_leaves_the_earlier_ones(tmp_path: Path) -> None:
    talk = Talk.of(0, PROMPTS[0])
    assert not talk.take(REPLIES[0][0])
    talk.give_up("too long")
    row = talk.row(MADE)
    assert row is not None
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert (talk.kind, row["finish"]) == ("fine", "stop")


def test_another_choice_of_what_to_drop_continues_a_part_file(tmp_path: Path) -> None:
    """Nothing finished is lost to a filter."""

    class BrokenError(Exception):
        pass

    def broken(talks: Sequence[Talk]) -> Iterator[Talk]:
        for number, talk in enumerate(answerer(talks)):
            if number == 3:
                raise BrokenError
            yield talk

    out = tmp_path / "out.jsonl"
    with pytest.raises(BrokenError):
        answer_all(broken, PROMPTS, out, HEADER, MADE)
    write(out, frozenset())
    write(tmp_path / "straight.jsonl", frozenset())
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def begun(out: Path) -> bytes:
    """A part file with three conversations."""

    def some(talks: Sequence[Talk]) -> Iterator[Talk]:
        yield from list(answerer(talks))[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_all(some, PROMPTS, out, HEADER, MADE)
    return part_path(out).read_bytes()


@pytest.mark.parametrize("tail", [b"\0" * 900, b"\0" * 40 + b"\n", b'{"index": 1, "ki', b"\xff\n"])
def test_what_a_power_loss_left_at_the_end_is_answered_again(tmp_path: Path, tail: bytes) -> None:
    out = tmp_path / "out.jsonl"
    part_path(out).write_bytes(begun(out) + tail)
    write(out)
    write(tmp_path / "straight.jsonl")
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def test_damage_before_sound_lines_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = begun(out).splitlines(keepends=True)
    damaged = b"".join([*lines[:2], lines[2][:-30] + b"\n", *lines[3:]])
    part_path(out).write_bytes(damaged)
    with pytest.raises(ValueError, match=r"out\.jsonl\.part: damaged .*; remove it"):
        write(out)
    assert part_path(out).read_bytes() == damaged


def test_every_conversation_is_on_the_disk_when_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, len(synced)))

    answer_all(answerer, PROMPTS, tmp_path / "out.jsonl", HEADER, MADE, progress=progress)
    assert seen == [(n, n) for n in range(1, 6)]


def test_each_turn_has_a_stream_of_its_own() -> None:
    talks = [Talk.of(i, prompt) for i, prompt in enumerate(PROMPTS)]
    first = [talk.stream for talk in talks]
    for talk in talks:
        talk.take(REPLIES[0][0])
    assert first == list(range(5))
    assert not set(first) & {talk.stream for talk in talks}


def test_what_to_drop_is_read_from_a_list() -> None:
    assert kinds("loop, cut") == {"loop", "cut"}
    assert kinds("none") == kinds("") == frozenset()
    with pytest.raises(ValueError, match=r"--drop 'loops': choose from loop, cut, empty, or none"):
        kinds("loops")


@pytest.mark.parametrize("line", ["[]", "5", '{"index": 0, "row": null, "kind": "fine"}'])
def test_a_line_of_the_part_file_that_is_no_conversation_is_told(tmp_path: Path, line: str) -> None:
    out = tmp_path / "out.jsonl"
    named = hashlib.sha256(json.dumps([asdict(p) for p in PROMPTS]).encode()).hexdigest()
    header = json.dumps({"version": VERSION, "prompts": named, **HEADER})
    part_path(out).write_text(f"{header}\n{line}\n")
    with pytest.raises(ValueError, match=r"out\.jsonl\.part: damaged .*no conversation.*remove it"):
        write(out)
    assert part_path(out).read_text() == f"{header}\n{line}\n"
