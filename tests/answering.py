"""What tests of regenerated answers share: prompts, a target that ends, a run that breaks off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafts import endless
from tiny import tiny_tokenizer

from drafthead.data.conversations import Prompt
from drafthead.inference.answers import Answering
from drafthead.inference.regenerate import regenerate
from drafthead.inference.target import Target

ANSWERING = Answering(max_new_tokens=16, seed=8, batch=3)
PROMPTS = [
    Prompt("a", "chat", ["What is the capital of France?", "And its river?", "And then?"]),
    Prompt("b", "maths", ["Three apples and four pears make how many?"]),
    Prompt("c", "chat", ["Write a function."], system="Be short and right, always."),
    Prompt("d", "chat", ["Memory fades slowly.", "Why?"]),
    Prompt("e", "code", ["Explain every line of it."]),
    Prompt("f", "code", ["Summarise the paragraph.", "Without names."]),
    Prompt("a", "maths", ["Two of five?"]),
]
"""The last has an id that was there before, as users' files do."""


def ending_target() -> Target:
    """A target that ends its answers often: every eighth of its tokens is an end token."""
    model = endless(num_layers=3)
    model.generation_config.eos_token_id = [2, *range(3, 512, 8)]
    return Target(model, tiny_tokenizer())


def rows(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


class KilledError(Exception):
    """Stands for a kill between two conversations."""


def begin(target: Target, out: Path, conversations: int) -> None:
    """Run until this many conversations are written, then break off."""

    def progress(done: int, total: int) -> None:
        if done == conversations:
            raise KilledError

    with pytest.raises(KilledError):
        regenerate(target, PROMPTS, out, ANSWERING, progress=progress)
