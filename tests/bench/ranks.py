"""Two processes against one, on the embedded target: the same losses, whoever shards what.

    .venv/bin/python tests/bench/ranks.py --out runs/bench/ranks

One process that accumulates two micro-batches makes some steps in fp32; two processes with the
shipped DeepSpeed configs make the same ones, with the target whole and partitioned. A table says
how far losses, gradients and weights are apart. Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import ZERO2, ZERO3, farthest, last, train
from tiny_runs import events

from drafthead.data.files import write_atomically
from drafthead.train.config import RunConfig, load_config

WAYS: dict[str, tuple[list[str], bool]] = {
    "zero2": (ZERO2, False),
    "zero2, partitioned target": (ZERO2, True),
    "zero3": (ZERO3, False),
    "zero3, partitioned target": (ZERO3, True),
}
CLOSE = 1e-4
"""How far apart two losses may be."""


def config_of(
    name: str, out: Path, steps: int, positions: int, accumulate: int, partition: bool
) -> RunConfig:
    """Short rows and a small vocabulary, so that a step takes a second or two."""
    return load_config(
        "smollm2-eagle3",
        [
            f"out={out / name.replace(', ', '-').replace(' ', '-')}",
            f"data.positions={positions}",
            "data.heldout=[]",
            "data.max_length=192",
            "head.draft_vocab_size=4096",
            "head.warm_start=1000",
            "training.tokens_per_batch=256",
            "training.precision=fp32",
            "training.epochs=null",
            "training.max_minutes=null",
            f"training.max_steps={steps}",
            f"training.accumulate={accumulate}",
            f"training.partition_target={str(partition).lower()}",
        ],
    )


def compare(one: RunConfig, two: RunConfig, seconds: float) -> dict[str, float]:
    """How far the second run is from the first."""
    pairs = list(zip(events(one.out), events(two.out), strict=True))
    first, second = last(one).weights, last(two).weights
    assert first.keys() == second.keys()
    return {
        "steps": len(pairs),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "gradient": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs),
        "weights": max(farthest(second[name], tensor) for name, tensor in first.items()),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/ranks"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--positions", type=int, default=4000)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    one = config_of("single", asked.out, asked.steps, asked.positions, 2, False)
    if not (one.out / "result.json").exists():
        train([sys.executable], one, asked.out)
    table = {}
    for name in asked.only:
        launcher, partition = WAYS[name]
        two = config_of(name, asked.out, asked.steps, asked.positions, 1, partition)
        began = time.monotonic()
        train(launcher, two, asked.out)
        table[name] = compare(one, two, time.monotonic() - began)
        print(name, json.dumps(table[name]), flush=True)
    write_atomically(asked.out / "ranks.json", json.dumps(table, indent=2) + "\n")
    worst = max(row["loss"] for row in table.values())
    print(f"largest difference of a loss: {worst:.1e} (at most {CLOSE:.0e})")
    sys.exit(worst > CLOSE)


if __name__ == "__main__":
    main()
