"""Noise depends on its four coordinates and nothing else, and has the right law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from chi_square import p_value

from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.verify import choose

LAW = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)


def test_same_coordinates_same_row() -> None:
    first, second = Noise(7, 2, 50), Noise(7, 2, 50)
    assert torch.equal(first.gumbel(11), second.gumbel(11))
    assert torch.equal(first.gumbel(11, Purpose.DRAFT), second.gumbel(11, Purpose.DRAFT))
    assert first.uniform(11) == second.uniform(11)


def test_each_coordinate_matters() -> None:
    rows = [
        Noise(7, 2, 50).gumbel(11),
        Noise(8, 2, 50).gumbel(11),
        Noise(7, 3, 50).gumbel(11),
        Noise(2, 7, 50).gumbel(11),
        Noise(7, 2, 50).gumbel(12),
        *(Noise(7, 2, 50).gumbel(11, purpose) for purpose in list(Purpose)[1:]),
    ]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            assert not (a == b).any(), "not one token of two rows is equal"


def test_neighbouring_rows_are_not_the_same_numbers_shifted() -> None:
    """Positions must not overlap, as they would if the counter counted numbers, not rows."""
    noise = Noise(0, 0, 4096)
    here, there = noise.gumbel(5), noise.gumbel(6)
    assert len(np.intersect1d(here.numpy(), there.numpy())) < 10


def test_order_of_asking_and_forgetting_do_not_matter() -> None:
    forward, backward = Noise(3, 1, 20), Noise(3, 1, 20)
    ahead = [forward.gumbel(position).clone() for position in range(9)]
    back = [backward.gumbel(position).clone() for position in reversed(range(9))]
    assert all(torch.equal(a, b) for a, b in zip(ahead, reversed(back), strict=True))
    forward.uniform(4)
    forward.forget(100)
    assert torch.equal(forward.gumbel(3), ahead[3])


def test_forget_drops_what_is_decided_and_what_looked_ahead() -> None:
    noise = Noise(3, 1, 20)
    for position in range(5):
        noise.gumbel(position)
        noise.gumbel(position, Purpose.DRAFT)
    noise.forget(3)
    assert set(noise._rows) == {(3, Purpose.COUPLED), (4, Purpose.COUPLED)}


@pytest.mark.parametrize("rounds", [(0, 3), (3, 4)])
def test_streams_that_look_ahead_are_fresh_in_every_round(rounds: tuple[int, int]) -> None:
    """And depend on nothing else: two rows that decided as much draw the same."""
    first, second = Noise(3, 1, 20), Noise(3, 1, 20)
    seen = []
    for decided in rounds:
        first.forget(decided)
        seen.append((first.gumbel(7, Purpose.DRAFT), first.uniform(7), first.gumbel(7)))
    assert not (seen[0][0] == seen[1][0]).any()
    assert seen[0][1] != seen[1][1]
    assert torch.equal(seen[0][2], seen[1][2]), "what decides a text does not depend on its rounds"
    second.forget(rounds[1])
    assert torch.equal(second.gumbel(7, Purpose.DRAFT), seen[1][0])
    assert second.uniform(7) == seen[1][1]
    assert first.uniform(9, Purpose.RECOVER) == Noise(3, 1, 20).uniform(9, Purpose.RECOVER)


def test_a_larger_vocabulary_begins_with_the_same_numbers() -> None:
    """So that a padded vocabulary draws as the unpadded one does."""
    assert torch.equal(Noise(3, 1, 512).gumbel(9), Noise(3, 1, 544).gumbel(9)[:512])


def test_negative_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="seed -1 and stream 0 must not be negative"):
        Noise(-1, 0, 8)
    with pytest.raises(ValueError, match="seed 0 and stream -2"):
        Noise(0, -2, 8)


def test_noise_has_the_mean_and_variance_of_a_gumbel() -> None:
    noise = Noise(1, 0, 20_000)
    rows = torch.stack([noise.gumbel(position) for position in range(20)]).double()
    euler = 0.5772156649
    spread = math.pi / math.sqrt(6)
    assert abs(rows.mean() - euler) < 5 * spread / math.sqrt(rows.numel())
    assert abs(rows.var() - spread**2) < 0.02
    # The tail: P(g > 9) = 1 - exp(-exp(-9)) is 1.234e-4, so 49 in 400,000.
    assert 20 < int((rows > 9).sum()) < 85


@pytest.mark.parametrize("purpose", [Purpose.COUPLED, Purpose.DRAFT])
def test_argmax_of_law_and_noise_is_a_draw_from_the_law(purpose: Purpose) -> None:
    """Over positions of one stream, then over streams at one position."""
    runs = 4000
    one = Noise(2, 0, 5)
    draws = [choose(LAW.log(), one.gumbel(position, purpose)) for position in range(runs)]
    many = [choose(LAW.log(), Noise(2, s, 5).gumbel(9, purpose)) for s in range(runs)]
    for drawn in (draws, many):
        counts = torch.bincount(torch.tensor(drawn), minlength=5)
        assert p_value(counts, LAW * runs) > 1e-3
    wrong = torch.tensor([0.45, 0.30, 0.15, 0.07, 0.03])
    assert p_value(counts, wrong * runs) < 1e-3, "the test can tell a wrong law"


def test_successive_positions_are_independent() -> None:
    """Joint law of two positions of one stream: marginals alone would miss reused numbers."""
    pairs = [[choose(LAW.log(), Noise(4, s, 5).gumbel(p)) for p in (6, 7)] for s in range(6000)]
    first, second = torch.tensor(pairs).T
    counts = torch.bincount(5 * first + second, minlength=25)
    assert p_value(counts, 6000 * torch.outer(LAW, LAW).flatten()) > 1e-3


@pytest.mark.parametrize("lowest", [0.0, 2.0**-54, 1 - 2.0**-53])
def test_the_ends_of_the_uniform_give_finite_noise(
    lowest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise(0, 0, 3)
    monkeypatch.setattr(noise, "_uniform", lambda *args: np.full(3, lowest))
    row = noise.gumbel(0)
    assert row.isfinite().all()
    assert row[0] == pytest.approx(-3.604, abs=1e-3) if lowest > 0.5 else row[0] > 37


@pytest.mark.parametrize("purpose", [Purpose.ACCEPT, Purpose.RECOVER])
@pytest.mark.parametrize("index", [0, 2])
def test_numbers_are_uniform_below_one(purpose: Purpose, index: int) -> None:
    noise = Noise(6, 0, 4)
    found = [noise.uniform(p, purpose, index) for p in range(5000)]
    numbers = torch.tensor(found, dtype=torch.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert p_value(counts, torch.full((10,), 500.0)) > 1e-3
    # 53 bits: a coarser generator would repeat itself.
    assert len(numbers.unique()) == 5000


def test_every_number_of_a_round_is_another() -> None:
    """By purpose, position and sibling; the accept number of one is not the recovery of another."""
    noise = Noise(6, 0, 4)
    numbers = [
        noise.uniform(position, purpose, index)
        for position in range(20)
        for purpose in (Purpose.ACCEPT, Purpose.RECOVER)
        for index in range(10)
    ]
    assert len(set(numbers)) == len(numbers)


def test_numbers_of_siblings_are_independent() -> None:
    pairs = torch.tensor(
        [[Noise(8, s, 4).uniform(3, index=i) for i in (0, 1)] for s in range(4000)]
    )
    cells = (pairs * 5).long()
    counts = torch.bincount(5 * cells[:, 0] + cells[:, 1], minlength=25)
    assert p_value(counts, torch.full((25,), 160.0)) > 1e-3
