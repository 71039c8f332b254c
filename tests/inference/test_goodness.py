"""The chi-square test of certificates: its size, its power, and the shift that it says it sees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drafthead.inference.goodness import critical, least_shift, p_value, power


def drawn(law: Tensor, draws: int, times: int, seed: int) -> Tensor:
    """(times, C) counts."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.multinomial(law, draws * times, replacement=True, generator=generator)
    ones = torch.ones(times, draws, dtype=torch.float64)
    counts = torch.zeros(times, len(law), dtype=torch.float64)
    return counts.scatter_add_(1, cells.view(times, draws), ones)


@pytest.mark.parametrize(
    ("freedom", "alpha", "table"), [(1, 0.05, 3.841), (10, 0.05, 18.307), (26, 0.001, 54.052)]
)
def test_critical_values_are_those_of_the_tables(freedom: int, alpha: float, table: float) -> None:
    assert critical(freedom, alpha) == pytest.approx(table, abs=1e-3)


@pytest.mark.parametrize("noncentrality", [0.5, 4.0, 30.0])
def test_power_of_one_degree_of_freedom_is_that_of_a_shifted_normal(noncentrality: float) -> None:
    """P(|Z + √λ| > √c), in closed form."""
    limit, shift = math.sqrt(critical(1, 0.01)), math.sqrt(noncentrality)
    closed = sum(math.erfc((limit + s) / math.sqrt(2)) for s in (shift, -shift)) / 2
    assert power(1, 0.01, noncentrality) == pytest.approx(closed, rel=1e-9)
    assert power(7, 0.01, 0.0) == pytest.approx(0.01, rel=1e-9)


def test_p_values_of_the_law_itself_are_uniform() -> None:
    """Rare cells pooled, the pool itself rare in places: shares below 1, 10 and 50 % are those."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.02, 0.006, 0.003, 0.001], dtype=torch.float64)
    found = torch.tensor([p_value(c, 300 * law) for c in drawn(law, 300, 2000, seed=0)])
    for share in (0.01, 0.1, 0.5):
        spread = math.sqrt(share * (1 - share) / 2000)
        assert abs(float((found < share).double().mean()) - share) < 4 * spread + 0.005


def test_the_least_shift_is_seen_as_often_as_it_says() -> None:
    """Of the law that is hardest to see at that distance: every cell off by the same share."""
    law, draws, alpha = torch.full((8,), 1 / 8, dtype=torch.float64), 1000, 1e-3
    shift = least_shift(draws * law, alpha)
    assert 0.05 < shift < 0.15
    signs = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    for distance, low, high in ((shift, 0.86, 0.94), (shift / 2, 0.0, 0.3)):
        other = law * (1 + 2 * distance * signs)
        assert float((other - law).abs().sum()) / 2 == pytest.approx(distance)
        counts = drawn(other, draws, 600, seed=1)
        refused = [p_value(c, draws * law) < alpha for c in counts]
        assert low < sum(refused) / len(refused) < high


def test_a_law_of_one_text_refuses_nothing_and_says_so() -> None:
    sure = torch.tensor([100.0], dtype=torch.float64)
    assert p_value(sure, sure) == 1.0
    assert least_shift(sure, 1e-3) == 1.0
