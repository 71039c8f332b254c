"""Train a head for a while and measure it well: `python tests/bench/bench.py --out runs/bench`.

Stages are kept: a run that is stopped continues with the stage it was in (training with its own
checkpoint). Figures go to OUT/bench.json and to standard output as the README's tables.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

from drafthead.data.embedded import default_target, fetch_target
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.report import HEADER, table_rows
from drafthead.inference.target import serving_dtype
from drafthead.train.config import load_config
from drafthead.train.loop import run
from drafthead.train.record import RunFolder

GREEDY_TREES = ("chain:3", "chain:1", "chain:2", "tree:3x3:8")
SAMPLED_TREES = ("chain:3",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--minutes", type=float, default=20.0, help="training time")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=96)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = asked.out / "bench.json"
    done: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}

    target = fetch_target(default_target(), progress=print)
    if "training" not in done:
        done["training"] = train(asked.out / "train", asked.minutes)
        keep(results, done)
    stages = {
        "greedy": (GREEDY_TREES, Settings(asked.new_tokens)),
        "sampled, coupled": (SAMPLED_TREES, Settings(asked.new_tokens, 1.0)),
        "sampled, rejection": (SAMPLED_TREES, Settings(asked.new_tokens, 1.0, rule="rejection")),
    }
    for name, (trees, settings) in stages.items():
        if name not in done:
            print(f"{name}: {', '.join(trees)} on {asked.prompts} prompts", flush=True)
            done[name] = compare(
                Comparison(
                    head=asked.out / "train" / "head",
                    target=str(target),
                    dtype=serving_dtype(),
                    trees=trees,
                    limit=asked.prompts,
                    identity=4,
                    settings=settings,
                )
            )
            keep(results, done)
        show(name, done[name])


def train(out: Path, minutes: float) -> dict[str, Any]:
    """Train the preset for so many minutes over all of the embedded sample; resumes by itself."""
    overrides = [f"out={out}", f"training.max_minutes={minutes}", "training.epochs=null"]
    resume = RunFolder(out).last.exists()
    result = run(load_config("smollm2-eagle3", overrides), resume=resume)
    return {
        "steps": result.steps,
        "positions": result.positions,
        "seconds": result.seconds,
        "positions_per_s": result.positions_per_s,
        "shares": result.shares,
        "simulated_tau": result.simulated_tau,
    }


def keep(path: Path, done: dict[str, Any]) -> None:
    """Write the figures so far; a stop in between loses none."""
    ready = path.with_suffix(".tmp")
    ready.write_text(json.dumps(done, indent=2, default=str))
    ready.replace(path)


def show(name: str, result: dict[str, Any]) -> None:
    """Print a stage as a Markdown table."""
    print(f"\n{name}\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in table_rows(result["records"]):
        print(f"| {' | '.join(row)} |")
    for drafter, record in result["records"].items():
        print(f"{drafter}: ms per round", {k: round(v, 1) for k, v in record["round_ms"].items()})
    if "simulated_tau" in result:
        print("simulated tau", result["simulated_tau"], result["simulated_tau_interval"])


if __name__ == "__main__":
    main()
