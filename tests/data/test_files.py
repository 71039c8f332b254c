"""Files are whole or not there, and one process writes at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafthead.data.files import held, write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_a_link_is_followed_and_a_device_stays_one(tmp_path: Path) -> None:
    link, null = tmp_path / "link", tmp_path / "null"
    link.symlink_to(tmp_path / "far")
    null.symlink_to("/dev/null")
    for path in (link, null, link):
        write_atomically(path, "text")
    assert link.is_symlink()
    assert (tmp_path / "far").read_text() == "text"
    assert null.is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["far", "link", "null"]


def test_a_pipe_is_written_to_by_the_name_it_has(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    write_atomically(Path(f"/dev/fd/{writer}"), "text")
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "text"


def test_a_file_or_folder_is_held_once_and_free_afterwards(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(ValueError, match="another process writes here"), held(tmp_path):
            pass
        with held(Path(__file__)):
            pass
    with held(tmp_path):
        pass
