"""How far a run is, and the learning rate there: pure functions of counts of optimiser steps.

Neither processes nor accumulation enter, so the curve is the same for any number of them (F31).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafthead.train.config import ScheduleConfig, TrainingConfig


@dataclass(frozen=True)
class Limits:
    """Where a run ends: the first limit that is reached."""

    steps: int | None
    """Optimiser steps."""
    seconds: float | None
    """Wall-clock seconds, over all sittings of a resumed run."""

    @classmethod
    def of(cls, training: TrainingConfig, steps_per_epoch: int) -> Limits:
        """Put epochs, steps and minutes into steps and seconds."""
        counts = [training.max_steps]
        if training.epochs is not None:
            counts.append(training.epochs * steps_per_epoch)
        steps = min((count for count in counts if count is not None), default=None)
        return cls(steps, None if training.max_minutes is None else training.max_minutes * 60)

    def reached(self, step: int, seconds: float) -> bool:
        """Whether the run is over after `step` steps and this long."""
        by_steps = self.steps is not None and step >= self.steps
        return by_steps or (self.seconds is not None and seconds >= self.seconds)

    def share(self, step: int, seconds: float) -> float:
        """How much of the run is behind, 0 to 1, by the limit that is nearer."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        by_time = 0.0 if self.seconds is None else seconds / self.seconds
        return min(1.0, max(by_steps, by_time))


def learning_rate(
    peak: float, schedule: ScheduleConfig, limits: Limits, step: int, seconds: float
) -> float:
    """The rate of the optimiser step with this index (from 0), begun after this many seconds.

    Linear warm-up over `warmup_steps` steps, then annealing to `min_ratio`. With a limit of steps,
    the last one, and only that, has the end value; under a limit of minutes the annealing follows
    the share of the time that is gone (whichever is further, when there are both).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return peak
    share = 0.0
    if limits.steps is not None:
        share = (step - warmup) / max(1, limits.steps - 1 - warmup)
    if limits.seconds is not None:
        share = max(share, seconds / limits.seconds)
    share = min(1.0, share)
    left = 1.0 - share if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * left)
