"""Training killed at ten moments and at every fail-point: always the same weights in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import write_config
from killing import Run, count, moments, points, survive
from tiny_runs import three_layers, write_chats, write_target
from train_job import training


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few steps, so that every fail-point can be tried."""
    root = tmp_path_factory.mktemp("train")
    write_chats(root / "train.jsonl", [9, 4, 12, 7, 10])
    write_chats(root / "heldout.jsonl", [8, 3], seed=1)
    target = write_target(root / "tiny", three_layers())
    steps = {"max_steps": 4, "save_every": 2, "eval_every": 2}
    return write_config(root / "run.yaml", root, target, **steps)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    root = tmp_path_factory.mktemp("whole")
    return root, count(training(config).start(root), root)


def test_f30_ten_moments(config: Path, whole: tuple[Path, Run], tmp_path: Path) -> None:
    root, run = whole
    survive(training(config), run, root, moments(run, 10, seed=1), tmp_path)


def test_f30_every_fail_point(config: Path, whole: tuple[Path, Run], tmp_path: Path) -> None:
    root, run = whole
    assert sum("safetensors" in point.path for point in run.of()) >= 20
    survive(training(config), run, root, points(run), tmp_path)
