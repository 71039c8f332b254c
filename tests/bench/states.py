"""What a store of states costs and saves: `OMP_NUM_THREADS=1 python tests/bench/states.py`.

Extraction against what bounds it: the target's forward alone (to its logits, as a prefill does, and
to the states alone) and the disk alone, all over the same micro-batches and parts in turn, so that
a machine that slows down slows all of them. Then a training from that store: the share of its time
that it waits for data, and its speed against one that runs the target. Last the forecast against
the files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from drafthead.data.batches import collate, plan
from drafthead.data.files import replace_durably
from drafthead.inference.target import Target, load_target, serving_dtype
from drafthead.train.assemble import read_texts
from drafthead.train.config import RunConfig, load_config
from drafthead.train.extract import Extracted, extract
from drafthead.train.loop import run
from drafthead.train.outline import outline_of


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--data", default="samples/train")
    parser.add_argument("--positions", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-states"))
    asked = parser.parse_args()
    config = settings(asked)
    shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True)
    figures = extraction(config, asked.out / "states")
    figures |= training(config, asked.out, asked.steps)
    print(json.dumps(figures, indent=2))
    (asked.out / "states.json").write_text(json.dumps(figures, indent=2) + "\n")


def settings(asked: argparse.Namespace) -> RunConfig:
    return load_config(
        "smollm2-eagle3",
        [
            f"target.name={asked.target}",
            f"data.train={asked.data}",
            "data.heldout=[]",
            f"data.positions={asked.positions}",
            "head.warm_start=0",
            f"training.max_steps={asked.steps}",
            f"out={asked.out / 'run'}",
        ],
    )


class Clock:
    """Wall and CPU seconds of what is timed."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def time(self, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def extraction(config: RunConfig, out: Path) -> dict[str, float]:
    """Extract, with the plain forwards of each micro-batch after it, in the same seconds."""
    outline = outline_of(config.target.name, None)
    rows = list(read_texts(config.data, outline).unique.values())
    training = config.training
    batches = plan([len(r.ids) for r in rows], training.tokens_per_batch, training.seed)
    target = load_target(config.target.name, serving_dtype())
    whole, states, between, inside = Clock(), Clock(), Clock(), Clock()
    warm(target)
    todo = iter(batches)

    def forwards(done: int, total: int) -> None:
        ids = collate([rows[row] for row in next(todo)])[0]
        with torch.no_grad():
            whole.time(lambda: target.model(ids, use_cache=False).logits)
        states.time(lambda: target.states(ids, ()))

    made: list[Extracted] = []
    inside.time(
        lambda: made.append(
            extract(config, out, progress=lambda *p: between.time(lambda: forwards(*p)))
        )
    )
    cpu = inside.cpu - between.cpu  # with loading, tokenising and describing the target
    wall = made[0].seconds - between.wall
    disk = Clock()
    disk.time(lambda: copy(out, out.with_name("copy")))
    positions = made[0].positions
    bound = positions / max(whole.wall, disk.wall)
    parts = f"extraction {cpu:.1f} in all, forward {whole.cpu:.1f}, states {states.cpu:.1f}"
    print(f"CPU seconds: {parts}")
    return {
        "threads": torch.get_num_threads(),
        "positions": positions,
        "extraction_positions_per_s": positions / wall,
        "forward_positions_per_s": positions / whole.wall,
        "states_only_positions_per_s": positions / states.wall,
        "disk_positions_per_s": positions / disk.wall,
        "share_of_slower_bound": positions / wall / bound,
        "share_of_states_only": states.wall / wall,
        "bytes": made[0].bytes,
        "bytes_per_position": made[0].bytes / positions,
        "forecast_error": made[0].forecast_bytes / made[0].bytes - 1,
    }


def warm(target: Target) -> None:
    with torch.no_grad():
        target.model(torch.arange(5, 517)[None], use_cache=False)


def copy(source: Path, out: Path) -> None:
    """Write the same bytes again, as durably."""
    out.mkdir(exist_ok=True)
    for path in source.glob("*.safetensors"):
        temporary = out / f".{path.name}.tmp"
        temporary.write_bytes(path.read_bytes())
        replace_durably(temporary, out / path.name)


def training(config: RunConfig, out: Path, steps: int) -> dict[str, float]:
    """A few steps from the store and a few with the target."""
    figures: dict[str, float] = {"steps": steps}
    for name, states in (("store", out / "states"), ("online", None)):
        data = config.data.model_copy(update={"states": states})
        update = {"features": "online"} if states is None else {"features": "store"}
        train = config.training.model_copy(update=update)
        place = out / f"run-{name}"
        done = run(config.model_copy(update={"data": data, "training": train, "out": place}))
        figures[f"{name}_positions_per_s"] = done.positions_per_s
        figures[f"{name}_data_wait"] = done.shares["target"]
    return figures


if __name__ == "__main__":
    main()
