"""After training: let a head fit what it says about its own chances to held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drafthead.heads.base import TeacherBatch
from drafthead.train.assemble import Assembly
from drafthead.train.engine import Engine

POSITIONS = 8192
"""About as many held-out positions are kept for it: one number a depth needs no more."""


def rows_to_calibrate(parts: Assembly, engine: Engine) -> list[TeacherBatch]:
    """Held-out micro-batches; the same on every rank, as a partitioned target runs on all."""
    if not parts.head.calibrates or parts.heldout is None:
        return []
    chosen, positions = [], 0
    for index in range(parts.heldout_batches):
        if positions >= POSITIONS:
            break
        positions += parts.heldout.positions(index)
        with engine.together():
            chosen.append(parts.heldout.batch(index))
    return chosen


def calibrate(parts: Assembly, batches: Sequence[TeacherBatch]) -> None:
    """Fit the head, whose weights are whole and final, in the run's precision."""

    def computing() -> Iterator[TeacherBatch]:
        for batch in batches:
            with parts.objective.computing(batch) as cast:
                yield cast

    if batches:
        parts.head.calibrate(computing())
