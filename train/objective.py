"""What one micro-batch is worth: a head's predictions turned into a loss and its figures.

The loss is the sum over supervised positions of all depths, each weighed (`weights`), divided by a
count that the caller gives: `counted` over all micro-batches and ranks of one optimiser step. So a
batch, its halves accumulated, and its halves on two ranks have one gradient (F32): no weight of a
position depends on other sequences. It knows no optimiser and no particular head.

Positions whose teacher's choice lies outside the draft vocabulary carry no loss (arXiv 2503.01840;
in hard losses those whose label does); everywhere else they count as misses, in held-out figures,
in the chances that weights are made of, and in what a head's confidence is held to.

Shapes: B batch, T positions, D width, V vocabulary, Vd draft vocabulary, M positions of one depth,
K depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.heads.base import DraftHead, Prediction, TeacherBatch, as_it_is
from drafthead.train.config import LossSettings
from drafthead.train.losses import HARD, SOFT, RowLosses, distribution, row_losses
from drafthead.train.timing import Stopwatch
from drafthead.train.weights import alive, by_slot, depth_weights, dpace, exponential_weights


@dataclass(frozen=True)
class Outcome:
    """One micro-batch's loss and, by depth, what it was summed from; only `loss` has a gradient."""

    loss: Tensor
    """0-dim fp32, already divided by the step's count."""
    sums: Tensor
    """(K, 4) fp32 by depth: loss before any weight, argmax agreements, counted positions, all."""
    extras: dict[str, Tensor]
    """Each further loss by name, (K,) fp32: summed over all positions, before weights by depth."""
    change: Tensor
    """0-dim fp32: summed loss of what the head changes in its target (`DraftHead.live`)."""

    def flat(self) -> Tensor:
        """(2 + 4 K + E K,) fp64 on the CPU, to be added over micro-batches and ranks: the loss, the
        change, the sums depth by depth, then the E extras, in an order that every batch has.
        """
        parts = [self.loss.detach()[None], self.change[None], self.sums.flatten()]
        return torch.cat([*parts, *self.extras.values()]).double().cpu()


@dataclass(frozen=True)
class _Depth:
    """What one depth gave; `values` and `extras` have gradients."""

    slots: Tensor
    """(M,) int64: where in B * T its chain begins."""
    kept: Tensor
    """Indices of the M rows that carry the loss."""
    values: Tensor
    """One for each of those."""
    extras: dict[str, Tensor]
    """Each (M,), weighed by its own setting."""
    figures: Tensor
    """(4,), see Outcome."""
    chance: Tensor
    """(M,) the draft's probability of the label, 0 where the row carries no loss."""
    right: Tensor
    """(M,) bool: the draft is the label."""

    def cost(self, weight: float | Tensor) -> Tensor:
        """Its weighed sum; weight: one for all, or (M,)."""
        own = weight[self.kept] if isinstance(weight, Tensor) else weight
        total = (own * self.values).sum()
        for extra in self.extras.values():
            total = total + (weight * extra).sum()
        return total


class Objective(nn.Module):
    """A head together with its loss, so that a backend's wrapper sees one ordinary forward."""

    draft_of: Tensor
    """(V,) int64: draft id of each target token, -1 where the head cannot propose it."""

    def __init__(
        self,
        head: DraftHead,
        vocab_size: int,
        decay: float,
        bf16: bool,
        watch: Stopwatch,
        rules: LossSettings | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.rules = rules or LossSettings()
        self.steps = head.settings.unroll_steps
        """Depths trained."""
        self._decay = decay
        self._bf16 = bf16
        self._watch = watch
        draft_of = torch.full((vocab_size,), -1)
        draft_ids = head.draft_ids.cpu()
        draft_of[draft_ids] = torch.arange(len(draft_ids))
        self.register_buffer("draft_of", draft_of, persistent=False)

    @property
    def heldout_steps(self) -> int:
        """Depths of a held-out simulated chain."""
        steps = self.rules.heldout_depth or self.steps
        return steps if self.head.max_depth is None else min(steps, self.head.max_depth)

    def countable(self, batch: TeacherBatch) -> Tensor:
        """(B, T) bool: the next token is supervised, and what this loss needs can be drafted."""
        found = batch.supervised(1)
        if self.rules.loss in SOFT:
            found = found & (self.draft_of[batch.top] >= 0)
        if self.rules.loss in HARD:
            found = found & (self.draft_of[_following(batch)] >= 0)
        return found

    def counted(self, batch: TeacherBatch) -> Tensor:
        """0-dim: what the batch adds to the step's divisor, by `training.loss_mean`.

        A row's positions end with its last supervised token, so padding and blank rows add none.
        """
        if self.rules.loss_mean == "supervised":
            return self.countable(batch).sum()
        place = torch.arange(1, batch.ids.shape[1] + 1, device=batch.ids.device)
        return torch.where(batch.mask, place, 0).amax(dim=1).sum()

    def forward(self, batch: TeacherBatch, count: float) -> Outcome:
        """Unroll the head over the batch; `count` is the whole step's divisor."""
        with self._precision(batch.ids.device):
            batch, change = self.head.live(batch)
        if self.head.packs:
            batch = batch.packed()
        with self.computing(batch) as batch:
            needed = batch.supervised(1).flatten()
            teacher, row_of = self._teacher(batch, needed), needed.cumsum(0) - 1
            countable, top = self.countable(batch).flatten(), batch.top.flatten()
            labels = self.draft_of[_following(batch)].flatten()
            parts = []
            predictions = self.head.unroll(batch, self.steps)
            for depth, prediction in zip(range(self.steps), predictions, strict=True):
                with self._watch.part("loss"):
                    at = prediction.teacher
                    facts = row_of[at], countable[at], top[at], labels[at]
                    parts.append(self._depth(prediction, at - depth, teacher, *facts))
            with self._watch.part("loss"):
                loss = self._anchor() + change
                weights = self._weights(parts, batch.ids.numel())
                for part, weight in zip(parts, weights, strict=True):
                    loss = loss + part.cost(weight)
        sums = torch.stack([part.figures for part in parts])
        return Outcome(loss / count, sums, _by_name(parts), change.detach())

    def _depth(
        self,
        prediction: Prediction,
        slots: Tensor,
        teacher: Tensor,
        rows: Tensor,
        countable: Tensor,
        top: Tensor,
        labels: Tensor,
    ) -> _Depth:
        """One depth's losses, row by row; the last four are (M,), of its rows."""
        kept = countable.nonzero()[:, 0]  # the others have no loss, and no hit
        hidden, readout = prediction.hidden[kept], prediction.readout
        if prediction.trained_readout:
            hidden, readout = readout(hidden), as_it_is
        foretold = prediction.confidence is not None
        made = row_losses(
            hidden,
            readout,
            teacher,
            rows[kept],
            labels[kept],
            self.rules.loss,
            eta=self.rules.lk_eta,
            overlap=foretold,
        )
        agreed = (self.head.draft_ids[made.best] == top[kept]).sum()
        figures = [
            made.value.detach().sum(),
            agreed,
            torch.tensor(len(kept)),
            torch.tensor(len(rows)),
        ]
        chance = made.chance.new_zeros(len(rows))
        right = torch.zeros_like(countable)
        chance[kept], right[kept] = made.chance, made.best == labels[kept]
        return _Depth(
            slots=slots,
            kept=kept,
            values=made.value,
            extras=self._extras(prediction, kept, made),
            figures=torch.stack([figure.to(chance) for figure in figures]),
            chance=chance,
            right=right,
        )

    def _extras(self, prediction: Prediction, kept: Tensor, made: RowLosses) -> dict[str, Tensor]:
        """The head's further losses, (M,) each.

        Its confidence is held to the overlap with the teacher's distribution, one less half of
        Σ |p − q|, which is the chance that a ratio rule accepts (DSpark, arXiv 2607.05147).
        """
        extras = {name: extra.float() for name, extra in prediction.auxiliary.items()}
        if prediction.confidence is not None:
            assert made.overlap is not None
            accepted = made.overlap.new_zeros(len(prediction.confidence))
            accepted[kept] = made.overlap
            forecast = prediction.confidence.to(accepted.dtype)
            cost = F.binary_cross_entropy_with_logits(forecast, accepted, reduction="none")
            extras["confidence"] = self.rules.confidence_loss * cost
        return extras

    def _weights(self, parts: Sequence[_Depth], size: int) -> Sequence[float | Tensor]:
        """Of each depth: one for all of its rows, or (M,); `size`: B * T."""
        rules = self.rules
        fixed: Sequence[float] = depth_weights(self.steps, self._decay)
        if rules.position_weights == "exp":
            fixed = exponential_weights(self.steps, rules.depth_scale)
        if rules.position_weights != "dpace" and not rules.alive_prefix:
            return fixed
        slots = [part.slots for part in parts]
        chances = by_slot(slots, [part.chance for part in parts], size, 0.0)
        known = by_slot(slots, [torch.ones_like(part.right) for part in parts], size, False)
        if rules.position_weights == "dpace":
            table = dpace(chances, known)
        else:
            table = chances.new_tensor(fixed).expand(size, -1)
        if rules.alive_prefix:
            right = by_slot(slots, [part.right for part in parts], size, False)
            table = table * alive(right, known)
        return [table[at, depth] for depth, at in enumerate(slots)]

    def _anchor(self) -> Tensor:
        """Zero, connected to every trained weight: ranks that sum gradients must sum the same ones.

        Without it a batch with nothing supervised gives no gradient at all to some of them (F27).
        What ZeRO stage 3 keeps in parts (it marks it by `ds_id`) is left to the head's own graph.
        """
        trained = [p for p in self.head.parameters() if p.requires_grad and not hasattr(p, "ds_id")]
        zero = torch.zeros((), device=self.draft_of.device)
        return 0.0 * sum((p.sum() for p in trained), zero)

    @contextmanager
    def computing(self, batch: TeacherBatch) -> Iterator[TeacherBatch]:
        """Enter this run's precision and give the batch with its stored states in it."""
        with self._precision(batch.ids.device):
            if self._bf16:
                yield batch
            else:
                features, last_hidden = batch.features.float(), batch.last_hidden.float()
                yield replace(batch, features=features, last_hidden=last_hidden)

    def _precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self._bf16)

    def _teacher(self, batch: TeacherBatch, needed: Tensor) -> Tensor:
        """(N, Vd): the teacher's distribution at the needed positions, once for all depths."""
        with self._watch.part("loss"):
            states = batch.last_hidden.flatten(0, 1)[needed]
            return distribution(self.head.teacher_logits, states, len(self.head.draft_ids))


def _following(batch: TeacherBatch) -> Tensor:
    """(B, T) the token after each; meaningless at the end of a row."""
    return batch.ids.roll(-1, dims=1)


def _by_name(parts: Sequence[_Depth]) -> dict[str, Tensor]:
    """Extra losses summed at each depth, (K,) by name; 0 at a depth that has none."""
    names = dict.fromkeys(name for part in parts for name in part.extras)
    zero = parts[0].figures.new_zeros(())
    return {
        name: torch.stack(
            [p.extras[name].detach().sum() if name in p.extras else zero for p in parts]
        )
        for name in names
    }
