"""What one rank does in tests of several; a launcher starts it.

run CONFIG [--resume] [--sigterm-in STEP]: the run of a config; SIGTERM reaches rank 0 alone, amid
that step.
gradient CONFIG OUT: the gradient of the first step, by rank 0.
target CONFIG OUT: a partitioned target against a whole one; OUT.RANK holds what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import toy_head  # noqa: F401  registers itself
from safetensors.torch import save_file

from drafthead.heads.contract import fingerprint
from drafthead.inference.target import load_target
from drafthead.train.assemble import assemble
from drafthead.train.config import RunConfig, load_config
from drafthead.train.engine import Engine
from drafthead.train.loop import Trainer, run
from drafthead.train.partitioned import PartitionedTarget, gathered
from drafthead.train.record import RunFolder
from drafthead.train.result import Tick
from drafthead.train.timing import Stopwatch


def stepping(config: RunConfig, resume: bool, sigterm_in: int | None) -> None:
    def tick(at: Tick) -> None:
        if at.phase == "train" and at.step + 1 == sigterm_in:
            os.kill(os.getpid(), signal.SIGTERM)

    run(config, resume=resume, progress=tick)


def gradient(config: RunConfig, out: Path) -> None:
    """The gradient of the first step, summed over ranks, as safetensors by rank 0."""
    engine, watch = Engine(config), Stopwatch()
    parts = assemble(config, engine, watch)
    config.out.mkdir(exist_ok=True)
    trainer = Trainer(config, engine, parts, RunFolder(config.out), watch, None)
    trainer.start(False)
    trainer.forward_backward(trainer.fetch(trainer.next_group()))
    if engine.is_main:
        grads = {n: p.grad for n, p in parts.trainable.items() if p.grad is not None}
        save_file(grads, out)
    engine.wait()
    engine.close()


def target(config: RunConfig, out: Path) -> None:
    """Compare a partitioned target with a whole one, and let ranks use it unevenly."""
    engine = Engine(config)
    ours = engine.load_target(config.target.name, config.target.dtype)
    assert isinstance(ours, PartitionedTarget)
    whole = load_target(config.target.name, config.target.dtype)
    ids = torch.arange(3, 43).view(2, 20) + 7 * engine.rank
    layers = (1, 2, 3)
    same = []
    with engine.together():
        for turn in range(1 + 2 * engine.rank):  # rank 0 once, rank 1 three times
            one, two = ours.states(ids + turn, layers), whole.states(ids + turn, layers)
            same += [torch.equal(a, b) for a, b in zip(one, two, strict=True)]
            same.append(torch.equal(ours.unembed(one[1]), whole.unembed(two[1])))
    facts: dict[str, Any] = {
        "same": same,
        "contract": ours.contract(layers) == whole.contract(layers),
        "fingerprint": fingerprint(ours.model, gathered) == fingerprint(whole.model),
        "bytes": ours.local_bytes(),
        "whole_bytes": sum(p.nbytes for p in whole.model.parameters()),
        "weights": ours.num_weights == whole.num_weights,
        "training": any(module.training for module in ours.model.modules()),
        "gradients": any(p.requires_grad for p in ours.model.parameters()),
        "dtype": str(ours.dtype),
    }
    out.with_name(f"{out.name}.{engine.rank}").write_text(json.dumps(facts))
    engine.wait()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "gradient", "target"))
    parser.add_argument("config")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--sigterm-in", type=int)
    asked = parser.parse_args()
    config = load_config(asked.config)
    if asked.what == "run":
        stepping(config, asked.resume, asked.sigterm_in)
    elif asked.what == "gradient":
        gradient(config, asked.out)
    else:
        target(config, asked.out)


if __name__ == "__main__":
    main()
