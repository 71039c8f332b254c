"""Acceptance has one definition, and its figures agree with each other."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from drafthead.inference.metrics import (
    Round,
    acceptance,
    bootstrap,
    conditional,
    survival,
    walk_rounds,
)
from drafthead.inference.tree import Tree, chain
from drafthead.inference.verify import walk


def scripted(matches: list[int]) -> Round:
    """A round whose chain agrees with the target where `matches` is 1, by the rule itself."""
    tree = chain(range(10, 10 + len(matches)), source="scripted")
    wanted = [t if m else 99 for t, m in zip(tree.tokens, matches, strict=True)] + [98]
    path, _ = walk(tree.tokens, tree.parents, lambda path: wanted[len(path)])
    return Round.of(tree, len(path), len(path) + 1)


def test_f61_figures_of_scripted_rounds() -> None:
    """Only tokens before the first refusal count: [1, 0, 1, 0] accepts one."""
    rounds = [scripted(m) for m in ([1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])]
    assert [r.accepted for r in rounds] == [1, 4, 0]
    figures = acceptance([rounds])
    assert (figures.rounds, figures.drafted, figures.accepted, figures.emitted) == (3, 12, 5, 8)
    assert figures.accepted_share == pytest.approx(0.4167, abs=1e-4)
    assert figures.tau == pytest.approx(2.667, abs=1e-3)
    assert figures.tau - 1 == pytest.approx(1.667, abs=1e-3)
    assert figures.survival == pytest.approx((2 / 3, 1 / 3, 1 / 3, 1 / 3))
    assert figures.conditional == pytest.approx((2 / 3, 1 / 2, 1, 1))
    assert figures.cut == 0


def test_f61_oracle_is_one_and_always_wrong_is_zero() -> None:
    right, wrong = acceptance([[scripted([1] * 4)] * 3]), acceptance([[scripted([0] * 4)] * 3])
    assert (right.accepted_share, right.tau, right.survival) == (1, 5, (1, 1, 1, 1))
    assert (wrong.accepted_share, wrong.tau, wrong.survival) == (0, 1, ())
    assert wrong.conditional == ()


def some_rounds(seed: int) -> list[list[Round]]:
    """Prompts with random rounds, some cut, some without a draft."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(rng.randint(1, 6)):
        rounds = []
        for _ in range(rng.randint(1, 9)):
            drafted = rng.randint(0, 7)
            accepted = rng.randint(0, drafted)
            rounds.append(Round(drafted, accepted, rng.randint(1, accepted + 1)))
        prompts.append(rounds)
    return prompts


@pytest.mark.parametrize("seed", range(10))
def test_f62_the_product_of_conditionals_is_the_survival(seed: int) -> None:
    figures = acceptance(some_rounds(seed))
    products = tuple(itertools.accumulate(figures.conditional, lambda a, b: a * b))
    assert products == pytest.approx(figures.survival, abs=1e-9)
    assert all(a >= b for a, b in itertools.pairwise((1.0, *figures.survival)))


@pytest.mark.parametrize("seed", range(10))
def test_tau_is_one_plus_the_survivals_less_what_was_cut(seed: int) -> None:
    prompts = some_rounds(seed)
    figures = acceptance(prompts)
    assert figures.tau == pytest.approx(1 + sum(figures.survival) - figures.cut, abs=1e-12)
    rounds = [r for p in prompts for r in p]
    assert figures.cut * len(rounds) == pytest.approx(
        sum(r.accepted + 1 - r.emitted for r in rounds)
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_interval_contains_tau_and_is_the_same_twice(seed: int) -> None:
    prompts = some_rounds(seed)
    figures = acceptance(prompts)
    assert acceptance(prompts) == figures
    if len(prompts) == 1:
        assert figures.tau_interval is None, "one prompt says nothing of others"
        return
    low, high = figures.tau_interval or (9.0, 0.0)
    assert low <= figures.tau + 1e-12
    assert high >= figures.tau - 1e-12


def test_the_interval_is_over_prompts_not_rounds() -> None:
    """Rounds of one prompt are alike; two prompts that differ leave the mean uncertain."""
    rounds = np.array([100.0, 100.0])
    assert bootstrap(np.array([100.0, 500.0]), rounds) == [(1, 5)]
    assert bootstrap(np.array([300.0, 300.0]), rounds) == [(3, 3)]


def test_the_interval_of_a_speed_up_resamples_both_sides_together() -> None:
    """A prompt that is slow on both sides says nothing; sides apart would."""
    tokens, seconds = np.array([50.0, 50.0, 50.0]), np.array([1.0, 10.0, 100.0])
    assert bootstrap(tokens, seconds, tokens, 2 * seconds) == [(2, 2)]
    [apart] = bootstrap(tokens, seconds)
    assert apart is not None
    assert apart[1] > 10 * apart[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_covers_what_a_plain_loop_of_resamples_covers(seed: int) -> None:
    """Two columns of ratios of ratios, against one resample at a time by random.choices."""
    rng, drawn = np.random.default_rng(seed), random.Random(seed)
    a, c = rng.uniform(1, 5, (2, 12, 2))
    b, d = rng.uniform(1, 5, (2, 12, 1))
    found = bootstrap(a, b, c, d, resamples=4000, seed=seed)
    ratios = []
    for _ in range(4000):
        picks = drawn.choices(range(12), k=12)
        ratios.append(a[picks].sum(0) / b[picks].sum(0) / (c[picks].sum(0) / d[picks].sum(0)))
    for column, interval in zip(np.array(ratios).T, found, strict=True):
        assert interval == pytest.approx(tuple(np.quantile(column, [0.025, 0.975])), rel=0.06)


def test_a_resample_with_nothing_below_the_line_is_left_out() -> None:
    """Two of the prompts got so deep; where neither is picked there is no rate. One is no rate of
    others, whatever is picked.
    """
    reached, above = np.array([[2.0, 2], [1, 0], [0, 0]]), np.array([[4.0, 4], [2, 0], [0, 0]])
    assert bootstrap(reached, above) == [(0.5, 0.5), None]


def test_a_prompt_without_rounds_counts_for_nothing() -> None:
    rounds = [Round(4, 2, 3), Round(4, 0, 1)]
    assert acceptance([rounds, []]) == acceptance([rounds])


def test_no_round_at_all_is_an_error_that_says_why() -> None:
    for prompts in ([], [[]], [[], []]):
        with pytest.raises(ValueError, match="no round was decoded: ask for at least 2 new tokens"):
            acceptance(prompts)


def test_figures_of_no_accepted_token() -> None:
    assert survival([0, 0], 2) == ()
    assert survival([], 3) == ()
    assert conditional(()) == ()
    figures = acceptance([[Round(0, 0, 1)] * 2])
    assert (figures.tau, figures.drafted, figures.accepted_share) == (1, 0, 0)


def test_a_round_names_its_source_only_if_something_was_drafted() -> None:
    assert Round.of(chain([4, 5], source="head"), 1, 2) == Round(2, 1, 2, "head", 2)
    assert Round.of(Tree(source="head"), 0, 1).source == ""


@pytest.mark.parametrize(
    ("matches", "start", "tokens", "accepted"),
    [
        ([[0, 0]] * 4, 0, 4, [0, 0, 0, 0]),
        ([[1, 1]] * 6, 0, 6, [2, 2]),
        ([[1, 1]] * 6, 0, 5, [2, 1]),
        ([[1, 1]] * 6, 1, 4, [2, 0]),
        ([[1, 0], [1, 1], [0, 1], [0, 0]], 0, 4, [1, 0, 0]),
        ([[0, 1], [1, 1], [1, 1], [1, 1]], 0, 4, [0, 2]),
        ([[1, 1]], 0, 0, []),
    ],
)
def test_walked_rounds_golden(
    matches: list[list[int]], start: int, tokens: int, accepted: list[int]
) -> None:
    """Rounds start after what the last one emitted; the last is cut where the text ends."""
    assert walk_rounds(np.array(matches, dtype=bool), start, tokens) == accepted
    assert sum(accepted) + len(accepted) == tokens
