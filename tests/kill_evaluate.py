"""`drafthead evaluate`, killed at ten random moments and at every fail-point (make test-kill)."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command import COMMAND, write_prompts
from killing import Job, KillTests
from tiny_runs import three_layers, write_target


def evaluating(folder: Path) -> Job:
    """The job, on a tiny target and prompts in `folder`; prompt lookup drafts."""
    target = write_target(folder / "target", three_layers())
    prompts = write_prompts(folder / "prompts.jsonl", 3)

    def argv(root: Path) -> list[str]:
        told = ["--target", str(target), "--dtype", "float32", "--max-new-tokens", "12"]
        grid = ["--batch", "1", "--batch", "2", "--identity", "1"]
        out = ["--prompts", str(prompts), "--out", str(root / "out")]
        return [*COMMAND, "evaluate", *out, *told, *grid]

    def check(root: Path) -> None:
        """Whatever is in place is whole."""
        if (root / "out" / "evaluation.json").exists():
            json.loads((root / "out" / "evaluation.json").read_text())
            figures(root)

    return Job(argv, argv, figures, check)


def figures(root: Path) -> bytes:
    """All rounds but for their seconds, in the order of the table."""
    rounds = pd.read_parquet(root / "out" / "rounds.parquet")
    told = rounds[[name for name in rounds if not name.endswith("seconds")]]
    return str(told.to_json(orient="records")).encode()


class TestEvaluate(KillTests):
    torn = 7

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory: pytest.TempPathFactory) -> Job:
        return evaluating(tmp_path_factory.mktemp("job"))
