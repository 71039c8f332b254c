"""What one micro-batch is worth: a head's predictions turned into a loss and its figures.

The loss is the sum over depths of decay ** depth times the soft cross-entropies of that depth's
supervised positions, divided by a count that the caller gives: the number of supervised tokens of
depth 0 over all micro-batches and ranks of one optimiser step. So a batch, its halves accumulated,
and its halves on two ranks have one gradient (F32). It knows no optimiser and no particular head.

Positions whose teacher's choice lies outside the draft vocabulary carry no loss (arXiv 2503.01840);
held-out figures count them as misses.

Shapes: B batch, T positions, D width, V vocabulary, Vd draft vocabulary, M positions of one depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafthead.heads.base import DraftHead, Prediction, TeacherBatch, as_it_is
from drafthead.train.losses import depth_weights, distribution, soft_cross_entropy
from drafthead.train.timing import Stopwatch


@dataclass(frozen=True)
class Outcome:
    """One micro-batch's loss and, by depth, what it was summed from; only `loss` has a gradient."""

    loss: Tensor
    """0-dim fp32, already divided by the step's count."""
    sums: Tensor
    """(K, 4) fp32 by depth: cross-entropy, argmax agreements, counted positions, all."""


class Objective(nn.Module):
    """A head together with its loss, so that a backend's wrapper sees one ordinary forward."""

    in_vocabulary: Tensor
    """(V,) bool: target tokens that the head can propose."""

    def __init__(
        self, head: DraftHead, vocab_size: int, decay: float, bf16: bool, watch: Stopwatch
    ) -> None:
        super().__init__()
        self.head = head
        self.weights = depth_weights(head.settings.unroll_steps, decay)
        self._bf16 = bf16
        self._watch = watch
        kept = torch.zeros(vocab_size, dtype=torch.bool)
        kept[head.draft_ids.cpu()] = True
        self.register_buffer("in_vocabulary", kept, persistent=False)

    @property
    def steps(self) -> int:
        """Depths trained."""
        return len(self.weights)

    def countable(self, batch: TeacherBatch) -> Tensor:
        """(B, T) bool: the next token is supervised and the teacher's choice can be drafted."""
        return batch.supervised(1) & self.in_vocabulary[batch.top]

    def forward(self, batch: TeacherBatch, count: float) -> Outcome:
        """Unroll the head over the batch; `count` is the whole step's divisor."""
        if self.head.packs:
            batch = batch.packed()
        with self.computing(batch) as batch:
            needed = batch.supervised(1).flatten()
            teacher, row_of = self._teacher(batch, needed), needed.cumsum(0) - 1
            countable, top = self.countable(batch).flatten(), batch.top.flatten()
            loss = self._anchor()
            sums = []
            predictions = self.head.unroll(batch, self.steps)
            for prediction, weight in zip(predictions, self.weights, strict=True):
                with self._watch.part("loss"):
                    at = prediction.teacher
                    total, figures = self._depth(
                        prediction, teacher, row_of[at], countable[at], top[at]
                    )
                loss = loss + weight * total
                sums.append(figures)
        return Outcome(loss / count, torch.stack(sums))

    def _depth(
        self,
        prediction: Prediction,
        teacher: Tensor,
        rows: Tensor,
        countable: Tensor,
        top: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One depth: summed loss with gradient, and its four figures (see Outcome)."""
        kept = countable.nonzero()[:, 0]  # a choice that cannot be drafted has no loss, and no hit
        hidden, readout = prediction.hidden[kept], prediction.readout
        if prediction.trained_readout:
            hidden, readout = readout(hidden), as_it_is
        total, best = soft_cross_entropy(hidden, readout, teacher, rows[kept])
        agreed = (self.head.draft_ids[best] == top[kept]).sum()
        cross = total.detach()
        for extra in prediction.auxiliary.values():
            total = total + extra.float().sum()
        figures = [cross, agreed, cross.new_tensor(len(kept)), cross.new_tensor(len(rows))]
        return total, torch.stack([figure.float() for figure in figures])

    def _anchor(self) -> Tensor:
        """Zero, connected to every trained weight: ranks that sum gradients must sum the same ones.

        Without it a batch with nothing supervised gives no gradient at all to some of them (F27).
        What ZeRO stage 3 keeps in parts (it marks it by `ds_id`) is left to the head's own graph.
        """
        trained = [p for p in self.head.parameters() if p.requires_grad and not hasattr(p, "ds_id")]
        zero = torch.zeros((), device=self.in_vocabulary.device)
        return 0.0 * sum((p.sum() for p in trained), zero)

    @contextmanager
    def computing(self, batch: TeacherBatch) -> Iterator[TeacherBatch]:
        """Enter this run's precision and give the batch with its stored states in it."""
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self._bf16):
            if self._bf16:
                yield batch
            else:
                features, last_hidden = batch.features.float(), batch.last_hidden.float()
                yield replace(batch, features=features, last_hidden=last_hidden)

    def _teacher(self, batch: TeacherBatch, needed: Tensor) -> Tensor:
        """(N, Vd): the teacher's distribution at the needed positions, once for all depths."""
        with self._watch.part("loss"):
            states = batch.last_hidden.flatten(0, 1)[needed]
            return distribution(self.head.teacher_logits, states, len(self.head.draft_ids))
