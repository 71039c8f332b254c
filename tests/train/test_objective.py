"""The objective: which positions carry loss, what divides it, and that every depth learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_rules import OPTIONS
from tiny_runs import LAYERS, three_layers

from drafthead.data.chat import Row
from drafthead.heads.base import TeacherBatch, settings_class
from drafthead.inference.target import Target
from drafthead.train.config import LossSettings
from drafthead.train.heldout import drafts_of, simulate
from drafthead.train.objective import Objective, Outcome
from drafthead.train.teacher import OnlineFeatures, blank
from drafthead.train.timing import Stopwatch

SPAN = range(10, 15)


def make_objective(
    target: Target, steps: int, draft_ids: torch.Tensor | None = None, **rules: Any
) -> Objective:
    torch.manual_seed(0)
    size = None if draft_ids is None else len(draft_ids)
    settings = settings_class("eagle3").model_validate(
        {"layers": LAYERS, "draft_vocab_size": size, "unroll_steps": steps}
    )
    head = settings.build(target.contract(LAYERS, {}), target.config, draft_ids)
    head.bind(target.model)
    watch, settings = Stopwatch(), LossSettings(**rules)
    return Objective(head, target.vocab_size, decay=0.8, bf16=False, watch=watch, rules=settings)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(three_layers())


@pytest.fixture
def batch(target: Target) -> TeacherBatch:
    """Twenty tokens, of which 10 to 14 are the assistant's."""
    row = Row("a", list(range(20, 40)), [t in SPAN for t in range(20)])
    return OnlineFeatures(target, [row], [(0,)], LAYERS).batch(0)


def test_exactly_the_positions_whose_next_token_is_the_assistants_carry_loss(
    target: Target, batch: TeacherBatch
) -> None:
    """F05: change the teacher at one position; the loss moves for labels 10 to 14 and no other."""
    objective = make_objective(target, steps=1)
    base = objective(batch, 1.0).loss
    moved = []
    for position in range(20):
        last_hidden = batch.last_hidden.clone()
        last_hidden[0, position] *= -1
        if objective(replace(batch, last_hidden=last_hidden), 1.0).loss != base:
            moved.append(position)
    assert [position + 1 for position in moved] == list(SPAN)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_every_depth_counts_the_whole_answer_and_reaches_the_weights(
    target: Target, batch: TeacherBatch, steps: int
) -> None:
    """F38."""
    objective = make_objective(target, steps)
    outcome: Outcome = objective(batch, 5.0)
    assert outcome.sums[:, 2].tolist() == [5.0] * steps
    assert outcome.sums[:, 3].tolist() == [5.0] * steps
    weighted = sum(0.8**d * outcome.sums[d, 0] for d in range(steps)) / 5.0
    torch.testing.assert_close(outcome.loss, weighted)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in objective.head.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values()), gradients.keys()


def test_choices_outside_the_draft_vocabulary_carry_no_loss_but_are_seen(
    target: Target, batch: TeacherBatch
) -> None:
    top = batch.top[0, 9:14]
    kept = torch.tensor(sorted({*range(50), *top[:2].tolist()} - set(top[2:].tolist())))
    objective = make_objective(target, 2, kept)
    covered = sum(int(choice) in set(kept.tolist()) for choice in top)
    assert 0 < covered < 5
    outcome: Outcome = objective(batch, 1.0)
    assert int(objective.countable(batch).sum()) == covered
    assert outcome.sums[0, 2:].tolist() == [covered, 5.0]


def test_a_batch_with_nothing_supervised_is_zero_and_has_zero_gradient(
    target: Target, batch: TeacherBatch
) -> None:
    objective = make_objective(target, 2)
    loss = objective(replace(batch, mask=torch.zeros_like(batch.mask)), 1.0).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    for name, parameter in objective.head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_bf16_computes_close_to_fp32(target: Target, batch: TeacherBatch) -> None:
    wide = make_objective(target, 2)
    narrow = Objective(wide.head, target.vocab_size, decay=0.8, bf16=True, watch=Stopwatch())
    torch.testing.assert_close(narrow(batch, 5.0).loss, wide(batch, 5.0).loss, rtol=2e-2, atol=0.0)


def ragged(target: Target, *chosen: int) -> TeacherBatch:
    """Three conversations of unlike lengths, padded; the second is supervised from its start."""
    spans = [(20, range(10, 15)), (6, range(6)), (13, range(3, 12))]
    rows = [
        Row(str(n), [(7 * n + 3 * t) % 500 + 5 for t in range(n)], [t in span for t in range(n)])
        for n, span in spans
    ]
    return OnlineFeatures(target, rows, [chosen or (0, 1, 2)], LAYERS).batch(0)


def gradients(objective: Objective, batch: TeacherBatch) -> tuple[Outcome, list[torch.Tensor]]:
    outcome: Outcome = objective(batch, 7.0)
    return outcome, list(torch.autograd.grad(outcome.loss, list(objective.head.parameters())))


def test_packing_changes_neither_loss_nor_gradient(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch = make_objective(target, 3), ragged(target)
    packed, ours = gradients(objective, batch)
    monkeypatch.setattr(type(objective.head), "packs", False)
    padded, plain = gradients(objective, batch)
    torch.testing.assert_close(packed.loss, padded.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed.sums, padded.sums, atol=1e-4, rtol=1e-5)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_packed_sequences_begin_at_position_zero_and_end_with_their_last_label(
    target: Target,
) -> None:
    packed = ragged(target).packed()
    assert packed.starts is not None
    assert packed.ids.shape == (1, 15 + 6 + 12)
    assert packed.starts[0].tolist() == [0] * 15 + [15] * 6 + [21] * 12
    assert not packed.supervised(1)[0, 14], "the next sequence's first token has no context here"
    assert packed.supervised(1).sum() == 5 + 5 + 9
    blank = replace(ragged(target), mask=torch.zeros(3, 20, dtype=torch.bool)).packed()
    assert blank.ids.shape == (1, 3)


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_packed_sequences_do_not_see_each_other(target: Target, chosen: int) -> None:
    """The loss of one sequence has no gradient in the states of another."""
    objective, batch = make_objective(target, 3), ragged(target).packed()
    assert batch.starts is not None
    own = batch.starts == batch.starts.unique()[chosen]
    features = batch.features.float().requires_grad_()
    alone = replace(batch, features=features, mask=batch.mask & own)
    loss = torch.zeros(())
    for prediction in objective.head.unroll(alone, 3):
        loss = loss + prediction.logits.logsumexp(-1).sum()
    (grad,) = torch.autograd.grad(loss, features)
    assert grad[own].abs().sum() > 0
    assert not grad[~own].any()


def test_recomputing_activations_changes_no_gradient(target: Target) -> None:
    objective, batch = make_objective(target, 3), ragged(target)
    kept, plain = gradients(objective, batch)
    objective.head.gradient_checkpointing = True
    again, ours = gradients(objective, batch)
    assert kept.loss == again.loss
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_f32_accumulated_halves_are_the_whole(target: Target, name: str) -> None:
    """With rows of 5, 5 and 9 supervised tokens in halves of one and two rows."""
    whole, halves = ragged(target), [ragged(target, 0), ragged(target, 1, 2)]
    kept = torch.arange(0, target.vocab_size, 2)
    objective = make_objective(target, 3, kept, **OPTIONS[name])
    counts = [float(objective.counted(batch)) for batch in (whole, *halves)]
    assert counts[0] == counts[1] + counts[2] > 0

    weights = list(objective.head.parameters())
    together: Outcome = objective(whole, counts[0])
    apart: list[Outcome] = [objective(half, counts[0]) for half in halves]
    torch.testing.assert_close(together.loss, apart[0].loss + apart[1].loss)
    torch.testing.assert_close(together.sums, apart[0].sums + apart[1].sums)
    ours = torch.autograd.grad(together.loss, weights)
    theirs = [torch.autograd.grad(outcome.loss, weights) for outcome in apart]
    assert any(gradient.abs().max() > 1e-3 for gradient in ours)
    for one, first, second in zip(ours, *theirs, strict=True):
        torch.testing.assert_close(one, first + second, atol=1e-6, rtol=1e-5)


def test_divisors_know_no_padding_and_no_blank_rows(target: Target) -> None:
    batch = ragged(target)
    supervised, positions = (
        make_objective(target, 1, loss_mean=mean) for mean in ("supervised", "positions")
    )
    assert int(supervised.counted(batch)) == 5 + 5 + 9  # the second's first token has no context
    assert int(positions.counted(batch)) == 15 + 6 + 12
    assert int(positions.counted(blank(batch))) == 0


def test_held_out_chains_may_be_of_another_depth_than_trained(target: Target) -> None:
    batch = ragged(target)
    trained, deep = (make_objective(target, 2, heldout_depth=depth) for depth in (None, 4))
    sums = {len(sums): sums for sums in (simulate(trained, batch), simulate(deep, batch))}
    assert sorted(sums) == [2, 4]
    assert sums[4][:2, 2:].equal(sums[2][:, 2:]), "the first depths are the same drafts"
    assert sums[4][3, 4] > 0
    deep.head.max_depth = 3
    assert len(simulate(deep, batch)) == 3


def test_held_out_overlap_and_matches_are_those_of_whole_logits(target: Target) -> None:
    kept = torch.arange(0, target.vocab_size, 2)
    head, batch = make_objective(target, 3, kept).head, ragged(target)
    batch = replace(batch, features=batch.features.float(), last_hidden=batch.last_hidden.float())
    _, sums = drafts_of(head, batch, 3)
    for depth, prediction in enumerate(head.unroll(batch, 3)):
        states = batch.last_hidden.flatten(0, 1)[prediction.teacher]
        p, q = (x.softmax(-1) for x in (prediction.logits, head.teacher_logits(states)))
        right = kept[p.argmax(-1)] == batch.top.flatten()[prediction.teacher]
        expected = [right.sum().item(), torch.minimum(p, q).sum().item(), len(p)]
        assert sums[depth].tolist() == pytest.approx(expected, abs=1e-4)
