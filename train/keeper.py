"""What a run keeps: the checkpoint to go on from, the best one, and in the end the head.

All ranks call every function here, since a sharded head is gathered; rank 0 alone writes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from drafthead.data.files import write_atomically
from drafthead.train.assemble import Assembly
from drafthead.train.calibrate import calibrate, rows_to_calibrate
from drafthead.train.checkpoint import (
    Checkpoint,
    LoopState,
    head_weights,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_head,
)
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.heldout import Simulated
from drafthead.train.record import RunFolder

logger = logging.getLogger(__name__)

CONTENT = "data (content of the files)"
"""Name in a checkpoint's identity of what the config alone does not tell."""


@dataclass(frozen=True)
class Keeper:
    """The run's parts that are saved, and where to."""

    config: RunConfig
    engine: Engine
    parts: Assembly
    folder: RunFolder

    def save(self, state: LoopState) -> None:
        """Write the checkpoint to resume from."""
        moments, updates = self.engine.optimiser_state()
        self._write(self.folder.last, state, moments, updates)
        self.parts.teacher.settle(self.engine)

    def keep_best(self, state: LoopState, simulated: Simulated) -> None:
        """Write the weights as the best so far, and the figures that make them so."""
        self._write(self.folder.best, state, {}, 0)
        if self.engine.is_main:
            figures = {"step": state.step, **simulated.as_json()}
            write_atomically(self.folder.evaluation, json.dumps(figures, indent=2) + "\n")

    def _write(
        self, path: Path, state: LoopState, moments: dict[str, Tensor], updates: int
    ) -> None:
        head, weights = self.parts.head, {}
        with self.engine.whole(head):
            if self.engine.is_main:
                weights = head_weights(head)
        if self.engine.is_main:
            kept = Checkpoint(state, weights, self.identity(), head.contract, moments, updates)
            save_checkpoint(path, kept)
        self.engine.wait()

    def restore(self) -> Checkpoint:
        """Read the last checkpoint into the unprepared head; ValueError if it is another run's."""
        checkpoint = load_checkpoint(self.folder.last)
        checkpoint.check(self.identity(), self.parts.head.contract, self.folder.last)
        load_weights(self.parts.head, checkpoint.weights)
        state = checkpoint.state
        if state.best_step is not None and not self.has_best():
            logger.warning("%s: no longer there; the next evaluation counts", self.folder.best)
            state.best_step = state.best_tau = state.evaluated = None
        if self.engine.is_main:
            self.folder.forget_after(state.step)
        return checkpoint

    def has_best(self) -> bool:
        """Whether the best weights are still there, and the figures that make them so."""
        return self.folder.best.is_file() and self.folder.evaluation.is_file()

    def identity(self) -> dict[str, str]:
        """What must not change under a checkpoint: settings, and the content of the data."""
        return {**self.config.identity(), CONTENT: self.parts.content}

    def finish(self, state: LoopState) -> tuple[float, ...]:
        """Save the last checkpoint and the best head, read both back; the best head's simulated
        survival, if anything was evaluated.

        No step may follow. Where a run was killed, the best checkpoint may come from later than
        what was gone on from: the state is told.
        """
        self.save(state)
        heldout = rows_to_calibrate(self.parts, self.engine)
        head, survival = self.parts.head, ()
        self.engine.unwrap(self.parts.objective)
        if self.engine.is_main:
            if state.best_step is not None:
                best = load_checkpoint(self.folder.best)
                state.best_step, state.best_tau = best.state.best_step, best.state.best_tau
                load_weights(head, best.weights)
                figures = json.loads(self.folder.evaluation.read_text())
                survival = tuple(figures["simulated_survival"])
            calibrate(self.parts, heldout)
            save_head(head.train(False), self.folder.head)
        self.engine.wait()
        return survival
