"""A journal loses nothing that was kept, and takes nothing of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.inference.log import JOURNAL, journal

HEADER = {"target": "t", "prompts": "p"}


def kept(folder: Path, made: list[str], **changed: Any) -> tuple[dict[str, Any], int]:
    """The values of some keys, and sittings; `made` gets the keys that were worked out."""

    def make(key: str) -> dict[str, float]:
        made.append(key)
        return {key: 0.1 + len(made)}

    with journal(folder, HEADER | changed, {"date": "today"}) as found:
        keep = found.below("x")
        values = {key: keep(key, lambda key=key: make(key)) for key in "abc"}
        return values, len(found.sittings)


def test_a_run_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    """Cut anywhere: what is whole is not made again, the rest is, and nothing else is there."""
    made: list[str] = []
    values, sittings = kept(tmp_path, made)
    assert (made, sittings) == (["a", "b", "c"], 1)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    assert kept(tmp_path, made) == (values, 1), "nothing was left to do, so this was no sitting"
    assert path.read_bytes() == whole
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 5, ends[0], ends[0] + 3, ends[1], ends[2], ends[2] + 9, ends[3], len(whole) - 1):
        path.write_bytes(whole[:cut])
        made.clear()
        again, _ = kept(tmp_path, made)
        lines = max(0, sum(end <= cut for end in ends) - 2)
        assert made == ["a", "b", "c"][lines:]
        assert {k: again[k] for k in "abc"[:lines]} == {k: values[k] for k in "abc"[:lines]}
        assert all(json.loads(line) for line in path.read_text().splitlines())
    assert kept(tmp_path, made)[1] >= 1


def test_another_header_is_refused_by_name_and_nothing_is_lost(tmp_path: Path) -> None:
    kept(tmp_path, [])
    before = (tmp_path / JOURNAL).read_bytes()
    with pytest.raises(ValueError, match="begun with another prompts; ask for the same") as error:
        kept(tmp_path, [], prompts="q")
    assert "\n" not in str(error.value)
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_another_commands_journal_is_left_alone(tmp_path: Path) -> None:
    for text in ('{"step": 1}\n', "[1]\n"):
        (tmp_path / JOURNAL).write_text(text)
        with pytest.raises(ValueError, match="is no journal of an evaluation; name another --out"):
            kept(tmp_path, [])
        assert (tmp_path / JOURNAL).read_text() == text


def test_damage_before_the_end_is_no_torn_line(tmp_path: Path) -> None:
    kept(tmp_path, [])
    path = tmp_path / JOURNAL
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{torn\n" + "".join(lines[2:]))
    with pytest.raises(ValueError, match="damaged"):
        kept(tmp_path, [])
    path.write_text(lines[0] + "[1]\n" + "".join(lines[2:]))
    with pytest.raises(ValueError, match=f"{JOURNAL}:2: damaged"):
        kept(tmp_path, [])


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        journal(tmp_path, HEADER, {}),
        pytest.raises(ValueError, match="another process writes here"),
        journal(tmp_path, HEADER, {}),
    ):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        kept(tmp_path / "file", [])


def test_without_a_folder_values_are_kept_in_memory_in_the_same_form(tmp_path: Path) -> None:
    """A tuple is a list, as it would be when it was read."""
    with journal(None, HEADER, {}) as found:
        assert found.keep("a", lambda: (1, 2)) == found.keep("a", lambda: 5) == [1, 2]
        assert len(found.sittings) == 1
    assert not list(tmp_path.iterdir())
