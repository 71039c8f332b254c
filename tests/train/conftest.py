"""A target on disk, configs that train on it in seconds, and the command in this process."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, Call, Done, Place, write_config, write_prompts
from tiny_runs import LAYERS, MakeConfig, three_layers, write_chats, write_target

import drafthead.heads  # noqa: F401  registers the built-in heads
from drafthead.train.cli import main
from drafthead.train.config import RunConfig


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A three-layer Llama with a trained tokenizer, as a Hugging Face folder."""
    return write_target(tmp_path_factory.mktemp("target") / "tiny", three_layers())


@pytest.fixture
def make_config(tmp_path: Path, target_folder: Path) -> MakeConfig:
    """Make a config over the tiny target; keyword arguments are laid over the defaults by group."""
    rng = random.Random(0)
    write_chats(tmp_path / "train.jsonl", [rng.randint(3, 12) for _ in range(20)])
    write_chats(tmp_path / "heldout.jsonl", [8] * 6, seed=1)

    def make(**groups: Any) -> RunConfig:
        base: dict[str, Any] = {
            "target": {"name": str(target_folder), "dtype": "float32"},
            "data": {
                "train": str(tmp_path / "train.jsonl"),
                "heldout": str(tmp_path / "heldout.jsonl"),
                "max_length": 128,
            },
            "head": {
                "type": "eagle3",
                "layers": LAYERS,
                "draft_vocab_size": 256,
                "unroll_steps": 2,
            },
            "schedule": {"warmup_steps": 2},
            "training": {"precision": "fp32", "tokens_per_batch": 192, "agreement_prompts": 0},
            "out": str(tmp_path / "run"),
        }
        for name, group in groups.items():
            over = isinstance(group, dict) and "type" not in group  # another head is no addition
            base[name] = {**base.get(name, {}), **group} if over else group
        return RunConfig.model_validate(base)

    return make


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Place:
    """A head trained by the real command, in a process of its own."""
    root = tmp_path_factory.mktemp("cli")
    write_chats(root / "train.jsonl", [8] * 20)
    write_chats(root / "heldout.jsonl", [8] * 6, seed=1)
    config = write_config(root / "run.yaml", root, target_folder)
    command = [*COMMAND, "train", "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    prompts = write_prompts(root / "prompts.jsonl", 4)
    return Place(root, target_folder, config, prompts, root / "run", done)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process."""

    def run(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["drafthead", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Done(int(end.value.code or 0), *capsys.readouterr())

    return run
