"""Position weights: by hand, against the derivative that they stand for, and by slot."""

from __future__ import annotations

from math import exp

import pytest
import torch

from drafthead.train import weights


def test_fixed_weights_by_depth() -> None:
    assert weights.depth_weights(3, 0.5) == (1.0, 0.5, 0.25)
    made = weights.exponential_weights(3, 4.0)
    assert made == pytest.approx((1.0, exp(-1 / 4), exp(-2 / 4)))
    with pytest.raises(ValueError, match="decay"):
        weights.depth_weights(3, 0.0)


def test_values_are_laid_out_by_the_slot_their_chain_began_at() -> None:
    slots = [torch.tensor([4, 0, 2]), torch.tensor([2, 4])]
    values = [torch.tensor([0.4, 0.0, 0.2]), torch.tensor([2.2, 2.4])]
    table = weights.by_slot(slots, values, 6, -1.0)
    expected = [[0.0, -1], [-1, -1], [0.2, 2.2], [-1, -1], [0.4, 2.4], [-1, -1]]
    torch.testing.assert_close(table, torch.tensor(expected))


def test_dpace_is_the_derivative_of_the_smooth_accepted_length() -> None:
    """Weight i is what log s_i contributes to the sum of all P_j, found by torch itself."""
    chances = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    log_s = (0.5 * chances + 0.5).log().requires_grad_()
    length = log_s.cumsum(1).exp().sum()
    (derivative,) = torch.autograd.grad(length, log_s)
    known = torch.ones(40, 5, dtype=torch.bool)
    torch.testing.assert_close(weights.dpace(chances, known), derivative / 5)


def test_dpace_of_a_sure_and_of_a_hopeless_chain() -> None:
    known = torch.ones(2, 4, dtype=torch.bool)
    made = weights.dpace(torch.tensor([[1.0] * 4, [0.0] * 4]), known)
    torch.testing.assert_close(made[0], torch.tensor([4, 3, 2, 1]) / 4)
    hopeless = [0.5 + 0.25 + 0.125 + 0.0625, 0.25 + 0.125 + 0.0625, 0.125 + 0.0625, 0.0625]
    torch.testing.assert_close(made[1], torch.tensor(hopeless) / 4)


def test_dpace_moves_weight_to_where_acceptance_is_limited() -> None:
    """As the first depth becomes sure, the later ones weigh more, and the first not less."""
    known = torch.ones(1, 3, dtype=torch.bool)
    before, after = (weights.dpace(torch.tensor([[p, 0.5, 0.5]]), known)[0] for p in (0.1, 0.9))
    assert (after > before).all()
    assert after[1] / after[0] == pytest.approx((before[1] / before[0]).item())
    blocked = weights.dpace(torch.tensor([[0.5, 0.0, 0.9]]), known)[0]
    free = weights.dpace(torch.tensor([[0.5, 1.0, 0.9]]), known)[0]
    assert blocked[2] < free[2]


def test_depths_without_a_label_are_given_text() -> None:
    """They let everything through, and the chain's length is that of its labels."""
    chances = torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    known = torch.tensor([[False, True, True], [True, True, False]])
    made = weights.dpace(chances, known)
    s = 0.75
    torch.testing.assert_close(made[0, 1:], torch.tensor([s + s * s, s * s]) / 3)
    torch.testing.assert_close(made[1, :2], torch.tensor([s + s * s, s * s]) / 3)
    right = torch.zeros(2, 3, dtype=torch.bool)
    assert weights.alive(right, known).tolist() == [[True, True, False], [True, False, False]]


def test_alive_is_a_cumulative_and_of_all_before() -> None:
    right = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 0]]).bool()
    made = weights.alive(right, torch.ones_like(right))
    assert made.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_weights_carry_no_gradient() -> None:
    chances = torch.rand(3, 2, requires_grad=True)
    assert not weights.dpace(chances, torch.ones(3, 2, dtype=torch.bool)).requires_grad
