"""Whether a head does when served what training says of it: simulated and decoded tau side by side.

Simulated, the head is unrolled over greedy text, as in training; decoded, it drafts that very text.
Both are the same rounds, cut alike at ends and limits, but for what rounds otherwise. So prompts
are resampled in pairs: what differs between prompts does not blur what differs between the paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from drafthead.heads.base import DraftHead
from drafthead.inference.metrics import Round, acceptance
from drafthead.inference.simulate import rounds_of
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, TreeShape

RESAMPLES = 2000
TOLERANCE = 0.03
"""Share of tau that rounding may move: in half precision a draft that was a near tie falls the
other way now and then, and a round begins elsewhere."""
ROUNDS = 2
"""Rounds that rounding may move in any case, however few there are."""

Interval = tuple[float, float]
Rounds = Sequence[Sequence[Round]]
"""Of each prompt."""


class Answered(Protocol):
    """One answered turn, as an evaluation has them."""

    @property
    def prompt(self) -> str: ...

    @property
    def ids(self) -> list[int]:
        """Of prompt and answer."""
        ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def rounds(self) -> list[Round]: ...


@dataclass(frozen=True)
class Agreement:
    """Tau of one head on one set of prompts, by two paths."""

    prompts: int
    rounds: int
    """Decoded ones."""
    simulated_tau: float
    simulated_interval: Interval | None
    decoded_tau: float
    difference: float
    """Decoded less simulated."""
    interval: Interval | None
    """95 % of the difference, prompts resampled in pairs; None for one prompt."""

    @property
    def tolerance(self) -> float:
        """Largest difference that may be rounding."""
        return max(TOLERANCE, ROUNDS / self.rounds) * self.simulated_tau

    @property
    def agrees(self) -> bool:
        """Where the interval has 0 in it, or the difference is no more than rounding."""
        low, high = self.interval or (self.difference, self.difference)
        return low <= 0.0 <= high or abs(self.difference) <= self.tolerance


def compare_rounds(simulated: Rounds, decoded: Rounds) -> Agreement:
    """Hold rounds of the same prompts against each other; ValueError where none were made."""
    told, found = acceptance(simulated), acceptance(decoded)
    return Agreement(
        prompts=sum(bool(a or b) for a, b in zip(simulated, decoded, strict=True)),
        rounds=found.rounds,
        simulated_tau=told.tau,
        simulated_interval=told.tau_interval,
        decoded_tau=found.tau,
        difference=found.tau - told.tau,
        interval=paired_interval(decoded, simulated),
    )


def paired_interval(ours: Rounds, theirs: Rounds, seed: int = 0) -> Interval | None:
    """95 % interval of our tau less theirs, the same prompts resampled on both sides; None where
    fewer than two prompts have rounds on both.
    """
    counts = np.array(
        [
            [sum(r.emitted for r in a), len(a), sum(r.emitted for r in b), len(b)]
            for a, b in zip(ours, theirs, strict=True)
            if a and b
        ],
        dtype=float,
    ).reshape(-1, 4)
    if len(counts) < 2:
        return None
    rng = np.random.default_rng(seed)
    sums = counts[rng.integers(0, len(counts), size=(RESAMPLES, len(counts)))].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3], [0.025, 0.975])
    return float(low), float(high)


def agreement_of(
    head: DraftHead, target: Target, answers: Sequence[Answered], shape: TreeShape
) -> dict[str, Any]:
    """What a chain should have come to on the greedy answers that it decoded, as reports show it.

    Turns of one prompt are taken together. ValueError for a shape that is no chain.
    """
    stops = isinstance(shape, Shape) and shape.stop is not None
    if stops or not shape.is_chain or not shape.nodes:
        raise ValueError(f"tree {shape}: only chains are simulated, such as chain:3")
    simulated: dict[str, list[Round]] = {}
    decoded: dict[str, list[Round]] = {}
    for a in answers:
        told = rounds_of(head, target, a.ids, a.prompt_length, shape.depth)
        simulated.setdefault(a.prompt, []).extend(told)
        decoded.setdefault(a.prompt, []).extend(a.rounds)
    found = compare_rounds(list(simulated.values()), list(decoded.values()))
    return {
        "tau": found.simulated_tau,
        "interval": found.simulated_interval,
        "decoded_tau": found.decoded_tau,
        "difference": found.difference,
        "difference_interval": found.interval,
        "agrees": found.agrees,
    }
