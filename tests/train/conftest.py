"""A target on disk, and configs that train on it in seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from runs import LAYERS, MakeConfig, three_layers, write_chats, write_target

import drafthead.heads  # noqa: F401  registers the built-in heads
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
            "head": {"type": "eagle3", "layers": LAYERS, "draft_vocab_size": 256, "unroll_steps": 2},
            "schedule": {"warmup_steps": 2},
            "training": {"precision": "fp32", "tokens_per_batch": 192},
            "out": str(tmp_path / "run"),
        }
        for name, group in groups.items():
            over = isinstance(group, dict) and "type" not in group  # another head is no addition
            base[name] = {**base.get(name, {}), **group} if over else group
        return RunConfig.model_validate(base)

    return make
