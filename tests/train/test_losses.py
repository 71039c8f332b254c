"""Losses: values and gradients against plain twins, by finite differences, bounds, and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from drafthead.train import losses
from drafthead.train.losses import Kind, row_losses

KINDS: tuple[Kind, ...] = get_args(Kind)
# name: (scale of the draft's logits beside the teacher's, of their noise, of both)
REGIMES = {"far": (0.0, 4.0, 1.0), "near": (1.0, 0.05, 2.0), "peaked": (1.0, 0.5, 12.0)}
ROWS = torch.tensor([3, 3, 0, 9, 8, 1, 2, 2, 2, 5])
LABELS = torch.tensor([4, 1, -1, 10, 0, 7, -1, 3, 3, 2])
ETA = 2.0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * 11)


def naive(kind: Kind, logits: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """(M,) each row's loss, as its formula is written, by torch's own derivatives."""
    log_p = logits.log_softmax(-1)
    p, log_q = log_p.exp(), q.log()
    has = labels >= 0
    hard = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0] * has
    apart = (p - q).abs().sum(-1)
    divergence = (q * (log_q - log_p)).sum(-1)
    far = torch.exp(-ETA * torch.minimum(p, q).sum(-1)).detach()
    return {
        "soft_ce": -(q * log_p).sum(-1),
        "ce": hard,
        "kl": divergence,
        "reverse_kl": (p * (log_p - log_q)).sum(-1),
        "tv": 0.5 * apart,
        "lk": far * divergence + (1 - far) * 0.5 * apart,
        "ce_l1": 0.1 * hard + 0.9 * apart * has,
    }[kind]


def make_case(regime: str, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
    """(10, 7) hidden, its readout into 11 drafts, and a (10, 11) teacher to be taken by ROWS."""
    share, noise, scale = REGIMES[regime]
    generator = torch.Generator().manual_seed(0)
    matrix, truth, off = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((7, 11), (10, 7), (10, 7))
    )
    hidden = share * truth[ROWS] + noise * off
    teacher = (scale * truth @ matrix).softmax(-1)
    return hidden.requires_grad_(), lambda h: scale * h @ matrix, teacher


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_equals_its_plain_twin_in_value_and_gradient(kind: Kind, regime: str) -> None:
    """Each row is scaled by what it weighs later, as the backward pass is told row by row."""
    upstream = torch.linspace(-0.5, 2.0, 10)
    hidden, readout, teacher = make_case(regime, torch.float32)
    made = row_losses(hidden, readout, teacher, ROWS, LABELS, kind, eta=ETA, overlap=True)
    (gradient,) = torch.autograd.grad((upstream * made.value).sum(), hidden)

    exact, read, wide = make_case(regime, torch.float64)
    q = wide[ROWS]
    plain = naive(kind, read(exact), q, LABELS)
    (expected,) = torch.autograd.grad((upstream * plain).sum(), exact)
    p = read(exact).softmax(-1)

    assert made.value.dtype == torch.float32
    assert gradient.abs().max() > 1e-4, "there is something to compare"
    torch.testing.assert_close(made.value, plain.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-3, atol=1e-4)
    assert torch.equal(made.best, p.argmax(-1))
    assert made.overlap is not None
    torch.testing.assert_close(made.overlap, torch.minimum(p, q).sum(-1).float(), rtol=0, atol=1e-5)
    chance = p.gather(1, LABELS.clamp(min=0)[:, None])[:, 0] * (LABELS >= 0)
    torch.testing.assert_close(made.chance, chance.float(), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("regime", ["far", "near"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_what_finite_differences_say(kind: Kind, regime: str) -> None:
    hidden, readout, teacher = make_case(regime, torch.float64)

    def value(h: Tensor, share: Tensor | None = None) -> Tensor:
        made = row_losses(h, readout, teacher, ROWS, LABELS, kind, eta=ETA, overlap=True)
        assert made.value.dtype == torch.float64
        if kind != "lk" or share is None:
            return made.value
        # The share of each part is held fixed where the gradient is taken.
        parts = [row_losses(h, readout, teacher, ROWS, LABELS, part).value for part in ("kl", "tv")]
        return share * parts[0] + (1 - share) * parts[1]

    made = row_losses(hidden, readout, teacher, ROWS, LABELS, overlap=True)
    assert made.overlap is not None
    share = (-ETA * made.overlap).exp()
    (gradient,) = torch.autograd.grad(value(hidden).sum(), hidden)
    step = 1e-6
    with torch.no_grad():
        for column in range(hidden.shape[1]):
            away = torch.zeros_like(hidden)
            away[:, column] = step
            slope = (value(hidden + away, share) - value(hidden - away, share)) / (2 * step)
            torch.testing.assert_close(gradient[:, column], slope, rtol=1e-6, atol=1e-7)


def test_lk_is_divergence_while_far_and_overlap_when_near() -> None:
    """One less the overlap hardly moves a head that is far off; that is what lk is for."""
    logits = torch.zeros(1, 50)
    logits[0, 0] = 30.0
    teacher = torch.full((1, 50), 1e-12)
    teacher[0, 1] = 1.0
    slopes = {}
    for kind in ("kl", "tv", "lk"):
        far = logits.clone().requires_grad_()
        row_losses(
            far, lambda h: h, teacher, torch.tensor([0]), torch.tensor([1]), kind
        ).value.sum().backward()
        assert far.grad is not None
        slopes[kind] = far.grad
    assert slopes["tv"].abs().max() < 1e-9
    torch.testing.assert_close(slopes["lk"], slopes["kl"], rtol=1e-5, atol=0)

    near = (teacher.log() + 0.01 * torch.randn(1, 50)).requires_grad_()
    made = row_losses(
        near, lambda h: h, teacher, torch.tensor([0]), torch.tensor([1]), "lk", eta=20.0
    )
    assert made.overlap is not None
    torch.testing.assert_close(made.value, 1.0 - made.overlap, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_in_bf16_is_close_to_that_in_fp32(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix, hidden = (torch.randn(*s, generator=generator).bfloat16() for s in ((8, 50), (6, 8)))
    teacher = torch.randn(6, 50, generator=generator).softmax(-1)
    labels = torch.arange(6)
    hidden.requires_grad_()
    row_losses(
        hidden, lambda h: h @ matrix, teacher.bfloat16(), torch.arange(6), labels, kind, eta=ETA
    ).value.sum().backward()
    plain = hidden.detach().float().requires_grad_()
    naive(kind, plain @ matrix.float(), teacher, labels).sum().backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(hidden.grad.float(), plain.grad, rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_rounds_to_zero_leaves_every_loss_finite(kind: Kind) -> None:
    logits = torch.tensor([[200.0, 0.0, -200.0]]).requires_grad_()
    teacher = torch.tensor([[0.0, 0.0, 1.0]])
    one = torch.tensor([0])
    made = row_losses(logits, lambda h: h, teacher, one, torch.tensor([2]), kind)
    (gradient,) = torch.autograd.grad(made.value.sum(), logits)
    assert made.value.isfinite().all()
    assert made.value > 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_cost_nothing_and_are_still_connected(kind: Kind) -> None:
    hidden = torch.empty(0, 7, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    made = row_losses(hidden, lambda h: h, torch.empty(0, 7), none, none, kind)
    made.value.sum().backward()
    assert made.value.shape == made.best.shape == made.chance.shape == (0,)
    assert hidden.grad is not None


def test_overlap_costs_nothing_unless_it_is_needed() -> None:
    hidden, readout, teacher = make_case("far", torch.float32)
    shared = {
        kind: row_losses(hidden, readout, teacher, ROWS, LABELS, kind).overlap for kind in KINDS
    }
    assert {kind for kind in KINDS if shared[kind] is not None} == {"tv", "lk", "ce_l1"}


@pytest.mark.usefixtures("small_chunks")
def test_distribution_is_the_softmax_of_all_rows() -> None:
    hidden = torch.randn(10, 11, generator=torch.Generator().manual_seed(3))
    made = losses.distribution(lambda h: 2 * h, hidden, 11)
    torch.testing.assert_close(made, (2 * hidden).softmax(-1))
    assert losses.distribution(lambda h: h, hidden[:0], 11).shape == (0, 11)


def test_overlap_is_one_for_equal_and_zero_for_disjoint_distributions() -> None:
    logits = torch.tensor([[0.0, -1e4, -1e4], [1.0, 2.0, 3.0]])
    teacher = torch.tensor([[0.0, 1.0, 0.0], [4.0, 5.0, 6.0]])
    teacher[1] = teacher[1].softmax(-1)
    made = row_losses(
        logits, lambda h: h, teacher, torch.arange(2), torch.tensor([0, 0]), overlap=True
    )
    assert made.overlap is not None
    torch.testing.assert_close(made.overlap, torch.tensor([0.0, 1.0]))


def test_mistakes_are_named() -> None:
    hidden, two, three = torch.zeros(2, 5), torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"rows \(3,\)"):
        row_losses(hidden, lambda h: h, torch.zeros(4, 5), three, two)
    with pytest.raises(ValueError, match=r"labels \(3,\)"):
        row_losses(hidden, lambda h: h, torch.zeros(4, 5), two, three)
    with pytest.raises(ValueError, match="'l2' is unknown; use one of soft_ce, ce, kl"):
        row_losses(hidden, lambda h: h, torch.zeros(4, 5), two, two, "l2")  # type: ignore[arg-type]
