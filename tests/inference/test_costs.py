"""What a draft may cost: the curve of measured seconds, and decisions that follow from it."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import tiny_head, tiny_target
from transformers import GPT2Config, GPT2LMHeadModel

from drafthead.heads.base import DraftHead
from drafthead.inference.costs import Costs, Growth, measure, worth_growing, worth_verifying
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target

CURVE = Costs(tokens=(1, 2, 5, 9), seconds=(1.0, 1.1, 1.4, 3.0), extend=0.2, step=0.1)
BEND = Costs((1, 3, 5, 7, 9, 13), (1.0, 1.05, 1.2, 1.5, 2.0, 4.0), extend=0.2, step=0.1)
FREE = Costs(tokens=(1,), seconds=(1.0,), extend=0.0, step=0.0)


def falling(seed: int, count: int = 12) -> list[float]:
    """Values as candidates have them: in (0, 1), falling."""
    rng = random.Random(seed)
    return sorted((rng.random() ** 2 for _ in range(count)), reverse=True)


def test_the_curve_is_straight_between_measured_points_and_goes_on_past_them() -> None:
    seconds = [CURVE.verify(n) for n in (0, 1, 2, 3, 5, 7, 9, 10)]
    assert seconds == pytest.approx([1.0, 1.0, 1.1, 1.2, 1.4, 2.2, 3.0, 3.4])


@pytest.mark.parametrize("seed", range(20))
def test_the_number_verified_gives_the_best_rate_of_all(seed: int) -> None:
    values, spent = falling(seed), 0.3 * seed

    def rate(count: int) -> float:
        return (1 + sum(values[:count])) / (spent + BEND.verify(count + 1))

    assert worth_verifying(values, 1, spent, BEND) == max(range(len(values) + 1), key=rate)


def test_where_verifying_is_free_all_candidates_with_a_chance_are_verified() -> None:
    assert worth_verifying([0.5, 0.1, 1e-6], 1, 0.0, FREE) == 3
    assert worth_verifying([0.5, 0.1, 0.0], 1, 0.0, FREE) == 2
    assert worth_verifying([], 1, 0.0, FREE) == 0


def test_nothing_is_verified_where_a_token_costs_a_whole_round() -> None:
    steep = Costs(tokens=(1, 2), seconds=(1.0, 2.0), extend=0.0, step=0.0)
    assert worth_verifying([0.9, 0.8], 1, 0.0, steep) == 0


@pytest.mark.parametrize("seed", range(20))
def test_dearer_steps_never_make_deeper_trees(seed: int) -> None:
    """Levels caught ever less; the depth reached, by the price of a step."""
    rng = random.Random(seed)
    caught = [rng.uniform(0.3, 0.95) for _ in range(8)]

    def depth(step: float) -> int:
        mass, values, level = 1.0, [], 0
        for level, share in enumerate(caught, start=1):
            mass *= share
            values.append(mass)
            spent = 0.2 + (level - 1) * step
            count = worth_verifying(values, 1, spent, CURVE)
            tokens, seconds = 1 + sum(values[:count]), spent + CURVE.verify(count + 1)
            if not worth_growing(mass * share, tokens, seconds, step):
                return level
        return level

    depths = [depth(step) for step in (0.0, 0.01, 0.05, 0.1, 0.3, 1.0, 10.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == len(caught), "free steps go to the end"
    assert depths[-1] == 1


def test_another_level_is_guessed_to_catch_the_share_that_the_last_one_caught() -> None:
    """Literal: 0.9 of 1 caught, so 0.9 · 0.9 more to come; then 0.6 of 0.9, so 0.6 · 2 / 3."""
    found = [torch.tensor([[0.6, 0.3, 0.0]]).log(), torch.tensor([[0.5, 0.1, 0.0]]).log()]
    for count, gain, tokens in ((1, 0.81, 1.9), (2, 0.4, 2.5)):
        # A round of a second and what was drafted; the step may cost as much as it is worth.
        worth = gain / (tokens - gain * (count - 1))
        for step, on in ((0.99 * worth, True), (1.01 * worth, False)):
            costs = Costs(tokens=(1,), seconds=(1.0,), extend=0.0, step=step)
            assert Growth(2, 14, 1, costs).goes_on(found[:count]) == on


def test_steps_of_other_widths_lie_between_those_that_were_timed() -> None:
    costs = Costs((1,), (1.0,), 0.0, step=0.5, widths=(1, 3), steps=(0.1, 0.3))
    assert [costs.going_on(w) for w in (1, 2, 4)] == pytest.approx([0.1, 0.2, 0.4])
    assert CURVE.going_on(7) == CURVE.step
    assert costs.drafting(2) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="give ascending widths"):
        Costs((1,), (1.0,), 0.0, 0.5, widths=(3, 1), steps=(0.1, 0.2))


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1,), (0.0,))],
)
def test_impossible_costs_are_refused(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="give ascending tokens and positive seconds"):
        Costs(tokens, seconds, 0.0, 0.0)


@pytest.mark.parametrize("batch", [1, 3])
def test_costs_are_measured_of_heads_and_siblings(target32: Target, batch: int) -> None:
    head = tiny_head(target32.model)  # type: ignore[arg-type]
    heads: list[DraftHead] = [head, Sibling.of(target32.model, None, target32, check=False)]
    for each in heads:
        costs = measure(target32, each, width=3, batch=batch, context=20, most=8, repeats=1)
        assert costs.tokens == (1, 2, 3, 5, 9)
        assert costs.extend > 0
        assert costs.step > 0
        assert costs.widths == ()
    several = measure(target32, head, widths=(1, 2, 4), batch=batch, context=20, most=2, repeats=1)
    assert several.widths == (1, 2, 4)
    assert 0 < several.steps[0] <= several.steps[2]


def test_measuring_stays_within_the_positions_of_both(target32: Target) -> None:
    """Learned positions end at 80: one more would be an index error."""
    config = GPT2Config(vocab_size=512, n_positions=80, n_embd=32, n_layer=1, n_head=2)
    short = Target(GPT2LMHeadModel(config))
    small = Sibling.of(GPT2LMHeadModel(config), None, target32, check=False)
    for head in (tiny_head(target32.model), small):  # type: ignore[arg-type]
        costs = measure(target32, head, batch=2, context=10_000, most=64, repeats=1)
        assert costs.tokens[-1] == 65
    large = Sibling.of(tiny_target(num_layers=1), None, short, check=False)
    for most, longest in ((77, 78), (78, 79), (200, 79)):
        assert measure(short, large, most=most, repeats=1).tokens[-1] == longest
