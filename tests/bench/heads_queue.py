"""Make the missing pieces of a comparison, some at a time, each in a process of its own.

Whatever stops it, nothing finished is lost: a piece's record is written as soon as it is there, and
a training that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads_plan import Piece, Record, Results

WORKER = Path(__file__).with_name("heads_work.py")

POLL = 0.05
"""Seconds between looks at what runs."""

SPEED, EVALUATION = 450.0, 680.0
"""Positions a second, and seconds of an evaluation, while no piece of the kind has been made."""


@dataclass(frozen=True)
class Place:
    """Where things are on this machine; no result depends on it."""

    work: Path
    data: Path
    prompts: dict[str, str]
    """Files by the names that evaluations use."""

    def of(self, piece: Piece) -> Path:
        return self.work / piece.folder

    def head(self, run: Piece) -> Path:
        return self.of(run) / "train" / "head"

    def has_head(self, run: Piece) -> bool:
        return (self.head(run) / "config.json").exists()


class Queue:
    """What there is to do, in its order; `plan` is asked anew after every finished piece."""

    def __init__(
        self,
        plan: Callable[[], list[Piece]],
        states: Piece | None,
        results: Results,
        place: Place,
    ) -> None:
        self.plan, self.states, self.results, self.place = plan, states, results, place
        self.failed: set[str] = set()

    def missing(self) -> list[Piece]:
        """Pieces without a record, and what they need that has gone."""
        wanted = [piece for piece in self.plan() if self.results.of(piece) is None]
        needed: list[Piece] = []
        for piece in wanted:
            run = piece.run
            if run is not None and self.results.of(run) and not self.place.has_head(run):
                needed.append(run)
            needed.append(piece)
        trains = any(piece.kind in ("tune", "run") for piece in needed)
        if trains and self.states is not None and not self._has_states():
            needed.insert(0, self.states)
        return needed

    def ready(self, running: Sequence[str] = ()) -> Piece | None:
        """The first piece that can be made now."""
        taken = {*running, *self.failed}
        for piece in self.missing():
            if piece.settings is None or piece.key in taken:
                continue
            if piece.kind == "evaluate":
                assert piece.run is not None
                if self.results.of(piece.run) is None or not self.place.has_head(piece.run):
                    continue
            if piece.kind in ("tune", "run") and not self._has_states():
                continue
            return piece
        return None

    def _has_states(self) -> bool:
        if self.states is None:
            return True
        whole = self.results.of(self.states) is not None
        return whole and (self.place.of(self.states) / "states" / "manifest.json").exists()


def forecast(queue: Queue, jobs: int) -> tuple[list[tuple[Piece, float]], float]:
    """Missing pieces with the seconds each will take, and hours in all on so many jobs."""
    found = [(piece, seconds_of(piece, queue.results)) for piece in queue.missing()]
    return found, sum(seconds for _, seconds in found) / 3600 / jobs


def seconds_of(piece: Piece, results: Results) -> float:
    """From the same head's pieces where there are any, else from all of the kind, else a guess."""
    kinds = ("tune", "run") if piece.kind in ("tune", "run") else (piece.kind,)
    alike = [r for r in results.records.values() if r["kind"] in kinds]
    alike = [r for r in alike if r["entry"] == piece.entry] or alike
    seconds = sum(r["wall_seconds"] for r in alike)
    if piece.kind == "evaluate":
        return seconds / len(alike) if alike else EVALUATION
    positions = sum(r["positions"] for r in alike)
    return piece.positions * (seconds / positions if positions else 1 / SPEED)


# Processes


class Stopped(BaseException):
    """A SIGTERM came."""


def work(queue: Queue, jobs: int, tell: Callable[[str], None]) -> bool:
    """Make all that can be made; whether nothing failed. Ctrl-C and SIGTERM stop the jobs, too."""

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    # The processes are kept: Python would take in the exit of one that nobody holds.
    running: dict[int, tuple[Piece, float, subprocess.Popen[bytes]]] = {}
    try:
        while True:
            while len(running) < jobs:
                piece = queue.ready([other.key for other, *_ in running.values()])
                if piece is None:
                    break
                process = _start(queue, piece)
                running[process.pid] = piece, time.monotonic(), process
                tell(f"{time.strftime('%H:%M')} begun: {piece.name}")
            if not running:
                return not queue.failed
            time.sleep(POLL)
            for pid in [*running]:
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if not ended:
                    continue
                piece, since, process = running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                wall, cpu = time.monotonic() - since, used.ru_utime + used.ru_stime
                _finish(queue, piece, status, {"wall_seconds": wall, "cpu_seconds": cpu}, tell)
    finally:
        signal.signal(signal.SIGTERM, before)
        for _, _, process in running.values():
            process.terminate()
        for _, _, process in running.values():
            process.wait()


def _start(queue: Queue, piece: Piece) -> subprocess.Popen[bytes]:
    """Begin a piece."""
    folder, states = queue.place.of(piece), queue.states
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").unlink(missing_ok=True)
    job: dict[str, Any] = {
        "kind": piece.kind,
        "settings": piece.settings,
        "data": str(queue.place.data),
        "prompts": queue.place.prompts,
        "states": None if states is None else str(queue.place.of(states) / "states"),
        "head": None if piece.run is None else str(queue.place.head(piece.run)),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=1))
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env=os.environ | one | quiet,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _finish(
    queue: Queue, piece: Piece, status: int, used: Record, tell: Callable[[str], None]
) -> None:
    folder = queue.place.of(piece)
    path = folder / "record.json"
    name = f"{time.strftime('%H:%M')} {{}}: {piece.name}, {used['wall_seconds']:.0f} s"
    if status or not path.exists():
        queue.failed.add(piece.key)
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
        tell(f"{name.format('failed')}: {lines[-1] if lines else status}; see {folder}/log.txt")
        return
    queue.results.add(piece, json.loads(path.read_text()) | used)
    tell(name.format("done"))
