"""Planted faults: what shows that the checks can see.

Each fault is a mistake that was made somewhere before. A control runs the same check twice, as it
should be and with one fault; it passes only if the first run passes and the second does not.

Shapes: n tokens of one forward, S slots in view, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from drafthead.inference.checks_drafters import OwnGuess
from drafthead.inference.checks_subject import Check
from drafthead.inference.history import History
from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.sampling import Sampler, Verdict
from drafthead.inference.store import Store
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree
from drafthead.inference.verify import choose


def control(name: str, run: Callable[[bool], Check]) -> Check:
    """Whether a check passes as it should be (False) and fails with its fault (True)."""
    sound, faulty = run(False), run(True)
    seen = sound.passed and not faulty.passed
    figure = "seen" if seen else "not seen" if faulty.passed else "fails without the fault, too"
    detail = f"The check {faulty.name!r}: {sound.figure}; with the fault: {faulty.figure}."
    return Check(f"control: {name}", seen, figure, detail)


# Of a drafter


class SoftGuess(OwnGuess):
    """Fault: always the likeliest tokens, with the claim that they were drawn."""

    def _order(self, law: Tensor, scores: Tensor) -> Tensor:
        return law


# Of the decoder


class OneStream(Noise):
    """Fault: drafts, tests and recoveries read the same numbers."""

    def _uniform(
        self, position: int, purpose: Purpose, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return super()._uniform(position, Purpose.COUPLED, count)


class WrongNode(Sampler):
    """Fault: the target's token is that of the node before the last one kept."""

    def decide(
        self, histories: Mapping[int, History], trees: Sequence[Tree], logits: Tensor
    ) -> dict[int, Verdict]:
        verdicts = super().decide(histories, trees, logits)
        for row, (path, _) in verdicts.items():
            if path:
                before = path[-2] + 1 if len(path) > 1 else 0
                verdicts[row] = path, choose(logits[row, before], None)
        return verdicts


class FirstBranch(Store):
    """Fault: as many slots are kept as tokens, but the first ones, refused or not."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        super().commit([range(len(path)) for path in paths])


class SeesSiblings(Target):
    """Fault: a drafted token sees all drafted before it, not only its own branch."""

    def __init__(self, target: Target) -> None:
        self.__dict__.update(target.__dict__)

    def run(self, store: Store, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        n, seen = tokens.shape[1], seen.clone()
        before = torch.ones(n, n, dtype=torch.bool, device=seen.device).tril()
        for row, offset in enumerate(store.offsets):
            seen[row, :, offset : offset + n] |= before
        return super().run(store, tokens, positions, seen)
