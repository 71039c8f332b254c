"""A run on one screen: what metrics.jsonl says of its first and last steps, over all sittings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.train.result import told

DEPTHS = ("depth", "loss, first", "loss, last", "match, first", "match, last", "held-out survival")
SHARE = 10
"""The first and the last tenth of the steps are shown, as means."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RunTable:
    """Header and rows of the figures by depth, and lines on the run as a whole."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]


def run_table(folder: Path) -> RunTable | None:
    """Read a run's folder; None where it has made no step."""
    steps, evaluations = _events(folder, "step"), _events(folder, "evaluation")
    if not steps:
        return None
    count = max(1, len(steps) // SHARE)
    first, last = steps[:count], steps[-count:]
    best = max(evaluations, key=lambda event: event["simulated_tau"], default={})
    rows = []
    for depth in range(1, sum(key.startswith("loss_") for key in steps[0]) + 1):
        losses = [_mean(part, f"loss_{depth}") for part in (first, last)]
        matches = [_mean(part, f"simulated_match_{depth}") for part in (first, last)]
        survival = best.get(f"simulated_survival_{depth}")
        shown = [*losses, *matches, survival]
        rows.append([str(depth), *(_number(value) for value in shown)])
    return RunTable(DEPTHS, rows, _lines(folder, steps, evaluations, best, last))


def _lines(
    folder: Path,
    steps: Sequence[Event],
    evaluations: Sequence[Event],
    best: Event,
    last: Sequence[Event],
) -> list[str]:
    end = steps[-1]
    result = _result(folder)
    shown = [
        f"{end['step']} steps ({_skipped(steps)} skipped), {end['positions']:,} positions, "
        f"epoch {end['epoch']}; grad norm {_number(_mean(last, 'grad_norm'))} at the end"
    ]
    if evaluations:
        shown.append(
            f"held-out simulated tau {_number(evaluations[-1]['simulated_tau'])} at the last "
            f"evaluation, {_number(best['simulated_tau'])} at the best (step {best['step']})"
        )
    if result.get("agreement"):
        shown.append(told(result["agreement"]))
    wait = end.get("data_wait")
    waiting = "" if wait is None else f", {wait:.0%} of it waiting for the target's states"
    shown.append(f"{end['positions_per_s']:.0f} positions/s{waiting}")
    shares = result.get("shares") or {}
    if shares:
        parts = sorted(shares.items(), key=lambda item: -item[1])
        shown.append("time: " + ", ".join(f"{name} {share:.0%}" for name, share in parts))
    return shown


def _events(folder: Path, kind: str) -> list[Event]:
    """Events of one kind; of a step made twice (a killed run gone on with), the later one."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found: dict[int, Event] = {}
    for line in text.splitlines():
        try:
            event = json.loads(line)
            if event["event"] == kind:
                found[event["step"]] = event
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill
    return [found[step] for step in sorted(found)]


def _result(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _skipped(steps: Sequence[Event]) -> int:
    """A norm that is not finite is written as null."""
    return sum(event.get("grad_norm") is None for event in steps)


def _mean(events: Sequence[Event], key: str) -> float | None:
    values = [event[key] for event in events if event.get(key) is not None]
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
