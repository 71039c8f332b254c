"""Train a head for a while and measure it well: `python tests/bench/bench.py --out runs/bench`.

Each stage leaves a file in OUT and is not made again, so a run that was stopped goes on where it
was (training from its own checkpoint). Tables as in the README go to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

from drafthead.data.embedded import default_target, fetch_target
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.tables import HEADER, table_rows
from drafthead.inference.target import serving_dtype
from drafthead.train.config import load_config
from drafthead.train.loop import run
from drafthead.train.record import RunFolder

STAGES = {
    "greedy": (("auto:4x4:12", "tree:3x3:8", "chain:3", "chain:1"), 0.0, "coupled"),
    "coupled": (("auto:4x4:12", "chain:3"), 1.0, "coupled"),
    "rejection": (("chain:3", "static:0,1,0.0,0.1,1.0,0.0.0"), 1.0, "rejection"),
    "block": (("chain:3",), 1.0, "block"),
}
"""Trees (the first one also serves in the merged drafter), temperature and rule."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--minutes", type=float, default=20.0, help="training time")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=list(STAGES))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)

    target = fetch_target(default_target(), progress=print)
    print("training", kept(asked.out / "training.json", lambda: train(asked.out, asked.minutes)))
    for stage in asked.stages:
        trees, temperature, rule = STAGES[stage]
        comparison = Comparison(
            head=asked.out / "train" / "head",
            target=str(target),
            dtype=serving_dtype(),
            trees=trees,
            limit=asked.prompts,
            settings=Settings(asked.new_tokens, temperature, rule=rule),
        )
        print(f"\n{stage}: {', '.join(trees)} on {asked.prompts} prompts", flush=True)
        show(kept(asked.out / f"{stage}.json", partial(compare, comparison)))


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures in a file, made first if there is none."""
    if not path.exists():
        ready = path.with_suffix(".tmp")
        ready.write_text(json.dumps(make(), indent=2, default=str))
        ready.replace(path)
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def train(out: Path, minutes: float) -> dict[str, Any]:
    """Train the preset for so many minutes over all of the embedded sample."""
    folder = out / "train"
    overrides = [f"out={folder}", f"training.max_minutes={minutes}", "training.epochs=null"]
    resume = RunFolder(folder).last.exists()
    return asdict(run(load_config("smollm2-eagle3", overrides), resume=resume))


def show(result: dict[str, Any]) -> None:
    """Print a stage as Markdown."""
    records = result["cells"][0]["records"]
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in table_rows(records):
        print(f"| {' | '.join(row)} |")
    for drafter, record in records.items():
        parts = ", ".join(f"{part} {ms:.1f}" for part, ms in record["round_ms"].items())
        print(f"{drafter}: ms of a round: {parts}")
    for name, told in result["simulated"].items():
        low, high = told["interval"]
        print(f"{name}: simulated tau {told['tau']:.3f} ({low:.2f}–{high:.2f})")


if __name__ == "__main__":
    main()
