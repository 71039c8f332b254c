"""What a draft may cost: the curve of measured seconds, and decisions that follow from it."""

from __future__ import annotations

import random

import pytest
from tiny import tiny_head, tiny_target
from transformers import GPT2Config, GPT2LMHeadModel

from drafthead.heads.base import DraftHead
from drafthead.inference.costs import (
    Costs,
    Payoff,
    measure,
    worth_growing,
    worth_verifying,
)
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


def test_drafts_that_promise_less_than_plain_are_left_out_most_of_the_time() -> None:
    payoff, drafted = Payoff(), 0
    for _ in range(90):
        if not payoff.resting():
            drafted += 1
            payoff.note(rate=0.8, plain=1.0)
    assert drafted <= 90 // (Payoff.REST + 1) + 5


def test_drafts_that_promise_more_are_never_left_out_and_come_back_when_they_do() -> None:
    payoff = Payoff()
    for _ in range(50):
        assert not payoff.resting()
        payoff.note(rate=1.3, plain=1.0)
    for _ in range(200):  # a passage where they do not
        if not payoff.resting():
            payoff.note(rate=0.5, plain=1.0)
    for _ in range(200):
        if not payoff.resting():
            payoff.note(rate=1.3, plain=1.0)
    assert not any(payoff.resting() for _ in range(3))
