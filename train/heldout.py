"""Simulated figures on held-out text: what chains of drafts would come to, without decoding.

Rounds are walked along the text as a decoder would walk it. A round starts after a committed token,
accepts drafts while the draft's choice is the target's choice, and is followed one token further.
The text is given, so a round can be looked at only while the text follows the draft: where the text
left it (sampled answers), or the answer ended, the round is *censored*, not rejected. Conditional
rates divide by the rounds still observed at that depth, and survival is their running product
(Kaplan and Meier's estimator); on greedy text away from the end this is the plain share of rounds.

Names follow `inference.metrics`; every figure here is simulated and says so.

Shapes: B batch, T positions, K depths; slot s is the place of the last committed token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead, TeacherBatch, as_it_is
from drafthead.train.losses import distribution, row_losses
from drafthead.train.objective import Objective


@dataclass(frozen=True)
class Simulated:
    """Simulated chain figures of held-out rows; tuples are by depth, the first draft first."""

    simulated_tau: float
    """1 + the sum of the survivals: tokens per round, the target's own included."""
    simulated_survival: tuple[float, ...]
    simulated_conditional: tuple[float, ...]
    simulated_match: tuple[float, ...]
    """Share of positions whose draft is the target's choice; out of vocabulary is a miss."""
    simulated_overlap: tuple[float, ...]
    """Mean sum of min(p, q) over the draft vocabulary at temperature 1."""
    rounds: int
    positions: int

    def flat(self) -> dict[str, float]:
        """One plain number per name, for a log line or a tracker."""
        values: dict[str, float] = {"simulated_tau": self.simulated_tau, "rounds": self.rounds}
        for name in ("survival", "conditional", "match", "overlap"):
            for depth, value in enumerate(getattr(self, f"simulated_{name}"), start=1):
                values[f"simulated_{name}_{depth}"] = value
        return values

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Drafts:
    """What a head would draft at each slot, beside what the target would choose."""

    known: Tensor
    """(B, T, K) bool: a draft of this depth from this slot has a supervised label."""
    match: Tensor
    """(B, T, K) bool: the draft is the target's choice."""
    follow: Tensor
    """(B, T, K) bool: the draft is the token of the text."""


@torch.no_grad()
def drafts_of(head: DraftHead, batch: TeacherBatch, steps: int) -> tuple[Drafts, Tensor]:
    """Unroll the head, and (K, 3) fp64 sums by depth: matches, overlap, positions.

    The round slot of a prediction is its teacher's position less its depth, whatever the head.
    """
    B, T = batch.ids.shape
    device = batch.ids.device
    tables = torch.zeros(3, B * T, steps, dtype=torch.bool, device=device)
    following = batch.ids.roll(-1, dims=1).flatten()
    top = batch.top.flatten()
    needed = batch.supervised(1).flatten()
    row_of, states = needed.cumsum(0) - 1, batch.last_hidden.flatten(0, 1)[needed]
    teacher = distribution(head.teacher_logits, states, len(head.draft_ids))
    sums = torch.zeros(steps, 3, dtype=torch.float64)
    for depth, prediction in enumerate(head.unroll(batch, steps)):
        at = prediction.teacher
        hidden, readout = prediction.hidden, prediction.readout
        if prediction.trained_readout:  # once on every rank, however many rows there are
            hidden, readout = readout(hidden), as_it_is
        unlabelled = torch.full_like(at, -1)
        made = row_losses(hidden, readout, teacher, row_of[at], unlabelled, overlap=True)
        assert made.overlap is not None
        draft = head.draft_ids[made.best]
        match = draft == top[at]
        for table, values in zip(
            tables, (torch.ones_like(match), match, draft == following[at]), strict=True
        ):
            table[at - depth, depth] = values
        positions = torch.tensor(len(at), device=device)
        sums[depth] = torch.stack([match.sum(), made.overlap.sum(), positions]).cpu()
    known, match, follow = tables.view(3, B, T, steps)
    return Drafts(known, match, follow), sums


def walk(drafts: Drafts) -> Tensor:
    """Walk every row: (K, 2) fp64 by depth, rounds observed there and accepted there."""
    steps = drafts.known.shape[-1]
    counts = [[0, 0] for _ in range(steps)]
    for known, match, follow in zip(
        drafts.known.tolist(), drafts.match.tolist(), drafts.follow.tolist(), strict=True
    ):
        slot = 0
        while slot < len(known):
            if not known[slot][0]:
                slot += 1
                continue
            accepted = 0
            for depth in range(steps):
                if not known[slot][depth]:
                    break  # the answer ends
                counts[depth][0] += 1
                if not match[slot][depth]:
                    break
                counts[depth][1] += 1
                accepted += 1
                if not follow[slot][depth]:
                    break  # the text goes another way
            slot += accepted + 1
    return torch.tensor(counts, dtype=torch.float64)


def simulate(objective: Objective, batch: TeacherBatch) -> Tensor:
    """(K, 5) fp64 sums of one batch: add them over batches and ranks for `summarise`.

    K is `objective.heldout_steps`; the head should be in evaluation mode, where it leaves no
    position out.
    """
    with objective.computing(batch) as cast:
        cast, _ = objective.head.live(cast)
        drafts, sums = drafts_of(objective.head, cast, objective.heldout_steps)
    return torch.cat([walk(drafts), sums], dim=1)


def summarise(sums: Tensor) -> Simulated:
    """Turn the added (K, 5) sums into figures; ValueError where nothing was supervised."""
    observed, accepted, match, total, positions = (column.tolist() for column in sums.unbind(dim=1))
    if not positions[0]:
        raise ValueError("data.heldout: no supervised position in the held-out rows")
    conditional = tuple(a / o if o else 0.0 for a, o in zip(accepted, observed, strict=True))
    survival = tuple(accumulate(conditional, mul))
    return Simulated(
        simulated_tau=1.0 + sum(survival),
        simulated_survival=survival,
        simulated_conditional=conditional,
        simulated_match=tuple(m / max(p, 1) for m, p in zip(match, positions, strict=True)),
        simulated_overlap=tuple(v / max(p, 1) for v, p in zip(total, positions, strict=True)),
        rounds=int(observed[0]),
        positions=int(positions[0]),
    )
