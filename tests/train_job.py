"""A training run as a job that may be killed, and what must come out of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from command import COMMAND
from killing import Job
from tiny_runs import events

from drafthead.heads import load_head
from drafthead.train.checkpoint import load_checkpoint

MEASURED = {"positions_per_s", "data_wait"}
"""Figures of an event that are not the same twice."""


def training(config: Path) -> Job:
    """The run of a config; after a kill it is resumed, or begun anew where nothing was saved."""

    def start(root: Path) -> list[str]:
        return [*COMMAND, "train", "--config", str(config), f"out={root / 'run'}"]

    def again(root: Path) -> list[str] | None:
        run = root / "run"
        if (run / "result.json").exists():  # the last thing that a run writes
            return None
        return start(root) + ["--resume"] * (run / "checkpoints/last.safetensors").exists()

    return Job(start, again, outcome, check)


def outcome(root: Path) -> object:
    """All that is the same whenever a run was killed: every step once, and every weight."""
    run = root / "run"
    last = load_checkpoint(run / "checkpoints/last.safetensors")
    tensors = {**last.weights, **last.moments}
    left = [path.name for path in run.rglob(".*")]
    return (
        {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()},
        [{k: v for k, v in e.items() if k not in MEASURED} for e in events(run)],
        events(run, "evaluation"),
        (run / "evaluation.json").read_text(),
        (run / "head/model.safetensors").read_bytes(),
        left,
    )


def check(root: Path) -> None:
    """What a kill leaves is whole: checkpoints can be read, and so can a head."""
    for path in root.glob("run/checkpoints/[!.]*"):
        assert all(tensor.isfinite().all() for tensor in load_checkpoint(path).weights.values())
    if (root / "run/head").exists():
        load_head(root / "run/head")
