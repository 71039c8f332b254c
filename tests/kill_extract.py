"""Extraction killed at ten moments and at every fail-point: always the same store in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import write_config
from killing import Run, count, moments, points, survive
from stores import extraction
from tiny_runs import three_layers, write_chats, write_target


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of few shards, so that every fail-point can be tried."""
    root = tmp_path_factory.mktemp("extract")
    write_chats(root / "train.jsonl", [9, 4, 12, 7, 10])
    write_chats(root / "heldout.jsonl", [8, 3], seed=1)
    return write_config(root / "run.yaml", root, write_target(root / "tiny", three_layers()))


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    root = tmp_path_factory.mktemp("whole")
    return root, count(extraction(config).start(root), root)


def test_f19_ten_moments(config: Path, whole: tuple[Path, Run], tmp_path: Path) -> None:
    root, run = whole
    survive(extraction(config), run, root, moments(run, 10, seed=1), tmp_path)


def test_f19_every_fail_point(config: Path, whole: tuple[Path, Run], tmp_path: Path) -> None:
    root, run = whole
    assert sum("states-0" in point.path for point in run.of()) >= 20
    survive(extraction(config), run, root, points(run), tmp_path)
