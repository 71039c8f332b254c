"""Training killed by SIGKILL comes to the weights of a run that was let alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import write_config
from killing import KillAt, Run, count, survive
from tiny_runs import write_chats
from train_job import training


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("train")
    write_chats(root / "train.jsonl", [9, 4, 12, 7, 10] * 4)
    write_chats(root / "heldout.jsonl", [8] * 6, seed=1)
    steps = {"max_steps": 6, "save_every": 2, "eval_every": 3, "accumulate": 2}
    return write_config(root / "run.yaml", root, target_folder, **steps)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    root = tmp_path_factory.mktemp("whole")
    return root, count(training(config).start(root), root)


@pytest.mark.parametrize(
    ("file", "what", "which"),
    [
        ("/run/checkpoints/.last.safetensors.tmp", "torn serialize_file", 1),
        ("/run/metrics.jsonl", "torn write", 4),
        ("/run/head", "before rename", 0),
    ],
    ids=["amid a checkpoint", "amid a line of metrics", "before the head is in place"],
)
def test_f30_a_killed_run_comes_to_the_same_end(
    config: Path, whole: tuple[Path, Run], tmp_path: Path, file: str, what: str, which: int
) -> None:
    root, run = whole
    points = [n for n, p in enumerate(run.of(), 1) if p.path == file and p.what == what]
    assert len(points) > which, sorted({(p.path, p.what) for p in run.of()})
    survive(training(config), run, root, [KillAt(point=points[which])], tmp_path)
