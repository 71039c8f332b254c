"""What tests of the command share: the files it works on, and what one call of it gave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import CORPUS
from tiny_runs import LAYERS

COMMAND = [sys.executable, "-m", "drafthead.train.cli"]
NOISE = re.compile(r"Warning|WARNING|Traceback|deepspeed|accelerator|it/s|Loading weights", re.I)
"""What libraries say, and our own lines never do."""


@dataclass(frozen=True)
class Done:
    """One run of the command."""

    code: int
    out: str
    err: str


Call = Callable[..., Done]


@dataclass(frozen=True)
class Place:
    """The files that the tests share and leave as they are."""

    root: Path
    target: Path
    config: Path
    prompts: Path
    run: Path
    train: subprocess.CompletedProcess[str]
    """The process that made `run`."""

    @property
    def head(self) -> Path:
        return self.run / "head"


def write_config(path: Path, root: Path, target: Path, **training: Any) -> Path:
    """Write a training config as JSON, which is YAML."""
    settings = {
        "target": {"name": str(target), "dtype": "float32"},
        "data": {
            "train": str(root / "train.jsonl"),
            "heldout": str(root / "heldout.jsonl"),
            "max_length": 128,
        },
        "head": {"type": "eagle3", "layers": LAYERS, "draft_vocab_size": 256, "unroll_steps": 2},
        "training": {
            "precision": "fp32",
            "tokens_per_batch": 192,
            "max_steps": 4,
            "agreement_prompts": 2,
            **training,
        },
        "out": str(root / "run"),
    }
    path.write_text(json.dumps(settings))
    return path


def write_prompts(path: Path, count: int) -> Path:
    rows = [
        {"id": f"p{i}", "category": "ab"[i % 2], "turns": [CORPUS[i % len(CORPUS)]]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_one_line(done: Done, parts: Sequence[str]) -> None:
    """A user's error: exit code 2, one line on standard error, nothing on standard output."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert not done.err.endswith(": \n")
    assert "[Errno" not in done.err
    for part in parts:
        assert part in done.err, done.err
