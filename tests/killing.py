"""The kill harness: a real command, killed by SIGKILL at a chosen moment, all processes at once.

How to use it, in a test (`root` is the folder the command writes to; nothing outside it counts):

    argv = [*COMMAND, "regenerate", str(prompts), "--out", str(root / "out.jsonl")]
    whole = count(argv, root)                  # an unbroken run: its fail-points and its duration
    died = run_until_killed(argv, other_root, KillAt(point=7))
    … what is on the disk now; the command again (`run_on`), compared with the unbroken run

or, for the usual case, `survive(Job(…), whole, root, kills, folder)` with
`kills = [*moments(whole, 10, seed=1), *points(whole, most=40)]`; `KillTests` is that as a test
class. `make test` has three kills of each verb, `make test-kill` (tests/kill_*.py) ten random
moments and the fail-points.

A *moment* is a number of seconds of work. A *fail-point* is a number from 1, in the order
in which the process comes by: before and after each fsync, replace, rename, truncate, unlink,
rmdir, write to a file, safetensors save and torch save that touches `root`; for what writes, also
`torn`, with half of the bytes written. Fail-points are counted in each process of its own, and
`KillAt.rank` says in which rank of a distributed run (RANK, 0 where there is none) the number is
meant. Whichever process reaches it, all processes of the run die, the launcher first, as when a
machine loses its power, but that what was written to the kernel is kept: a missing fsync is seen
by reading the list of points (`whole.points`), never by killing.

Product code has no hook: `sitecustomize`, in a folder that goes first on PYTHONPATH, replaces the
functions of `os`, `io`, `safetensors` and `torch` in the child and its children, in any launcher.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from gun import PLAN, KillAt, Point, kill_all

LIMIT = 900.0
"""Seconds after which a run that should have ended by itself counts as hanging."""


@dataclass(frozen=True)
class Run:
    """What became of a run."""

    code: int
    killed: bool
    """Whether the harness ended it; False where it had ended before the moment came."""
    out: str
    err: str
    seconds: float
    points: list[Point]

    def of(self, rank: int = 0) -> list[Point]:
        return [point for point in self.points if point.rank == rank]


def count(argv: Sequence[str], root: Path, env: Mapping[str, str] | None = None) -> Run:
    """A whole run, with every fail-point that it passes."""
    run = run_until_killed(argv, root, KillAt(), env)
    assert run.code == 0, run
    return run


def run_on(
    argv: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command after a kill, as a user gives it again: without any plan."""
    merged = {**os.environ, **(env or {})}
    merged.pop(PLAN, None)
    return subprocess.run(argv, env=merged, capture_output=True, text=True, check=False)


def run_until_killed(
    argv: Sequence[str], root: Path, at: KillAt, env: Mapping[str, str] | None = None
) -> Run:
    """Run a command in a process group of its own and kill it, with all its children, at `at`."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="killing-") as folder:
        place, log = Path(folder), Path(folder) / "points"
        log.touch()
        hook = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import gun; "
        hook += "sys.path.pop(0); gun.arm()\n"
        (place / "sitecustomize.py").write_text(hook)
        plan = {"token": token, "root": str(root.resolve()), "log": str(log), "at": asdict(at)}
        merged = {**os.environ, **(env or {}), PLAN: json.dumps(plan | {"since": time.time()})}
        merged["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, merged.get("PYTHONPATH")]))
        with (place / "out").open("w+") as out, (place / "err").open("w+") as err:
            since = time.monotonic()
            child = subprocess.Popen(
                argv, env=merged, stdout=out, stderr=err, start_new_session=True
            )
            try:
                timed = _outlives(child, log, at)
            finally:
                kill_all(token)  # also what a launcher left behind
            code = child.wait()
            seconds = time.monotonic() - since
            out.seek(0), err.seek(0)
            text, remarks = out.read(), err.read()
        lines = log.read_text().splitlines()
        died = bool(lines) and lines[-1] == "killed"
        passed = [Point(**json.loads(line)) for line in lines if line != "killed"]
    return Run(code, timed or died, text, remarks, seconds, passed)


def _outlives(child: subprocess.Popen[bytes], log: Path, at: KillAt) -> bool:
    """Wait for the moment of a plan, or the child's end; whether it was the moment."""
    end = time.monotonic() + LIMIT
    if at.working is not None:
        while child.poll() is None and not log.stat().st_size:
            assert time.monotonic() < end, "the run wrote nothing"
            time.sleep(0.002)
    moment = at.seconds if at.working is None else at.working
    try:
        child.wait(LIMIT if moment is None else moment)
    except subprocess.TimeoutExpired:
        assert moment is not None, "the run did not end"
        return True
    return False


def moments(whole: Run, number: int, seed: int) -> list[KillAt]:
    """Random moments of a run's working time, the same for the same seed (and the same duration).

    They lie between its first fail-point and a little past the last: at other times nothing is on
    the disk that would be there at no fail-point.
    """
    span = whole.points[-1].seconds - whole.points[0].seconds
    draw = random.Random(seed)
    return [KillAt(working=draw.uniform(0, 1.05 * span)) for _ in range(number)]


def points(whole: Run, most: int | None = None, rank: int = 0) -> list[KillAt]:
    """All fail-points of a rank, or `most` of them: the first, the last and others between."""
    passed = len(whole.of(rank))
    if most is None or most >= passed:
        chosen = set(range(1, passed + 1))
    else:
        chosen = {1 + round(i * (passed - 1) / max(1, most - 1)) for i in range(most)}
    return [KillAt(point=number, rank=rank) for number in sorted(chosen)]


@dataclass(frozen=True)
class Job:
    """A command that must come to the same end however often it is killed.

    `start` and `again` give its argv for a folder: the first time, and after a kill (None where the
    kill came so late that nothing is left to do). `outcome` is what must equal the unbroken run's;
    `check` looks at what a kill left, and raises.
    """

    start: Callable[[Path], list[str]]
    again: Callable[[Path], list[str] | None]
    outcome: Callable[[Path], object]
    check: Callable[[Path], None] = lambda root: None


def survive(
    job: Job,
    whole: Run,
    root: Path,
    kills: Sequence[KillAt],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> None:
    """Kill a job at each of `kills`, in a folder of its own, and let it come to its end.

    `root` holds what the unbroken run made.
    """
    wanted = job.outcome(root)
    for number, at in enumerate(kills):
        place = folder / f"kill-{number}"
        place.mkdir(parents=True)
        died = run_until_killed(job.start(place), place, at, env)
        last = died.points[-1] if died.points else None
        where = f"{at}, of {len(whole.of(at.rank))} points; the last one was {last}"
        assert died.killed or (at.point is None and died.code == 0), f"{where}: {died}"
        job.check(place)
        again = job.again(place) if died.killed else None
        if again is not None:
            done = run_on(again, env)
            assert done.returncode == 0, f"{where}: {done.stderr}"
        assert job.outcome(place) == wanted, where
        shutil.rmtree(place)


class KillTests:
    """Ten random moments and every fail-point of a job; a subclass gives the job as a fixture."""

    torn = 1
    """Writes of the job that must be among its fail-points, at least."""

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
        """The unbroken run, and the folder of what it made."""
        root = tmp_path_factory.mktemp("whole")
        return root, count(job.start(root), root)

    def test_ten_random_moments(self, job: Job, whole: tuple[Path, Run], tmp_path: Path) -> None:
        root, run = whole
        survive(job, run, root, moments(run, 10, seed=1), tmp_path)

    def test_every_fail_point(self, job: Job, whole: tuple[Path, Run], tmp_path: Path) -> None:
        root, run = whole
        assert sum(point.what == "torn write" for point in run.points) >= self.torn
        survive(job, run, root, points(run), tmp_path)
