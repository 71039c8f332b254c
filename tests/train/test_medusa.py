"""A head that reads the last hidden state alone, from every source of the target's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_runs import MakeConfig
from torch import Tensor

from drafthead.heads import load_head
from drafthead.train.checkpoint import head_weights
from drafthead.train.loop import run

MEDUSA: dict[str, Any] = {"type": "medusa", "draft_vocab_size": 256, "unroll_steps": 2}


def test_f16_every_source_gives_the_same_head(make_config: MakeConfig, tmp_path: Path) -> None:
    """`fill` reads what it has not written yet in its second epoch."""
    made: dict[str, dict[str, Tensor]] = {}
    for mode in ("online", "memory", "fill", "store"):
        training = {"epochs": 2, "features": mode, "loss": "ce"}
        states = {"states": str(tmp_path / "states")} if mode in ("fill", "store") else {}
        config = make_config(head=MEDUSA, data=states, training=training, out=str(tmp_path / mode))
        made[mode] = head_weights(load_head(run(config).head))
    for mode, weights in made.items():
        assert all(torch.equal(tensor, made["online"][n]) for n, tensor in weights.items()), mode
    assert made["online"]["medusa_head.1.0.linear.weight"].any()
