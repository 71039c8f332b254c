"""The whole job on the embedded model: fetch, train a head, evaluate it, report.

Everything here calls what the other verbs call; the demo only chooses sizes that fit a laptop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drafthead.data.embedded import REFERENCE, default_target, fetch_target
from drafthead.data.files import write_atomically
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.report import write_evaluation
from drafthead.inference.target import serving_dtype
from drafthead.train.config import load_config
from drafthead.train.loop import run
from drafthead.train.record import RunFolder
from drafthead.train.result import Tick, TrainResult

PRESET = "smollm2-eagle3"
ROWS = ("plain", "lookup", "head", "merged", "reference head", "reference merged")
"""The last two are of the head that comes with the package, against plain decoding beside it."""


@dataclass(frozen=True)
class DemoSize:
    """How much of everything."""

    positions: int | None = 100_000
    """Training positions, once over; None = all of the sample."""
    minutes: float | None = None
    """Train as long as this instead, over all of the sample."""
    prompts: int = 12
    new_tokens: int = 64
    tree: str = "chain:2"
    reference_tree: str = "auto:4x4:12"


@dataclass(frozen=True)
class Watcher:
    """What a caller may show while it waits; the defaults show nothing."""

    stage: Callable[[str], None] = lambda text: None
    training: Callable[[Tick], None] = lambda tick: None
    prompts: Callable[[int, int], None] = lambda done, total: None


def demo(out: Path, size: DemoSize, watcher: Watcher) -> dict[str, Any]:
    """Do the whole job and return what `result.json` in `out` holds."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    watcher.stage("fetching the embedded target")
    target = fetch_target(default_target(), progress=watcher.stage)
    watcher.stage("training an EAGLE-3 head")
    trained = _train(out / "train", size, watcher)
    watcher.stage("evaluating on held-out prompts")
    asked = Comparison(
        head=trained.head,
        target=str(target),
        dtype=serving_dtype(),
        trees=(size.tree,),
        limit=size.prompts,
        settings=Settings(max_new_tokens=size.new_tokens),
    )
    measured = compare(asked, progress=watcher.prompts, stage=watcher.stage)
    watcher.stage("evaluating the reference head, trained for longer")
    other = replace(asked, head={"reference head": Path(REFERENCE)}, trees=(size.reference_tree,))
    reference = compare(other, progress=watcher.prompts, stage=watcher.stage)
    training = {k: v for k, v in asdict(trained).items() if k not in ("head", "out")}
    seconds = time.monotonic() - began
    both = _together(measured, reference) | {"training": training, "seconds": seconds}
    result = _flat(both)
    write_atomically(out / "result.json", json.dumps(result, indent=2, default=str))
    write_evaluation(out, json.loads(json.dumps(both, default=str)), _losses(out))
    return result


def _together(measured: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """One evaluation with the reference head's rows behind the others, in the order of `ROWS`."""
    cell, other = measured["cells"][0], reference["cells"][0]["records"]
    rows = {"reference head": "reference head", "reference merged": "merged"}
    records = cell["records"] | {name: other[row] | {"name": name} for name, row in rows.items()}
    return measured | {
        "cells": [cell | {"records": records}],
        **{key: measured[key] | reference[key] for key in ("heads", "simulated", "tuning")},
        "trees": [*measured["trees"], *reference["trees"]],
    }


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """What `result.json` holds: the records by name, and everything else beside them."""
    told = result["simulated"].get("head")
    chain = (
        {"simulated_tau": told["tau"], "simulated_tau_interval": told["interval"]} if told else {}
    )
    kept = {k: v for k, v in result.items() if k not in ("cells", "samples", "simulated")}
    flat: dict[str, Any] = result["cells"][0]["records"] | chain | kept
    return flat


def _train(out: Path, size: DemoSize, watcher: Watcher) -> TrainResult:
    overrides = [f"out={out}"]
    if size.minutes is not None:
        overrides += [f"training.max_minutes={size.minutes}", "training.epochs=null"]
    elif size.positions is not None:
        overrides.append(f"data.positions={size.positions}")
    # A demo that was stopped goes on where it was; a finished one is only measured again.
    resume = RunFolder(out).last.exists()
    return run(load_config(PRESET, overrides), resume=resume, progress=watcher.training)


def _losses(out: Path) -> list[tuple[int, float]]:
    """Step and loss of each step of the training."""
    events = [
        json.loads(line)
        for line in (out / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [(int(e["step"]), float(e["loss"])) for e in events if e.get("loss") is not None]
