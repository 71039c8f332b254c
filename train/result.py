"""What a run tells while it goes on and when it is over: plain data, with no torch in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tick:
    """Where a run is, for a progress bar; sent after every micro-batch and evaluated batch."""

    phase: str
    """`train` or `evaluate`."""
    step: int
    """Complete optimiser steps."""
    share: float
    """How much of the run is behind, 0 to 1."""
    loss: float | None
    """Of the last complete step."""
    positions_per_s: float


Progress = Callable[[Tick], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    head: Path
    """Folder of the best head, as `save_pretrained` writes it."""
    out: Path
    steps: int
    positions: int
    """Token positions trained on, over all sittings and ranks, padding excluded."""
    seconds: float
    """Wall clock of all steps over all sittings, evaluations between them included."""
    positions_per_s: float
    """Of this sitting and all ranks, over the time spent in steps."""
    shares: dict[str, float]
    """Share of this process's time by part."""
    best_step: int | None
    simulated_tau: float | None
    """Held-out figure of the saved head; None without held-out rows."""
    simulated_survival: tuple[float, ...]
    skipped: int
    """Steps skipped because something was not finite."""
    dropped: int
    """Rows this rank left out because the target's states are not finite."""
    agreement: dict[str, Any] | None = None
    """The saved head as it is served against what training says of it (`train.served`); None where
    that was not asked for."""


def told(agreement: Mapping[str, Any]) -> str:
    """In one line, whether a head does when served what training says of it."""
    if reason := agreement.get("left_out"):
        return f"not checked as served: {reason}"
    cause = agreement["cause"]
    if agreement["decoded_tau"] is None:
        return f"the saved head cannot be served: {cause}"
    figures = (
        f"decoded tau {agreement['decoded_tau']:.3f}, simulated {agreement['simulated_tau']:.3f} "
        f"on {agreement['prompts']} prompts"
    )
    if agreement["agrees"]:
        return f"as served: {figures}; they agree"
    away = f"{agreement['difference']:+.3f}"
    if agreement["interval"] is not None:
        low, high = agreement["interval"]
        away += f", 95 % interval {low:+.3f} to {high:+.3f}"
    return f"as served: {figures} ({away}); likely cause: {cause}"
