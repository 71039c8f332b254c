"""Measure a head on this machine and choose in which shape it drafts, or that it does not.

One plain decoding of the calibration prompts records what the head would draft (`record`); with the
measured costs of a batch that tells what every shape comes to (`plan`). The best of each kind are
then decoded with for real, in turn with plain decoding, so that a machine that slows down slows
all, and the fastest is taken: drafting nothing, unless a shape beats plain by more than chance, and
no fixed shape, unless it beats one that adapts to the text (`auto:`) by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import fingerprint
from drafthead.inference.answering import end_ids
from drafthead.inference.costs import CLOCKS, Costs, measure
from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.machine import machine
from drafthead.inference.plan import Forecast, forecast, priced, shapes
from drafthead.inference.record import record, sampler_of
from drafthead.inference.row import Row, stop_at
from drafthead.inference.survey import Survey
from drafthead.inference.target import Target
from drafthead.inference.tree import OFF, Static, TreeShape
from drafthead.inference.tuning import Tuning, dtype_of, fingerprint_of, tuned

STEPS = (1, 2, 3, 4, 6, 8)
"""Widths of the draft steps that are timed."""

FEWEST = 6
"""Decodings of a shape, at least: fewer tell little of chance."""

MARGIN = 0.95
"""Of plain decoding's forecast: a shape that comes to less is not tried."""

Progress = Callable[[int, int], None]
Gain = list[float | None]
"""Times plain decoding's speed, and both ends of the interval."""


@dataclass(frozen=True)
class Trial:
    """How to measure."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    """Other prompts tell more than the same ones again."""
    finalists: int = 3
    """Shapes that are decoded with for real, beside plain decoding."""
    clock: str = "wall"
    """Or `cpu`: time of this process, for a machine that others use, too."""


@dataclass(frozen=True)
class Timed:
    """One decoding of one batch of prompts: tokens its rounds emitted, and their seconds."""

    tokens: int
    wall: float
    cpu: float

    def seconds(self, clock: str) -> float:
        """By the wall's clock or this process's."""
        return self.wall if clock == "wall" else self.cpu


def tuned_shape(folder: Path | None, target: Target, batch: int) -> TreeShape | None:
    """The shape chosen for a head's folder on this machine; None where none was, or for another
    machine, dtype or target, which is said once. Raises ValueError for a torn file.
    """
    found = tuned(folder, target, batch)
    return None if found is None else found.shape


def tune(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int] = (1, 4),
    trial: Trial | None = None,
    *,
    progress: Progress = lambda done, total: None,
    stage: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Choose a shape for each batch size; `prompts` are ids, `head` is bound."""
    trial = trial or Trial()
    _check(target, prompts, batches, trial)
    stage("recording drafts")
    survey = Survey(
        record(
            target,
            head,
            prompts,
            max_new_tokens=trial.max_new_tokens,
            temperature=trial.temperature,
            seed=trial.seed,
        )
    )
    chosen: dict[int, TreeShape] = {}
    costs: dict[int, Costs] = {}
    gains: dict[int, dict[str, Gain]] = {}
    measured: dict[int, dict[str, float]] = {}
    for batch in sorted(set(batches)):
        stage(f"batch {batch}: measuring costs")
        curve = costs_of(target, head, batch, trial)
        tried = finalists(survey, curve, batch, trial.finalists)
        timed = compete(target, head, prompts, tried, curve, batch, trial, progress)
        clock, plain = trial.clock, timed[OFF]
        measured[batch] = {str(s): rate(times, clock) for s, times in timed.items() if times}
        gains[batch] = {str(s): gain(timed[s], plain, clock) for s in tried}
        chosen[batch] = best(timed, clock)
        costs[batch] = priced(curve, chosen[batch])
    return Tuning(
        machine=machine(target.device),
        dtype=dtype_of(target),
        target=fingerprint_of(target),
        head=fingerprint(head),
        shapes=chosen,
        costs=costs,
        measured=measured,
        gains=gains,
        prompts=len(prompts),
        temperature=trial.temperature,
        clock=trial.clock,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _check(
    target: Target, prompts: Sequence[Sequence[int]], batches: Sequence[int], trial: Trial
) -> None:
    if not prompts:
        raise ValueError("there are no prompts: give at least one")
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)}: give numbers of 1 or more")
    if not (math.isfinite(trial.temperature) and trial.temperature >= 0):
        raise ValueError(f"temperature {trial.temperature}: give a number of 0 or more")
    if trial.clock not in CLOCKS:
        raise ValueError(f"clock {trial.clock!r}: choose one of {', '.join(CLOCKS)}")
    if trial.clock == "cpu" and target.device.type != "cpu":
        raise ValueError(f"clock 'cpu': the target runs on {target.device}, measure its wall time")


def costs_of(target: Target, head: DraftHead, batch: int, trial: Trial) -> Costs:
    """The costs of a batch, with draft steps of several widths."""
    widths = [width for width in STEPS if width <= len(head.draft_ids)]
    most, clock = most_nodes(batch), CLOCKS[trial.clock]
    return measure(target, head, widths=widths, batch=batch, most=most, clock=clock)


def most_nodes(batch: int) -> int:
    """Of a tree that is tried: in large batches no large one pays, and timing it takes long."""
    return min(64, max(8, 512 // batch))


def finalists(survey: Survey, costs: Costs, batch: int, count: int) -> list[TreeShape]:
    """The shapes to decode with: the best forecasts, one of each kind, that may beat plain."""
    told = [forecast(survey, s, costs, batch) for s in shapes(survey, most_nodes(batch))]
    plain = next(each for each in told if each.shape == OFF)
    kinds: dict[str, Forecast] = {}
    for each in sorted(told, key=lambda each: -each.rate):
        if each.shape != OFF and each.rate >= MARGIN * plain.rate:
            kinds.setdefault(_kind(each.shape), each)
    return [each.shape for each in kinds.values()][:count]


def _kind(shape: TreeShape) -> str:
    if isinstance(shape, Static):
        return "chain" if shape.is_chain else "static"
    if shape.stop is not None:
        return "stop"
    return "auto" if shape.by_cost else "chain" if shape.is_chain else "tree"


def compete(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    tried: Sequence[TreeShape],
    costs: Costs,
    batch: int,
    trial: Trial,
    progress: Progress = lambda done, total: None,
) -> dict[TreeShape, list[Timed]]:
    """Decode with each shape and plainly, in turn: times of each batch of prompts and repeat."""
    sides: dict[TreeShape, Drafter | None] = {OFF: None}
    sides |= {shape: HeadDrafter(head, shape, priced(costs, shape)) for shape in tried}
    found: dict[TreeShape, list[Timed]] = {shape: [] for shape in sides}
    if not tried:
        return found
    groups = [
        [prompts[(first + slot) % len(prompts)] for slot in range(batch)]
        for first in range(0, len(prompts), batch)
    ]
    order = list(sides.items())
    for _, drafter in order:  # warm-up
        decoded(target, drafter, groups[0], trial, tokens=min(8, trial.max_new_tokens))
    repeats = max(trial.repeats, -(-FEWEST // len(groups)))
    done, total = 0, repeats * len(groups) * len(order)
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            turn = (repeat + number) % len(order)  # another side goes first each time
            for shape, drafter in (*order[turn:], *order[:turn]):
                found[shape].append(decoded(target, drafter, group, trial, first=number * batch))
                done += 1
                progress(done, total)
    return found


def decoded(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    trial: Trial,
    *,
    first: int = 0,
    tokens: int | None = None,
) -> Timed:
    """Decode a batch and time its rounds; `first` is the number of its first prompt."""
    limit = tokens or trial.max_new_tokens
    streams = range(first, first + len(prompts))
    sampler = sampler_of(target, streams, trial.temperature, trial.seed)
    rows = [Row(list(ids), limit, stop_at(end_ids(target))) for ids in prompts]
    capacity = max(map(len, prompts)) + limit
    decoder = Decoder(target, sampler, drafter, batch=len(rows), capacity=capacity)
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    _settle(target)
    since = [clock() for clock in CLOCKS.values()]
    while decoder.running:
        decoder.round()
    _settle(target)
    taken = {name: CLOCKS[name]() - then for name, then in zip(CLOCKS, since, strict=True)}
    return Timed(sum(r.emitted for row in rows for r in row.rounds), **taken)


def _settle(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


# The choice


def best(timed: Mapping[TreeShape, Sequence[Timed]], clock: str = "wall") -> TreeShape:
    """The fastest shape of those that beat plain beyond their interval; `off` if none does, as
    where there is no interval. One that adapts to the text goes before a fixed one that does not
    beat it beyond chance: on other texts than these it stays good.
    """

    def beats(one: TreeShape, two: TreeShape) -> bool:
        return (gain(timed[one], timed[two], clock)[1] or 0) > 1

    sure = [shape for shape in timed if shape != OFF and beats(shape, OFF)]
    sure.sort(key=lambda shape: -rate(timed[shape], clock))
    adaptive = [shape for shape in sure if _kind(shape) == "auto" and not beats(sure[0], shape)]
    return next(iter(adaptive or sure), OFF)


def gain(
    times: Sequence[Timed],
    plain: Sequence[Timed],
    clock: str = "wall",
    resamples: int = 1000,
    seed: int = 0,
) -> Gain:
    """How many times plain's tokens per second, and its 95 % bootstrap interval over decodings of
    the same prompts: None at both ends of a single one's.
    """
    pairs = zip(times, plain, strict=True)
    table = np.array([[t.tokens, t.seconds(clock), p.tokens, p.seconds(clock)] for t, p in pairs])
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(table), size=(resamples, len(table)))
    sums = np.concatenate((table.sum(axis=0)[None], table[picks].sum(axis=1)))
    ratios = sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2]
    if len(table) < 2:
        return [float(ratios[0]), None, None]
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return [float(ratios[0]), float(low), float(high)]


def rate(times: Sequence[Timed], clock: str = "wall") -> float:
    """Tokens per second over all."""
    return sum(each.tokens for each in times) / sum(each.seconds(clock) for each in times)
