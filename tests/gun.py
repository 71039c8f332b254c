"""The part of the kill harness that lives in the killed processes (see `killing`)."""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PLAN = "KILLING_PLAN"
"""Environment variable with the plan as JSON; its `token` marks the processes of one run."""


@dataclass(frozen=True)
class KillAt:
    """When to kill: the n-th fail-point (from 1) of a rank, so many seconds after the start, or so
    many after the run's first fail-point, by which a start that takes longer once shifts nothing.
    """

    point: int | None = None
    seconds: float | None = None
    rank: int = 0
    working: float | None = None


@dataclass(frozen=True)
class Point:
    """One fail-point that was passed: when (seconds after the start), before what, of which file.

    `what` is `before fsync`, `after fsync`, `torn write` and so on.
    """

    rank: int
    seconds: float
    what: str
    path: str


def kill_all(token: str) -> None:
    """SIGKILL every process of a run, told by the token in its environment; the caller last.

    Each lives in the session that its launcher made for it, so no process group has them all.
    """
    for process in sorted(_processes(token)):
        if process != os.getpid():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _processes(token: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # gone meanwhile, or another user's
            continue


_write, _readlink, _truncate = os.write, os.readlink, os.truncate
_open = io.open


class _Gun:
    """Counts the fail-points of this process, writes them down, and shoots at the chosen one."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.token, self.root, self.since = plan["token"], plan["root"], plan["since"]
        self.at = KillAt(**plan["at"])
        self.rank = int(os.environ.get("RANK", "0"))
        self.passed = 0
        self.log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def minds(self, path: object, folder: int | None = None) -> str | None:
        """The absolute path, if it is one in `root`: of a name, an open file or one below it."""
        try:
            if isinstance(path, int):
                full = _readlink(f"/proc/self/fd/{path}")
            else:
                below = _readlink(f"/proc/self/fd/{folder}") if folder is not None else Path.cwd()
                full = os.path.normpath(os.path.join(below, os.fsdecode(path)))  # noqa: PTH118
        except (OSError, TypeError):
            return None
        inside = full == self.root or full.startswith(self.root + os.sep)
        return full if inside else None

    def due(self) -> bool:
        """Whether the point that comes next is the chosen one."""
        return self.rank == self.at.rank and self.passed + 1 == self.at.point

    def passes(self, what: str, path: str) -> None:
        """One fail-point; does not return from the chosen one."""
        shoot = self.due()
        self.passed += 1
        point = Point(self.rank, time.time() - self.since, what, path.removeprefix(self.root))
        _write(self.log, (json.dumps(asdict(point)) + "\n").encode())
        if shoot:
            _write(self.log, b"killed\n")
            kill_all(self.token)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


def arm() -> None:
    """Replace what writes, in this process; called by `sitecustomize`."""
    if PLAN not in os.environ:
        return
    gun = _Gun(json.loads(os.environ[PLAN]))
    for name in ("fsync", "fdatasync", "truncate", "ftruncate", "unlink", "remove", "rmdir"):
        _watch(gun, os, name)
    for name in ("replace", "rename"):
        _watch(gun, os, name, which=1)
    builtins.open = io.open = _opener(gun)  # type: ignore[assignment]
    try:
        import safetensors
    except ImportError:
        pass
    else:
        _watch(gun, safetensors, "serialize_file", which=1, writes=True)
    sys.meta_path.insert(0, _Later("torch.serialization", _torch_save(gun)))


def _watch(
    gun: _Gun, module: ModuleType, name: str, which: int = 0, *, writes: bool = False
) -> None:
    """Put fail-points around a function whose argument number `which` names a file."""
    real: Callable[..., Any] = getattr(module, name)

    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        path = gun.minds(args[which], kwargs.get("dir_fd")) if len(args) > which else None
        if path is None:
            return real(*args, **kwargs)
        gun.passes(f"before {name}", path)
        result = real(*args, **kwargs)
        if writes:
            if gun.due():
                _truncate(path, Path(path).stat().st_size // 2)
            gun.passes(f"torn {name}", path)
        gun.passes(f"after {name}", path)
        return result

    # `os.supports_dir_fd`, by which shutil chooses its way, names the functions themselves.
    for group in (os.supports_dir_fd, os.supports_fd):
        if real in group:
            group.add(watched)
    setattr(module, name, watched)


class _Raw(io.FileIO):
    """A file whose writes are fail-points: nothing written, half, all."""

    gun: _Gun
    place: str

    def write(self, data: Any) -> int:
        bytes_ = memoryview(data).cast("B")
        self.gun.passes("before write", self.place)
        if self.gun.due():
            super().write(bytes_[: len(bytes_) // 2])
        self.gun.passes("torn write", self.place)
        written = super().write(bytes_)
        self.gun.passes("after write", self.place)
        return written or 0


def _opener(gun: _Gun) -> Callable[..., Any]:
    """`open`, with the standard library's own layers above a file that is watched."""

    @functools.wraps(_open)
    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = gun.minds(file) if set(mode) & set("wax+") else None
        if path is None or opener is not None:
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd)
        raw.gun, raw.place = gun, path
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    return opened


def _torch_save(gun: _Gun) -> Callable[[ModuleType], None]:
    """torch writes archives from C++: fail-points around `torch.save`."""

    def change(module: ModuleType) -> None:
        _watch(gun, module, "save", which=1, writes=True)

    return change


class _Later(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it has been imported, before others take names from it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
