"""A forecast as lines and table rows: text only."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from drafthead.train.drafting import DraftCost
from drafthead.train.estimate import Estimate
from drafthead.train.hardware import GB
from drafthead.train.placing import Need

HEADER = ("a rank holds", "in all", "target", "head + optimiser", "step", "rest", "host", "fits")


def table_rows(estimate: Estimate) -> list[list[str]]:
    """Every way to place the run, the asked one marked."""
    return [_row(need, estimate) for need in estimate.needs]


def _row(need: Need, estimate: Estimate) -> list[str]:
    groups = {"target": 0, "head": 0, "step": 0, "rest": 0}
    for name, size in need.parts.items():
        groups[_GROUP.get(name, "rest")] += size
    mark = "> " if need.case == estimate.asked.case else "  "
    sizes = [gigabytes(size) if size else "–" for size in groups.values()]
    host = gigabytes(need.host) if need.host else "–"
    fits = "yes" if need.fits(estimate.hardware) else "no"
    return [mark + need.case.title, gigabytes(need.device), *sizes, host, fits]


_GROUP = {
    "target": "target",
    "target, gathered": "target",
    "borrowed": "target",
    "head": "head",
    "moments": "head",
    "master weights": "head",
    "step": "step",
    "teacher states": "step",
}


def lines(estimate: Estimate) -> list[str]:
    """What is computed, and at the end what is assumed."""
    f, data = estimate.footprint, estimate.data
    shown = [
        f"head: {f.trained / 1e6:.2f} M weights trained, {f.frozen / 1e6:.2f} M frozen, "
        f"{gigabytes(f.borrowed_alone)} borrowed; target: {f.target_weights / 1e9:.3f} G weights",
        "operations a position: "
        + ", ".join(f"{name} {value / 1e9:.3g} G" for name, value in estimate.flops.items()),
        *map(round_line, estimate.rounds),
        f"on {estimate.hardware.title}, {estimate.asked.case.ranks} ranks, "
        f"{estimate.asked.case.tokens_per_batch} positions a micro-batch",
    ]
    if estimate.store_bytes is not None:
        shown.append(f"states of {data.positions:,} positions: {gigabytes(estimate.store_bytes)}")
    if estimate.hours is None:
        shown.append("hours: not known without data; set data.positions or training.max_steps")
    else:
        parts = [f"{name} {value:.3g} h" for name, value in estimate.hours.items() if value]
        shown.append("time: " + ", ".join(parts))
    return [*shown, verdict(estimate), *(f"assumed: {text}" for text in estimate.assumptions)]


def round_line(cost: DraftCost) -> str:
    """What one round of drafting takes."""
    small = f", {cost.small_steps} of the steps small" if cost.small_steps else ""
    steps = "1 step" if cost.steps == 1 else f"{cost.steps} steps"
    return (
        f"a round ({cost.shape}, {cost.context} tokens before): {cost.macs / 1e9:.3g} G MAC, "
        f"{cost.bytes / 1e6:.4g} MB of weights read, {steps} ({cost.dtype}{small})"
    )


def verdict(estimate: Estimate) -> str:
    """Whether it fits, and otherwise the smallest change after which it does."""
    asked, best = estimate.asked, estimate.smallest
    if estimate.fits:
        return f"fits: {gigabytes(asked.device)} of {gigabytes(estimate.hardware.memory)} a device"
    if best is None:
        return "does not fit, nor does any other way to place it on this hardware"
    case = best.case
    ranks = f", {case.ranks} devices" if case.ranks != asked.case.ranks else ""
    fewer = case.tokens_per_batch != asked.case.tokens_per_batch
    tokens = f", training.tokens_per_batch={case.tokens_per_batch}" if fewer else ""
    return (
        f"does not fit: {gigabytes(asked.device)} of {gigabytes(estimate.hardware.memory)} a "
        f"device; the smallest that does: {case.title}{ranks}{tokens} ({gigabytes(best.device)})"
    )


def as_json(estimate: Estimate) -> dict[str, Any]:
    """All of it as plain values, sums included."""
    plain = asdict(estimate)
    plain["asked"]["device"] = estimate.asked.device
    for need, held in zip(plain["needs"], estimate.needs, strict=True):
        need |= {"device": held.device, "fits": held.fits(estimate.hardware)}
    return plain


def gigabytes(size: int) -> str:
    return f"{math.ceil(size / GB * 100) / 100:.2f} GB" if size < 10 * GB else f"{size / GB:.1f} GB"
