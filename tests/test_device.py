"""The device script says in one line what it lacks; `tests/device.sh --cpu` runs all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("device.sh")


def run(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.mark.parametrize(
    ("python", "code", "said"),
    [(sys.executable, 3, "no CUDA GPU"), ("no-such-python", 2, "no working torch")],
)
def test_without_a_gpu_or_torch_it_stops_with_one_line(
    python: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run(str(tmp_path), str(tmp_path / "out"), python=python)
    assert done.returncode == code
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.glob("out/*.json")), "it ran something"


def test_it_asks_for_a_target() -> None:
    done = run("/nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "usage: " in done.stderr
