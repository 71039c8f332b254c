"""Files that are whole or not there, and held by one process at a time. It knows no format."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
