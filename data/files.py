"""Files that are whole or not there, or that grow line by line; held by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file at once: a reader, a crash and a full disk see the old one or the new one.

    A link stays and leads to the new file; what is no file, as /dev/stdout, is written to.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe's resolved name would lead nowhere
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_durably(temporary: Path, path: Path) -> None:
    """Rename a finished file into place after its bytes, and then the name, are on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep a file or folder to this process inside the block; ValueError if another one has it.

    A file system without locks, as some clusters have, keeps nothing and refuses nothing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{path}: another process writes here; wait for its end, or name another place"
        ) from None


def sound_lines(path: Path) -> tuple[list[Any], int]:
    """The whole lines of JSON of a file that grows, and the bytes that they take.

    A kill may have cut the last line, and a machine that lost its power may have left what it
    never wrote: what is unreadable at the end is left out. Unreadable lines before sound ones are
    no such thing: ValueError.
    """
    lines: list[Any] = []
    sound = size = 0
    bad: ValueError | None = None
    with path.open("rb") as file:
        for text in file:
            size += len(text)
            try:
                line = json.loads(text)
            except ValueError as error:
                bad = bad or error
                continue
            if not text.endswith(b"\n"):
                continue
            if bad is not None:
                raise ValueError(f"{path}: damaged ({bad}); remove it") from bad
            lines.append(line)
            sound = size
    return lines, sound
