"""The objective's rules against plain loops over slots and depths, on a head that is a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_rules import OPTIONS
from torch import Tensor, nn

from drafthead.heads.base import Prediction, TeacherBatch, as_it_is
from drafthead.train.config import LossSettings
from drafthead.train.objective import Objective, Outcome
from drafthead.train.timing import Stopwatch


class Table(nn.Module):
    """Its logits are its weights, (B * T, K, Vd), so a gradient shows what each position weighs."""

    packs = False
    max_depth: int | None = None

    def __init__(self, batch: TeacherBatch, draft_ids: Tensor, rows: Tensor, steps: int) -> None:
        super().__init__()
        self.settings = SimpleNamespace(unroll_steps=steps)
        self.draft_ids, self.rows = draft_ids, rows
        generator = torch.Generator().manual_seed(2)
        shape = batch.ids.numel(), steps, len(draft_ids)
        self.logits = nn.Parameter(torch.randn(shape, generator=generator))
        self.forecast = nn.Parameter(torch.randn(shape[:2], generator=generator))

    def live(self, batch: TeacherBatch) -> tuple[TeacherBatch, Tensor]:
        return batch, torch.zeros(())

    def teacher_logits(self, last_hidden: Tensor) -> Tensor:
        return last_hidden @ self.rows.T

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        T = batch.ids.shape[1]
        for depth in range(steps):
            rows, slots = batch.supervised(2 + depth).nonzero(as_tuple=True)
            flat = rows * T + slots
            hidden, forecast = self.logits[flat, depth], self.forecast[flat, depth]
            yield Prediction(hidden, as_it_is, flat + 1 + depth, True, forecast)


def table_case(**rules: Any) -> tuple[Objective, TeacherBatch, Table]:
    """Two rows of 14 tokens with prompts, a gap and an end; 9 of 12 tokens can be drafted."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (2, 14), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :4] = mask[0, 8:10] = mask[1, :2] = mask[1, 11:] = False
    states, rows = (
        torch.randn(2, 14, 5, generator=generator),
        torch.randn(9, 5, generator=generator),
    )
    draft_ids = torch.tensor([0, 1, 2, 4, 5, 6, 8, 10, 11])
    batch = TeacherBatch(ids, mask, states, states, draft_ids[(states @ rows.T).argmax(-1)])
    # Some choices of the target cannot be drafted, and some of the text's tokens.
    outside = torch.rand(2, 14, generator=generator) < 0.2
    batch = replace(batch, top=torch.where(outside, 3, batch.top))
    head: Any = Table(batch, draft_ids, rows, 3)
    with torch.no_grad():  # half of the time the head's choice is the text's token
        for depth in range(3):
            at = ids.roll(-2 - depth, dims=1).flatten()
            hit = (draft_ids == at[:, None]) & (torch.rand(28, 1, generator=generator) < 0.5)
            head.logits[:, depth] += 4.0 * hit
    settings = LossSettings(**rules)
    return (
        Objective(head, 12, decay=0.7, bf16=False, watch=Stopwatch(), rules=settings),
        batch,
        head,
    )


def by_hand(head: Table, batch: TeacherBatch, rules: LossSettings) -> Tensor:
    """The summed loss of everything, slot by slot, as the rules are worded."""
    (B, T), total = batch.ids.shape, torch.zeros(())
    known = {int(token): index for index, token in enumerate(head.draft_ids)}
    soft, hard = rules.loss != "ce", rules.loss in ("ce", "ce_l1")
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        reached, living, chain = 1.0, True, []
        for depth in range(3):
            at = t + 2 + depth
            if at >= T or not batch.mask[b, at]:
                continue
            p = head.logits[b * T + t, depth].softmax(-1)
            q = head.teacher_logits(batch.last_hidden[b, at - 1]).softmax(-1)
            label = known.get(int(batch.ids[b, at]))
            fits = not (soft and int(batch.top[b, at - 1]) not in known)
            fits = fits and not (hard and label is None)
            shared = torch.minimum(p, q).sum() if fits else torch.zeros(())
            apart, cross = (p - q).abs().sum(), -(q * p.log()).sum()
            text = -p[label].log() if label is not None else torch.zeros(())
            far = torch.exp(-rules.lk_eta * shared).detach()
            divergence = (q * (q / p).log()).sum()
            cost = {
                "soft_ce": cross,
                "ce": text,
                "reverse_kl": (p * (p / q).log()).sum(),
                "lk": far * divergence + (1 - far) * apart / 2,
                "ce_l1": 0.1 * text + 0.9 * apart,
            }[rules.loss]
            forecast = head.forecast[b * T + t, depth].sigmoid()
            sure = shared.detach()
            extra = -sure * forecast.log() - (1 - sure) * (1 - forecast).log()
            cost = (cost if fits else 0.0 * p.sum()) + rules.confidence_loss * extra
            chance = float(p[label].detach()) if fits and label is not None else 0.0
            reached *= 0.5 * chance + 0.5
            chain.append((depth, cost, reached, living))
            living = living and fits and label is not None and int(p.argmax()) == label
        for place, (depth, cost, _, lives) in enumerate(chain):
            weight = {
                "decay": 0.7**depth,
                "exp": exp(-depth / rules.depth_scale),
                "dpace": sum(passed for _, _, passed, _ in chain[place:]) / 3,
            }[rules.position_weights]
            if lives or not rules.alive_prefix:
                total = total + weight * cost
    return total


@pytest.mark.parametrize("name", OPTIONS)
def test_a_loss_is_what_its_rules_say_slot_by_slot(name: str) -> None:
    objective, batch, head = table_case(confidence_loss=0.3, **OPTIONS[name])
    ours: Outcome = objective(batch, 5.0)
    plain = by_hand(head, batch, objective.rules) / 5.0
    torch.testing.assert_close(ours.loss, plain, atol=1e-5, rtol=1e-5)
    weights = [head.logits, head.forecast]
    expected = torch.autograd.grad(plain, weights)
    for mine, other in zip(torch.autograd.grad(ours.loss, weights), expected, strict=True):
        assert other.abs().max() > 1e-2
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


def test_f38_a_dead_prefix_silences_later_depths_only() -> None:
    """Depth 0 always counts; deeper ones where all before were right, and nowhere else."""
    seen = {}
    for living in (False, True):
        objective, batch, head = table_case(alive_prefix=living)
        (seen[living],) = torch.autograd.grad(objective(batch, 1.0).loss, head.logits)
    moved = {living: gradient.abs().sum(-1) > 0 for living, gradient in seen.items()}
    assert moved[True][:, 0].equal(moved[False][:, 0])
    for depth in (1, 2):
        assert 0 < moved[True][:, depth].sum() < moved[False][:, depth].sum()
        assert not (moved[True][:, depth] & ~moved[False][:, depth]).any()


def test_confidence_learns_the_overlap_and_is_reported() -> None:
    """A forecast left to itself ends at the overlap; at 0 where the choice cannot be drafted."""
    objective, batch, head = table_case()
    optimiser = torch.optim.Adam([head.forecast], lr=0.5)
    for _ in range(60):
        optimiser.zero_grad()
        outcome: Outcome = objective(batch, 1.0)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for depth, prediction in enumerate(head.unroll(batch, 3)):
        at = prediction.teacher
        q = head.teacher_logits(batch.last_hidden.flatten(0, 1)[at]).softmax(-1)
        shared = torch.minimum(prediction.logits.softmax(-1), q).sum(-1)
        shared = shared * (batch.top.flatten()[at] != 3)
        assert prediction.confidence is not None
        forecast = prediction.confidence.sigmoid()
        torch.testing.assert_close(forecast, shared, atol=2e-2, rtol=0)
        cost = nn.functional.binary_cross_entropy(forecast, shared, reduction="sum")
        torch.testing.assert_close(outcome.extras["confidence"][depth], cost, rtol=1e-3, atol=1e-3)
    assert list(outcome.extras) == ["confidence"]
