"""What training tests share: tiny targets on disk, chats, configs, and the events of a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny import CORPUS, tiny_target, tiny_tokenizer
from transformers import PreTrainedModel

from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.target import load_target
from drafthead.train.config import RunConfig

LAYERS = (1, 2, 3)
"""Captured states of the three-layer target."""

MakeConfig = Callable[..., RunConfig]


def three_layers(seed: int = 0) -> PreTrainedModel:
    """The target of these tests: width 64, vocabulary 512."""
    return tiny_target(num_layers=3, tied=True, seed=seed)


def write_target(folder: Path, model: PreTrainedModel) -> Path:
    """Write a target as a Hugging Face folder, tokenizer included."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_head(folder: Path, target_folder: Path) -> Path:
    """Write an untrained EAGLE-3 head of that target."""
    target = load_target(target_folder)
    made = Eagle3Settings(draft_vocab_size=None).build(target.contract(LAYERS), target.config, None)
    made.bind(target.model)
    made.save_pretrained(folder)
    return folder


def write_chats(path: Path, answers: Sequence[int], seed: int = 0, question: int = 4) -> Path:
    """One chat per entry of `answers`, of that many words of the tokenizer's corpus."""
    rng = random.Random(seed)
    words = " ".join(CORPUS).split()
    lines = []
    for index, count in enumerate(answers):
        messages = [
            {"role": "user", "content": " ".join(rng.choices(words, k=question))},
            {"role": "assistant", "content": " ".join(rng.choices(words, k=count))},
        ]
        lines.append(json.dumps({"id": f"row-{index}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def events(out: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Events of one kind in a run's metrics.jsonl."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]
