"""Losses: values and gradients against a plain twin, bounds, and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafthead.train import losses


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * 11)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["rows", "logits"])
def test_soft_cross_entropy_equals_its_plain_twin_in_value_and_gradient(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 11, generator=generator)
    hidden = torch.randn(10, 7 if kind == "rows" else 11, generator=generator).requires_grad_()

    def readout(h: Tensor) -> Tensor:
        return h @ matrix if kind == "rows" else h

    teacher = (4 * torch.randn(10, 11, generator=generator)).softmax(-1)
    rows = torch.tensor([3, 3, 0, 9, 8, 1, 2, 2, 2, 5])

    value, best = losses.soft_cross_entropy(hidden, readout, teacher, rows)
    (gradient,) = torch.autograd.grad(0.3 * value, hidden)
    plain = -(teacher[rows] * readout(hidden).log_softmax(-1)).sum()
    (plain_gradient,) = torch.autograd.grad(0.3 * plain, hidden)

    torch.testing.assert_close(value, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(best, readout(hidden).argmax(-1))


def test_soft_cross_entropy_gradient_in_bf16() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix, hidden = (torch.randn(*s, generator=generator).bfloat16() for s in ((8, 50), (6, 8)))
    teacher = torch.randn(6, 50, generator=generator).softmax(-1)
    hidden.requires_grad_()
    losses.soft_cross_entropy(hidden, lambda h: h @ matrix, teacher.bfloat16(), torch.arange(6))[
        0
    ].backward()
    plain = hidden.detach().float().requires_grad_()
    (-(teacher * (plain @ matrix.float()).log_softmax(-1)).sum()).backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(hidden.grad.float(), plain.grad, rtol=2**-5, atol=2**-6)


def test_soft_cross_entropy_of_no_rows_is_zero_and_still_connected() -> None:
    hidden = torch.empty(0, 7, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    value, best = losses.soft_cross_entropy(hidden, lambda h: h, torch.empty(0, 7), none)
    value.backward()
    assert value.item() == 0
    assert best.shape == (0,)
    assert hidden.grad is not None


@pytest.mark.usefixtures("small_chunks")
def test_distribution_is_the_softmax_of_all_rows() -> None:
    hidden = torch.randn(10, 11, generator=torch.Generator().manual_seed(3))
    made = losses.distribution(lambda h: 2 * h, hidden, 11)
    torch.testing.assert_close(made, (2 * hidden).softmax(-1))
    assert losses.distribution(lambda h: h, hidden[:0], 11).shape == (0, 11)


@pytest.mark.usefixtures("small_chunks")
def test_overlap_is_one_for_equal_and_zero_for_disjoint_distributions() -> None:
    logits = torch.randn(10, 11, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(losses.overlap(logits, logits + 3.0), torch.ones(10))
    left = torch.full((1, 4), -1e4)
    right = left.clone()
    left[0, 0] = right[0, 1] = 0.0
    assert losses.overlap(left, right).item() == 0.0


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 4\)"):
        losses.overlap(torch.zeros(2, 5), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"rows \(3,\)"):
        losses.soft_cross_entropy(
            torch.zeros(2, 5), lambda h: h, torch.zeros(4, 5), torch.tensor([0, 1, 2])
        )


def test_depth_weights() -> None:
    assert losses.depth_weights(3, 0.5) == (1.0, 0.5, 0.25)
    with pytest.raises(ValueError, match="decay"):
        losses.depth_weights(3, 0.0)
