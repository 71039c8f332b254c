"""What a run tells while it goes on: events in metrics.jsonl, the tracker's figures, a bar's ticks.

Only rank 0 tells anything. It decides nothing: a run without a journal would make the same steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafthead.train.checkpoint import LoopState
from drafthead.train.engine import Engine
from drafthead.train.heldout import Simulated
from drafthead.train.interrupt import StopRequest
from drafthead.train.record import RunFolder
from drafthead.train.result import Progress, Tick
from drafthead.train.timing import Stopwatch

STEP_PARTS = ("target", "forward", "loss", "backward", "optimiser")
"""Parts of the stopwatch that are training; evaluating and saving are the others."""


@dataclass(frozen=True)
class StepFigures:
    """What the predictions of one optimiser step came to, over all micro-batches and ranks."""

    loss: float
    change: float
    """Summed loss of what the head changes in its target; 0 for one that changes nothing."""
    sums: Tensor
    """(K, 4), see Outcome."""
    extras: dict[str, Tensor]
    """(K,) by name, see Outcome."""

    @classmethod
    def of(cls, flat: Tensor, depths: int, extras: Sequence[str]) -> StepFigures:
        """From added `Outcome.flat`s of this many depths, with extra losses of these names."""
        sums, *more = flat[2:].split([4 * depths, *(depths for _ in extras)])
        named = dict(zip(extras, more, strict=True))
        return cls(flat[0].item(), flat[1].item(), sums.view(depths, 4), named)

    def named(self) -> dict[str, float]:
        """Means over positions by name, as logs have them."""
        values = {"loss": self.loss}
        for depth, (cost, agreed, kept, seen) in enumerate(self.sums.tolist(), start=1):
            values[f"loss_{depth}"] = cost / max(kept, 1.0)
            values[f"simulated_match_{depth}"] = agreed / max(seen, 1.0)
            for name, sums in self.extras.items():
                values[f"{name}_{depth}"] = sums[depth - 1].item() / max(seen, 1.0)
        if self.change:
            values["target_change"] = self.change / max(self.sums[0, 3].item(), 1.0)
        return values


@dataclass
class Journal:
    """The figures of one sitting, and where they go."""

    engine: Engine
    folder: RunFolder
    watch: Stopwatch
    progress: Progress | None
    began: float = field(default_factory=time.monotonic)
    """When this run would have begun, had it been made in one sitting."""
    positions: int = 0
    """Token positions trained on in this sitting, over all ranks."""
    loss: float | None = None
    """Of the last complete step."""

    def seconds(self) -> float:
        """Wall-clock seconds over all sittings, as rank 0 has them, the same on every rank."""
        return self.engine.same(time.monotonic() - self.began)

    @property
    def step_seconds(self) -> float:
        """This process's seconds in the steps of this sitting."""
        return sum(self.watch.seconds.get(part, 0.0) for part in STEP_PARTS)

    def speed(self) -> float:
        """Positions per second of this sitting, over the time spent in steps."""
        spent = self.step_seconds
        return self.positions / spent if spent else 0.0

    def data_wait(self) -> float:
        """Share of this sitting's time in steps that went into waiting for teacher features."""
        spent = self.step_seconds
        return self.watch.seconds.get("target", 0.0) / spent if spent else 0.0

    def step(self, state: LoopState, figures: StepFigures, rate: float, norm: float) -> None:
        """One optimiser step."""
        values = {
            "loss": figures.loss,
            "lr": rate,
            "grad_norm": norm,
            "positions": state.positions,
            "positions_per_s": self.speed(),
            "data_wait": self.data_wait(),
        }
        values |= figures.named()
        self.loss = figures.loss
        self._write("step", "train/", state, values)

    def evaluation(self, state: LoopState, simulated: Simulated) -> None:
        """The figures of the held-out rows."""
        self._write("evaluation", "heldout/", state, simulated.flat())

    def _write(
        self, event: str, prefix: str, state: LoopState, values: Mapping[str, float]
    ) -> None:
        if not self.engine.is_main:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self.folder.log({"event": event, "step": state.step, "epoch": state.epoch, **finite})
        tracked = {prefix + k: v for k, v in values.items() if math.isfinite(v)}
        self.engine.track(tracked, state.step)

    def tick(self, phase: str, state: LoopState, share: float, request: StopRequest) -> None:
        """Tell a progress bar; a Ctrl-C in its code is a request like any other."""
        if self.progress is None or not self.engine.is_main:
            return
        try:
            self.progress(Tick(phase, state.step, share, self.loss, self.speed()))
        except KeyboardInterrupt:
            request.interrupted = True
