"""The training loop, and the few functions it calls. It never asks which head it trains.

An optimiser step takes `accumulate` micro-batches of each rank; what it skips, when it stops and
what rate it uses are the same on every rank. Interrupted runs leave a checkpoint of the last
complete step, from which `resume` goes on exactly as if nothing had happened (but for what a limit
of minutes decides): micro-batches after that step are run again.

The order of the data, and a step's randomness, depend on a micro-batch's place in its step and not
on the rank that runs it: any number of ranks makes the same steps as long as ranks x `accumulate`
is the same.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch

from drafthead.data.batches import epoch_order
from drafthead.data.files import write_atomically
from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.inference.machine import machine
from drafthead.train.assemble import Assembly, assemble
from drafthead.train.checkpoint import LoopState, check_settings, load_checkpoint
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.heldout import simulate, summarise
from drafthead.train.interrupt import Interrupted, Preempted, StopRequest, stop_requests
from drafthead.train.journal import Journal, StepFigures
from drafthead.train.keeper import CONTENT, Keeper
from drafthead.train.record import RunFolder
from drafthead.train.result import Progress, TrainResult
from drafthead.train.schedule import Limits, learning_rate
from drafthead.train.served import check_served
from drafthead.train.teacher import blank
from drafthead.train.timing import Stopwatch

logger = logging.getLogger(__name__)


class DivergedError(ValueError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def run(
    config: RunConfig, *, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a head as the config says, or go on with the run in `config.out`.

    Raises ValueError or OSError (one line each); after a Ctrl-C Interrupted, and after a SIGTERM
    Preempted, which both leave a checkpoint to resume from.
    """
    folder = RunFolder(config.out)
    engine = Engine(config)
    with folder.claimed(resume) if engine.is_main else nullcontext(), stop_requests() as request:
        engine.wait()
        if resume:
            check_settings(folder.last, config.identity())
        for name in config.without_effect():
            logger.warning("%s: has no effect beside the other settings", name)

        def known(content: str) -> None:
            if resume:
                check_settings(folder.last, {CONTENT: content})

        # The head that was begun from, whose vocabulary this one took over, may be another by now.
        again = resume and config.training.start is not None
        begun = load_checkpoint(folder.last).weights if again else None
        watch = Stopwatch(torch.cuda.synchronize if engine.device.type == "cuda" else None)
        parts = assemble(config, engine, watch, known, begun)
        parts.announce()
        trainer = Trainer(config, engine, parts, folder, watch, progress)
        trainer.start(resume)
        if engine.is_main:
            folder.start(config, resume, machine(engine.device))
        engine.start_tracking(config, resume)
        try:
            trainer.train(request)
            result = trainer.finish()
            engine.wait()  # a rank that leaves the group early may keep another one in it
            return result
        finally:
            parts.teacher.close()
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
        self.config, self.engine, self.parts, self.watch = config, engine, parts, watch
        self.folder = folder
        self.journal = Journal(engine, folder, watch, progress)
        self.keeper = Keeper(config, engine, parts, folder)
        self.state = LoopState()
        self.request = StopRequest()
        self.group_size = config.training.accumulate * engine.world
        self.limits = Limits.of(config.training, math.ceil(parts.train_batches / self.group_size))

    def start(self, resume: bool) -> None:
        """Place everything on the device, from the checkpoint if the run is gone on with."""
        checkpoint = self.keeper.restore() if resume else None
        if checkpoint is None:
            self.warm_start()
        else:
            self.go_on(checkpoint.state)
        self.state.group = self.group_size
        if self.config.training.checkpoint_activations:
            recompute_activations(self.parts.head)
        self.model = self.engine.prepare(
            self.parts.objective, self.parts.trainable, self.config.optimiser
        )
        if checkpoint is not None:
            self.engine.load_optimiser_state(checkpoint.moments, checkpoint.updates)
        self.journal.began -= self.state.seconds

    def warm_start(self) -> None:
        """Let the head fit itself to the first batches, the same ones on every rank."""
        chosen, positions = [], 0
        for index in epoch_order(self.parts.train_batches, self.config.training.seed, 0):
            if positions >= self.parts.head.settings.warm_start:
                break
            chosen.append(index)
            positions += self.parts.train.positions(index)
        if chosen:
            with self.watch.part("warm start"), self.engine.together():
                self.parts.head.warm_start(map(self.parts.train.batch, chosen))

    def go_on(self, state: LoopState) -> None:
        """Take up a run where it was; where steps have become larger or smaller, say so.

        Epochs end with their data: their last step is counted from the place in it, since the
        steps behind may have been of other sizes.
        """
        before, now, self.state = state.group, self.group_size, state
        if before is not None and before != now and self.engine.is_main:
            logger.warning(
                "a step was %d micro-batches over all ranks (ranks x training.accumulate), now it "
                "is %d: the run goes on in the same data order, but it is not the run it would "
                "have been",
                before,
                now,
            )
        training, count = self.config.training, self.parts.train_batches
        if training.epochs is None:
            return
        left = 0
        if training.epochs > state.epoch:
            left = math.ceil((count - state.position) / now)
            left += (training.epochs - state.epoch - 1) * math.ceil(count / now)
        ends = (training.max_steps, state.step + left)
        self.limits = replace(self.limits, steps=min(end for end in ends if end is not None))

    def train(self, request: StopRequest) -> None:
        """Step until a limit; on a request to stop, save and raise Interrupted or Preempted."""
        self.request, training = request, self.config.training
        request.can_save = True
        try:
            self.stop_if_asked()
            if self.due(training.eval_every):
                self.evaluate()
            while not self.limits.reached(self.state.step, self.state.seconds):
                group = self.next_group()
                batches = self.fetch(group)
                self.look_ahead(group)
                rate = self.rate()
                figures = self.forward_backward(batches)
                norm = self.update(rate)
                self.guard(norm, group)
                self.advance(group)
                self.journal.step(self.state, figures, rate, norm)
                if self.due(training.eval_every):
                    self.evaluate()
                if self.state.step % training.save_every == 0:
                    self.save()
                self.stop_if_asked()
            if self.due(1):
                self.evaluate()
        except (Interrupted, Preempted):
            self.engine.discard()
            self.save()
            if self.engine.is_main:
                step = self.state.step
                logger.warning("stopped; saved as it was after step %d; --resume continues", step)
            raise

    # The steps of the loop, in their order

    def next_group(self) -> Sequence[int]:
        """Micro-batches of the next step over all ranks: fewer at the end of an epoch."""
        training, state = self.config.training, self.state
        order = epoch_order(self.parts.train_batches, training.seed, state.epoch)
        return order[state.position : state.position + self.group_size]

    def fetch(self, group: Sequence[int]) -> list[TeacherBatch]:
        """This rank's share of the group; a rank that has one too few gets a blank one (F27)."""
        batches = []
        with self.watch.part("target"), self.engine.together():
            for index, mine in self.shares(group):
                batch = self.parts.train.batch(index)
                batches.append(batch if mine else blank(batch))
                self.stop_between_batches()
        return batches

    def look_ahead(self, group: Sequence[int]) -> None:
        """Let the source read the next step's micro-batches while this step is computed."""
        state, seed, count = self.state, self.config.training.seed, self.parts.train_batches
        epoch, start = state.epoch, state.position + len(group)
        if start >= count:
            epoch, start = epoch + 1, 0
        following = epoch_order(count, seed, epoch)[start : start + self.group_size]
        self.parts.train.expect([index for index, mine in self.shares(following) if mine])

    def shares(self, group: Sequence[int]) -> list[tuple[int, bool]]:
        """The micro-batches that this rank takes of a group, as many as every other rank, and
        whether they are its own or only fill up.
        """
        world, rank = self.engine.world, self.engine.rank
        rounds = [group[start : start + world] for start in range(0, len(group), world)]
        return [(r[rank], True) if rank < len(r) else (r[0], False) for r in rounds]

    def rate(self) -> float:
        state, config = self.state, self.config
        return learning_rate(
            config.optimiser.lr, config.schedule, self.limits, state.step, state.seconds
        )

    def forward_backward(self, batches: Sequence[TeacherBatch]) -> StepFigures:
        """Make the step's gradients; what they came from, over all ranks."""
        objective, engine = self.parts.objective, self.engine
        mine = torch.stack([objective.counted(batch) for batch in batches]).sum()
        count = max(1.0, float(engine.sum(mine)))
        flat = torch.zeros((), dtype=torch.float64)
        extras: tuple[str, ...] = ()
        for index, batch in enumerate(batches):
            place = index * engine.world + engine.rank
            torch.manual_seed(_micro_seed(self.config.training.seed, self.state.step, place))
            with engine.micro_batch(last=index == len(batches) - 1):
                with self.watch.part("forward"):
                    outcome = self.model(batch, count)
                with self.watch.part("backward"):
                    engine.backward(outcome.loss)
            flat, extras = flat + outcome.flat(), tuple(outcome.extras)
            self.tick("train")
        return StepFigures.of(engine.sum(flat), objective.steps, extras)

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
        self.journal.positions += positions
        state.positions += positions
        state.step += 1
        state.position += len(group)
        if state.position >= self.parts.train_batches:
            state.epoch, state.position = state.epoch + 1, 0
            self.parts.teacher.settle(self.engine)
        state.seconds = self.journal.seconds()

    def evaluate(self) -> None:
        """Simulated figures of the held-out rows; the best head so far is kept as weights."""
        parts, engine, state = self.parts, self.engine, self.state
        assert parts.heldout is not None, "due() answers False without held-out rows"
        sums = torch.zeros(parts.objective.heldout_steps, 5, dtype=torch.float64)
        parts.head.train(False)
        with self.watch.part("evaluate"):
            # As many batches on every rank: a sharded head runs on all of them at once.
            for index, mine in self.shares(range(parts.heldout_batches)):
                with engine.together():
                    batch = parts.heldout.batch(index)
                sums += simulate(parts.objective, batch if mine else blank(batch))
                self.tick("evaluate")
                self.stop_if_asked()
            simulated = summarise(engine.sum(sums))
        parts.head.train()
        state.evaluated = state.step
        self.journal.evaluation(state, simulated)
        if state.best_tau is None or simulated.simulated_tau > state.best_tau:
            state.best_tau, state.best_step = simulated.simulated_tau, state.step
            self.keeper.keep_best(state, simulated)

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
        """Write the checkpoint to resume from."""
        with self.watch.part("save"):
            self.keeper.save(self.state)

    def tick(self, phase: str) -> None:
        share = self.limits.share(self.state.step, self.state.seconds)
        self.journal.tick(phase, self.state, share, self.request)
        self.stop_between_batches()

    def stop_between_batches(self) -> None:
        """One process may stop between micro-batches; several must agree, at the end of a step."""
        if self.request.asked and self.engine.world == 1:
            self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Stop on all ranks, in one way, where any rank was asked to; a Ctrl-C goes first."""
        mine = torch.tensor([self.request.interrupted, self.request.preempted]).float()
        interrupted, preempted = (self.engine.sum(mine) > 0).tolist()
        if interrupted:
            raise Interrupted
        if preempted:
            raise Preempted

    def finish(self) -> TrainResult:
        """Save the last checkpoint and the best head, read both back, hold the head as it is served
        against training, and say what came out.
        """
        state, parts, folder = self.state, self.parts, self.folder
        assert self.engine.same(state.step) == state.step, "ranks disagree on the steps made"
        survival = self.keeper.finish(state)
        with self.watch.part("check as served"):
            agreement = check_served(self.config, self.engine, parts, folder)
        result = TrainResult(
            head=folder.head,
            out=folder.root,
            steps=state.step,
            positions=state.positions,
            seconds=state.seconds,
            positions_per_s=self.journal.speed(),
            shares=self.watch.shares(),
            best_step=state.best_step,
            simulated_tau=state.best_tau,
            simulated_survival=survival,
            skipped=state.skipped,
            dropped=len(parts.train.dropped),
            agreement=agreement,
        )
        if self.engine.is_main:
            figures = asdict(result) | {"head": str(result.head), "out": str(result.out)}
            write_atomically(folder.root / "result.json", json.dumps(figures, indent=2) + "\n")
        return result


def recompute_activations(head: DraftHead) -> None:
    """Let a head's layers compute in the backward pass again what they would have kept for it."""
    if not head.supports_gradient_checkpointing:
        raise ValueError(
            f"training.checkpoint_activations: a head of type {head.settings.type!r} has no layer "
            "that could; leave it out"
        )
    # The other kind would sum a weight's gradient where it is no longer gathered.
    head.activation_checkpointing_enable({"use_reentrant": False})


def _micro_seed(seed: int, step: int, place: int) -> int:
    """A micro-batch's own seed, by its place in the step over all ranks: randomness depends on
    nothing before, so resuming needs no state, and on no rank.
    """
    return ((seed * 1_000_003 + step) * 65_537 + place) % 2**63
