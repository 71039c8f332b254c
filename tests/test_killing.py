"""The kill harness kills where it says: at every fail-point, all processes of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from killing import Job, KillAt, Run, count, moments, points, run_on, run_until_killed, survive

WRITER = """
import os, shutil, subprocess, sys, time
from pathlib import Path
root = Path(sys.argv[1])
if "--slow" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with (root / "log").open("a") as file:
    file.write("0123456789")
with (root / "new").open("wb") as file:
    file.write(b"abcd")
    file.flush()
    os.fsync(file.fileno())
(root / "new").replace(root / "old")
os.truncate(root / "log", 4)
(root / "folder").mkdir()
(root / "folder" / "file").touch()
shutil.rmtree(root / "folder")
Path("/dev/null").write_text("outside")
if "--slow" in sys.argv:
    time.sleep(60)
"""

PASSED = [
    *["before write", "torn write", "after write"],
    *["before write", "torn write", "after write", "before fsync", "after fsync"],
    *["before replace", "after replace", "before truncate", "after truncate"],
    *["before unlink", "after unlink", "before rmdir", "after rmdir"],
]


def argv(root: Path, *more: str) -> list[str]:
    return [sys.executable, "-c", WRITER, str(root), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("whole")
    return count(argv(root), root)


def found(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(root.glob("*")) if path.is_file()}


def test_a_whole_run_lists_what_it_passes(whole: Run) -> None:
    assert [point.what for point in whole.points] == PASSED
    assert not whole.killed
    assert [point.path for point in whole.points[:4]] == ["/log"] * 3 + ["/new"]
    assert all(0 < a.seconds <= whole.seconds for a in whole.points)


def test_each_fail_point_leaves_what_was_written_before_it(whole: Run, tmp_path: Path) -> None:
    left = []
    for at in points(whole):
        root = tmp_path / str(at.point)
        root.mkdir()
        died = run_until_killed(argv(root), root, at)
        assert died.killed
        assert [point.what for point in died.points] == PASSED[: at.point]
        left.append(found(root))
    ten, four = {"log": "0123456789"}, {"log": "0123"}
    assert left[:3] == [{"log": ""}, {"log": "01234"}, ten]
    assert left[3:8] == [ten | {"new": text} for text in ("", "ab", "abcd", "abcd", "abcd")]
    assert left[8:12] == [ten | {"new": "abcd"}] + [ten | {"old": "abcd"}] * 2 + [
        four | {"old": "abcd"}
    ]


@pytest.mark.parametrize("at", [KillAt(seconds=1.5), KillAt(working=0.5)])
def test_a_moment_kills_the_children_too(tmp_path: Path, at: KillAt) -> None:
    died = run_until_killed(argv(tmp_path, "--slow"), tmp_path, at)
    assert died.killed
    assert died.points or at.working is None
    assert died.seconds < 30, "the child of the child would sleep for a minute"
    assert died.code == -9


def test_a_run_that_ends_before_the_moment_was_not_killed(tmp_path: Path) -> None:
    ended = run_until_killed(argv(tmp_path), tmp_path, KillAt(point=10**6))
    assert (ended.killed, ended.code) == (False, 0)
    assert found(tmp_path) == {"log": "0123", "old": "abcd"}


def test_moments_and_points_are_the_same_for_the_same_run(whole: Run, tmp_path: Path) -> None:
    assert moments(whole, 4, seed=3) == moments(whole, 4, seed=3)
    span = whole.points[-1].seconds - whole.points[0].seconds
    assert all(0 <= at.working <= 1.05 * span for at in moments(whole, 50, seed=4))
    assert [at.point for at in points(whole, 3)] == [1, 9, 16]
    assert len(points(whole)) == len(PASSED)
    assert run_on(argv(tmp_path)).returncode == 0


def test_safetensors_and_torch_saves_are_fail_points(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from safetensors.torch import save_file; from torch import save\n"
        "save_file({'a': torch.ones(9)}, sys.argv[1] + '/a'); save([1], sys.argv[1] + '/b')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    whole = count(command, tmp_path)
    kinds = ["before", "torn", "after"]
    assert [point.what for point in whole.points] == [
        *(f"{kind} serialize_file" for kind in kinds),
        *(f"{kind} save" for kind in kinds),
    ]
    size = (tmp_path / "a").stat().st_size
    assert run_until_killed(command, tmp_path, KillAt(point=2)).killed
    assert (tmp_path / "a").stat().st_size == size // 2


def test_a_job_that_does_not_come_to_the_same_end_is_named(whole: Run, tmp_path: Path) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    count(argv(root), root)
    survive(Job(argv, argv, found), whole, root, points(whole, 3), tmp_path / "good")
    idle = Job(argv, lambda _: [sys.executable, "-c", ""], found)
    with pytest.raises(AssertionError, match=r"point=6, .* of 16 points; .*after write"):
        survive(idle, whole, root, [KillAt(point=6)], tmp_path / "bad")
