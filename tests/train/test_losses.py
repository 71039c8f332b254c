"""Losses: values and gradients against a plain twin, bounds, and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafthead.train import losses


def plain_soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The definition, with every copy it needs."""
    return -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * 11)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_rows", [False, True])
def test_soft_cross_entropy_equals_its_plain_twin_in_value_and_gradient(with_rows: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(10, 11, generator=generator)).requires_grad_()
    teacher = 4 * torch.randn(10, 11, generator=generator)
    rows = torch.tensor([3, 3, 0, 9, 8, 1, 2, 2, 2, 5]) if with_rows else None
    weight = torch.rand(10, generator=generator)

    value = losses.soft_cross_entropy(logits, teacher, rows)
    (gradient,) = torch.autograd.grad((weight * value).sum(), logits)
    plain = plain_soft_cross_entropy(logits, teacher if rows is None else teacher[rows])
    (plain_gradient,) = torch.autograd.grad((weight * plain).sum(), logits)

    torch.testing.assert_close(value, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-6, atol=1e-6)


def test_soft_cross_entropy_gradient_passes_gradcheck_level_precision_in_bf16() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator).bfloat16().requires_grad_()
    teacher = torch.randn(6, 50, generator=generator).bfloat16()
    losses.soft_cross_entropy(logits, teacher).sum().backward()
    plain = logits.detach().float().requires_grad_()
    plain_soft_cross_entropy(plain, teacher.float()).sum().backward()
    assert logits.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(logits.grad.float(), plain.grad, rtol=2**-7, atol=2**-9)


def test_soft_cross_entropy_of_no_rows_is_empty_and_still_connected() -> None:
    logits = torch.empty(0, 7, requires_grad=True)
    losses.soft_cross_entropy(logits, torch.empty(0, 7)).sum().backward()
    assert logits.grad is not None


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
        losses.soft_cross_entropy(torch.zeros(2, 5), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"rows \(3,\)"):
        losses.overlap(torch.zeros(2, 5), torch.zeros(4, 5), torch.tensor([0, 1, 2]))


def test_depth_weights() -> None:
    assert losses.depth_weights(3, 0.5) == (1.0, 0.5, 0.25)
    with pytest.raises(ValueError, match="decay"):
        losses.depth_weights(3, 0.0)
