"""`drafthead regenerate`, killed at ten random moments and at every fail-point (make test-kill)."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import COMMAND, write_prompts
from killing import Job, KillTests
from tiny_runs import three_layers, write_target

CONVERSATIONS = 4


def regenerating(folder: Path) -> Job:
    """The job, on a tiny target and prompts in `folder`."""
    target = write_target(folder / "target", three_layers())
    prompts = write_prompts(folder / "prompts.jsonl", CONVERSATIONS)

    def argv(root: Path) -> list[str]:
        told = ["--target", str(target), "--dtype", "float32", "--max-new-tokens", "24"]
        few = ["--batch", "2", "--drop", "none"]
        return [*COMMAND, "regenerate", str(prompts), "--out", str(root / "out.jsonl"), *told, *few]

    def again(root: Path) -> list[str] | None:
        """Nothing is left to do where only the end of the process was missing."""
        return None if (root / "out.jsonl").exists() and not part(root).exists() else argv(root)

    def check(root: Path) -> None:
        out = root / "out.jsonl"
        if out.exists():
            assert len(out.read_text().splitlines()) == CONVERSATIONS, "in place and not whole"

    return Job(argv, again, lambda root: (root / "out.jsonl").read_bytes(), check)


def part(root: Path) -> Path:
    return root / "out.jsonl.part"


class TestRegenerate(KillTests):
    torn = CONVERSATIONS + 1

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory: pytest.TempPathFactory) -> Job:
        return regenerating(tmp_path_factory.mktemp("job"))
