"""Trainers of one process, made as the command makes them, for tests that look inside a step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny import tiny_target, tiny_tokenizer
from tiny_runs import write_target
from torch import Tensor

from drafthead.train.assemble import assemble
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.loop import Trainer
from drafthead.train.record import RunFolder
from drafthead.train.timing import Stopwatch


def make_trainer(config: RunConfig) -> Trainer:
    """A trainer of this process, ready to step."""
    engine, watch, folder = Engine(config), Stopwatch(), RunFolder(config.out)
    folder.root.mkdir(exist_ok=True)
    folder.start(config, False, {})
    trainer = Trainer(config, engine, assemble(config, engine, watch), folder, watch, None)
    trainer.start(False)
    return trainer


def first_gradient(config: RunConfig) -> dict[str, Tensor]:
    """The gradient of the first step."""
    trainer = make_trainer(config)
    trainer.forward_backward(trainer.fetch(trainer.next_group()))
    return {name: p.grad for name, p in trainer.parts.trainable.items() if p.grad is not None}


def poison(folder: Path) -> dict[str, str]:
    """Write a target with a token whose states are 1e30, and beside train.jsonl of `folder` the
    chats one.jsonl, with one of it in front, and all.jsonl, of nothing else.
    """
    model = tiny_target(num_layers=3, tied=False)
    with torch.no_grad():
        tilde = tiny_tokenizer().convert_tokens_to_ids("~")  # in no other chat
        model.get_input_embeddings().weight[tilde] = 1e30  # type: ignore[operator, union-attr]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    bad = dict(rows[3], id="bad")
    bad["messages"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "~ a"}]
    (folder / "one.jsonl").write_text("\n".join(map(json.dumps, [bad, *rows])) + "\n")
    (folder / "all.jsonl").write_text("\n".join([json.dumps(bad)] * 10) + "\n")
    return {"name": str(write_target(folder / "poisoned", model)), "dtype": "float32"}
