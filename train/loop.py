"""The training loop, and the few functions it calls. It never asks which head it trains.

An optimiser step takes `accumulate` micro-batches of each rank; what it skips, when it stops and
what rate it uses are the same on every rank. Interrupted runs leave a checkpoint of the last
complete step, from which `resume` goes on exactly as if nothing had happened (but for what a limit
of minutes decides): micro-batches after that step are run again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

import torch
from torch import Tensor

from drafthead.data.files import write_atomically
from drafthead.heads.base import TeacherBatch
from drafthead.train.assemble import Assembly, assemble
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
from drafthead.train.heldout import Simulated, simulate, summarise
from drafthead.train.interrupt import Interrupted, StopRequest, stop_requests
from drafthead.train.record import RunFolder
from drafthead.train.result import Progress, Tick, TrainResult
from drafthead.train.schedule import Limits, learning_rate
from drafthead.train.teacher import blank, epoch_order
from drafthead.train.timing import Stopwatch

logger = logging.getLogger(__name__)

STEP_PARTS = ("target", "forward", "loss", "backward", "optimiser")
"""Parts of the stopwatch that are training; evaluating and saving are the others."""


class DivergedError(ValueError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def run(
    config: RunConfig, *, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a head as the config says, or go on with the run in `config.out`.

    Raises ValueError or OSError (one line each), and KeyboardInterrupt after an interruption, which
    leaves a checkpoint to resume from.
    """
    folder = RunFolder(config.out)
    engine = Engine(config)
    with folder.claimed(resume) if engine.is_main else nullcontext():
        engine.wait()
        for name in config.without_effect():
            logger.warning("%s: has no effect beside the other settings", name)
        watch = Stopwatch(torch.cuda.synchronize if engine.device.type == "cuda" else None)
        parts = assemble(config, engine, watch)
        parts.announce()
        trainer = Trainer(config, engine, parts, folder, watch, progress)
        trainer.start(load_checkpoint(folder.last) if resume else None)
        if engine.is_main:
            folder.start(config, resume)
        engine.start_tracking(config)
        try:
            with stop_requests() as request:
                trainer.train(request)
            return trainer.finish()
        finally:
            engine.close()


class Trainer:
    """The state of one run and the steps of its loop."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        parts: Assembly,
        folder: RunFolder,
        watch: Stopwatch,
        progress: Progress | None,
    ) -> None:
        self.config, self.engine, self.parts, self.folder = config, engine, parts, folder
        self.state = LoopState()
        self.watch = watch
        self.progress = progress
        self.request = StopRequest()
        self.group_size = config.training.accumulate * engine.world
        per_epoch = math.ceil(parts.train_batches / self.group_size)
        self.limits = Limits.of(config.training, per_epoch)
        self.began = time.monotonic()
        self.sitting_positions = 0
        self.loss: float | None = None

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Place everything on the device, from the checkpoint if there is one."""
        if checkpoint is None:
            self.warm_start()
        else:
            checkpoint.check(self.identity(), self.parts.head.contract, self.folder.last)
            load_weights(self.parts.head, checkpoint.weights)
            self.state = checkpoint.state
            if self.engine.is_main:
                self.folder.forget_after(self.state.step)
        self.model = self.engine.prepare(
            self.parts.objective, self.parts.trainable, self.config.optimiser
        )
        if checkpoint is not None:
            self.engine.load_optimiser_state(checkpoint.moments, checkpoint.updates)
        self.began -= self.state.seconds

    def warm_start(self) -> None:
        """Let the head fit itself to the first batches, the same ones on every rank."""
        chosen, positions = [], 0
        for index in epoch_order(self.parts.train_batches, self.config.training.seed, 0):
            if positions >= self.parts.head.settings.warm_start:
                break
            chosen.append(index)
            positions += self.parts.train.positions(index)
        if chosen:
            with self.watch.part("warm start"):
                self.parts.head.warm_start(map(self.batch, chosen))

    def train(self, request: StopRequest) -> None:
        """Step until a limit; on a request to stop, save and raise KeyboardInterrupt."""
        self.request = request
        training = self.config.training
        try:
            if self.due(training.eval_every):
                self.evaluate()
            while not self.limits.reached(self.state.step, self.state.seconds):
                group = self.next_group()
                batches = self.fetch(group)
                rate = self.rate()
                figures = self.forward_backward(batches)
                norm = self.update(rate)
                self.guard(norm, group)
                self.advance(group)
                self.log(figures, rate, norm)
                if self.due(training.eval_every):
                    self.evaluate()
                if self.state.step % training.save_every == 0:
                    self.save()
                self.stop_if_asked()
            if self.due(1):
                self.evaluate()
        except Interrupted:
            self.engine.discard()
            self.save()
            logger.warning("interrupted; saved as it was after step %d", self.state.step)
            raise

    # The steps of the loop, in their order

    def next_group(self) -> list[int]:
        """Micro-batches of the next step over all ranks: fewer at the end of an epoch."""
        training, state = self.config.training, self.state
        order = epoch_order(self.parts.train_batches, training.seed, state.epoch)
        return order[state.position : state.position + self.group_size]

    def fetch(self, group: Sequence[int]) -> list[TeacherBatch]:
        """This rank's share of the group; a rank that has one too few gets a blank one (F27)."""
        batches = []
        world, rank = self.engine.world, self.engine.rank
        for start in range(0, len(group), world):
            indices = group[start : start + world]
            mine = indices[rank] if rank < len(indices) else None
            batch = self.batch(indices[0] if mine is None else mine)
            batches.append(blank(batch) if mine is None else batch)
            self.stop_between_batches()
        return batches

    def batch(self, index: int) -> TeacherBatch:
        with self.watch.part("target"):
            return self.parts.train.batch(index)

    def rate(self) -> float:
        state, config = self.state, self.config
        return learning_rate(
            config.optimiser.lr, config.schedule, self.limits, state.step, state.seconds
        )

    def forward_backward(self, batches: Sequence[TeacherBatch]) -> Tensor:
        """Make the step's gradients; (1 + 4 K,) fp64 over all ranks: loss, sums by depth."""
        objective, engine = self.parts.objective, self.engine
        torch.manual_seed(_step_seed(self.config.training.seed, self.state.step, engine.rank))
        mine = torch.stack([objective.countable(batch).sum() for batch in batches]).sum()
        count = max(1.0, float(engine.sum(mine)))
        figures = torch.zeros(1 + 4 * objective.steps, dtype=torch.float64)
        for index, batch in enumerate(batches):
            with engine.micro_batch(last=index == len(batches) - 1):
                with self.watch.part("forward"):
                    outcome = self.model(batch, count)
                with self.watch.part("backward"):
                    engine.backward(outcome.loss)
            figures += torch.cat([outcome.loss.detach()[None], outcome.sums.flatten()]).cpu()
            self.tick("train")
        return engine.sum(figures)

    def update(self, rate: float) -> float:
        with self.watch.part("optimiser"):
            return self.engine.step(rate)

    def guard(self, norm: float, group: Sequence[int]) -> None:
        """Count a step whose gradient was not finite; stop when too many come in a row (F26)."""
        state = self.state
        if math.isfinite(norm):
            state.skipped_in_row = 0
            return
        state.skipped += 1
        state.skipped_in_row += 1
        names = [name for index in group for name in self.parts.train.names(index)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        logger.warning("step %d skipped: gradient is not finite; rows %s", state.step + 1, shown)
        if state.skipped_in_row >= self.config.training.max_skips:
            raise DivergedError(
                f"training.max_skips: {state.skipped_in_row} steps in a row without a finite "
                f"gradient, the last at step {state.step + 1} (rows {shown}); lower optimiser.lr "
                "or look at the rows"
            )

    def advance(self, group: Sequence[int]) -> None:
        """The step is complete: move on in the data and agree on the time."""
        state = self.state
        positions = sum(self.parts.train.positions(index) for index in group)
        self.sitting_positions += positions
        state.positions += positions
        state.step += 1
        state.position += len(group)
        if state.position >= self.parts.train_batches:
            state.epoch, state.position = state.epoch + 1, 0
        state.seconds = self.engine.same(time.monotonic() - self.began)

    def log(self, figures: Tensor, rate: float, norm: float) -> None:
        """One line of metrics.jsonl, and the tracker's."""
        loss, *sums = figures.tolist()
        values = {
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "positions": self.state.positions,
            "positions_per_s": self.speed(),
        }
        for depth in range(1, self.parts.objective.steps + 1):
            cross, agreed, kept, seen = sums[4 * depth - 4 : 4 * depth]
            values[f"loss_{depth}"] = cross / max(kept, 1.0)
            values[f"simulated_match_{depth}"] = agreed / max(seen, 1.0)
        self.loss = loss
        self.record("step", values)

    def evaluate(self) -> None:
        """Simulated figures of the held-out rows; the best head so far is kept as weights."""
        parts, engine, state = self.parts, self.engine, self.state
        assert parts.heldout is not None, "due() answers False without held-out rows"
        sums = torch.zeros(parts.objective.steps, 5, dtype=torch.float64)
        parts.head.train(False)
        with self.watch.part("evaluate"):
            for index in range(engine.rank, parts.heldout_batches, engine.world):
                sums += simulate(parts.objective, parts.heldout.batch(index))
                self.tick("evaluate")
                self.stop_between_batches()
            simulated = summarise(engine.sum(sums))
        parts.head.train()
        state.evaluated = state.step
        self.record("evaluation", simulated.flat())
        if state.best_tau is None or simulated.simulated_tau > state.best_tau:
            state.best_tau, state.best_step = simulated.simulated_tau, state.step
            self.keep_best(simulated)

    # What the steps use

    def due(self, every: int | None) -> bool:
        """Whether this step is to be evaluated; an interrupted evaluation is made up for."""
        state = self.state
        return (
            self.parts.heldout is not None
            and every is not None
            and state.step > 0
            and state.step % every == 0
            and state.evaluated != state.step
        )

    def save(self) -> None:
        """Write the checkpoint to resume from; every rank takes part in gathering."""
        with self.watch.part("save"):
            moments, updates = self.engine.optimiser_state()
            if self.engine.is_main:
                save_checkpoint(self.folder.last, self.checkpoint(moments, updates))
            self.engine.wait()

    def keep_best(self, simulated: Simulated) -> None:
        if not self.engine.is_main:
            return
        save_checkpoint(self.folder.best, self.checkpoint({}, 0))
        figures = {"step": self.state.step, **simulated.as_json()}
        write_atomically(self.folder.evaluation, json.dumps(figures, indent=2) + "\n")

    def checkpoint(self, moments: dict[str, Tensor], updates: int) -> Checkpoint:
        head = self.parts.head
        return Checkpoint(
            state=self.state,
            weights=head_weights(head),
            identity=self.identity(),
            contract=head.contract,
            moments=moments,
            updates=updates,
        )

    def identity(self) -> dict[str, str]:
        """What must not change under a checkpoint: settings, and the content of the data."""
        return {**self.config.identity(), "data (content of the files)": self.parts.content}

    def record(self, event: str, values: dict[str, float]) -> None:
        if not self.engine.is_main:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        facts = {"event": event, "step": self.state.step, "epoch": self.state.epoch}
        self.folder.log({**facts, **finite})
        prefix = "heldout/" if event == "evaluation" else "train/"
        tracked = {prefix + k: v for k, v in values.items() if math.isfinite(v)}
        self.engine.track(tracked, self.state.step)

    def speed(self) -> float:
        """Positions per second of this sitting, over the time spent in steps."""
        spent = sum(self.watch.seconds.get(part, 0.0) for part in STEP_PARTS)
        return self.sitting_positions / spent if spent else 0.0

    def tick(self, phase: str) -> None:
        if self.progress is None or not self.engine.is_main:
            return
        state = self.state
        share = self.limits.share(state.step, state.seconds)
        try:
            self.progress(Tick(phase, state.step, share, self.loss, self.speed()))
        except KeyboardInterrupt:
            self.request.asked = True
        self.stop_between_batches()

    def stop_between_batches(self) -> None:
        """One process may stop between micro-batches; several must agree, at the end of a step."""
        if self.request.asked and self.engine.world == 1:
            raise Interrupted

    def stop_if_asked(self) -> None:
        asked = torch.tensor(float(self.request.asked))
        if self.engine.sum(asked) > 0:
            raise Interrupted

    def finish(self) -> TrainResult:
        """Save the last checkpoint and the best head, read both back, and say what came out."""
        self.save()
        state, parts, folder = self.state, self.parts, self.folder
        assert self.engine.same(state.step) == state.step, "ranks disagree on the steps made"
        survival: tuple[float, ...] = ()
        if self.engine.is_main:
            if state.best_step is not None:
                best = load_checkpoint(folder.best)
                # Where a run was killed, it may come from later than what was gone on from.
                state.best_step, state.best_tau = best.state.best_step, best.state.best_tau
                load_weights(parts.head, best.weights)
                survival = tuple(json.loads(folder.evaluation.read_text())["simulated_survival"])
            save_head(parts.head.train(False), folder.head)
        self.engine.wait()
        result = TrainResult(
            head=folder.head,
            out=folder.root,
            steps=state.step,
            positions=state.positions,
            seconds=state.seconds,
            positions_per_s=self.speed(),
            shares=self.watch.shares(),
            best_step=state.best_step,
            simulated_tau=state.best_tau,
            simulated_survival=survival,
            skipped=state.skipped,
            dropped=len(parts.train.dropped),
        )
        if self.engine.is_main:
            figures = asdict(result) | {"head": str(result.head), "out": str(result.out)}
            write_atomically(folder.root / "result.json", json.dumps(figures, indent=2) + "\n")
        return result


def _step_seed(seed: int, step: int, rank: int) -> int:
    """A step's own seed: randomness depends on nothing before, so resuming needs no state."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63
