"""Simulated and decoded tau are the same rounds, and what is more than rounding is told."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from by_heart import TOKENS, asked, learnt, plain_target, texts_of

from drafthead.heads.base import DraftHead
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.agreement import Agreement, agreement_of, compare_rounds, paired_interval
from drafthead.inference.answering import Answer, Settings, Turn, answer_turns
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.metrics import Round
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, parse_shape

CHAIN = Shape(3, 1, 3)
SETTINGS = Settings(max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def target() -> Target:
    return plain_target()


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    texts = texts_of(target, asked(target))
    return learnt(target, Eagle3Settings(draft_vocab_size=200, layers=(2, 3, 5)), (2, 3, 5), texts)


@pytest.fixture(scope="module")
def answers(target: Target, head: DraftHead) -> list[Answer]:
    """Decoded in one batch, two turns to a prompt."""
    turns = [
        Turn(ids, prompt=f"p{n // 2}", number=n % 2 + 1) for n, ids in enumerate(asked(target))
    ]
    given = answer_turns(target, HeadDrafter(head, CHAIN), turns, SETTINGS, batch=4)
    return [a for a in given if isinstance(a, Answer)]


def test_decoded_and_simulated_tau_are_one_in_fp32(
    target: Target, head: DraftHead, answers: list[Answer]
) -> None:
    found = agreement_of(head, target, answers, CHAIN)
    assert found["decoded_tau"] > 1.5, "or the head drafts nothing that could differ"
    assert found["tau"] == found["decoded_tau"]
    assert found["difference"] == 0.0
    assert found["difference_interval"] == (0.0, 0.0)
    assert found["agrees"]


def test_a_head_that_is_another_when_simulated_does_not_agree(
    target: Target, head: DraftHead, answers: list[Answer]
) -> None:
    assert isinstance(head, BorrowingHead)
    base = head.rotary_base
    head.rebase(50.0)
    found = agreement_of(head, target, answers, CHAIN)
    head.rebase(base)
    assert not found["agrees"]
    assert found["difference"] == pytest.approx(found["decoded_tau"] - found["tau"])
    assert found["difference_interval"][0] > 0


@pytest.mark.parametrize("tree", ["tree:3x2:6", "stop:3:0.5", "off"])
def test_only_plain_chains_are_simulated(
    target: Target, head: DraftHead, answers: list[Answer], tree: str
) -> None:
    with pytest.raises(ValueError, match="only chains are simulated"):
        agreement_of(head, target, answers, parse_shape(tree))


def rounds(emitted: Sequence[int]) -> list[Round]:
    return [Round(3, count - 1, count) for count in emitted]


def test_the_interval_is_that_of_all_resamples_of_prompts_in_pairs() -> None:
    """Three prompts have 27 resamples: counted one by one, weighed alike."""
    ours = [rounds([4, 1, 2]), rounds([1, 1]), rounds([3, 3, 3, 1])]
    theirs = [rounds([2, 2, 2, 1]), rounds([1, 1]), rounds([4, 4, 1, 1])]

    def tau(side: list[list[Round]], picks: tuple[int, ...]) -> float:
        chosen = [r.emitted for pick in picks for r in side[pick]]
        return sum(chosen) / len(chosen)

    each = [tau(ours, p) - tau(theirs, p) for p in itertools.product(range(3), repeat=3)]
    every = np.repeat(each, 1000)  # quantiles of a law, not of 27 draws of it
    low, high = paired_interval(ours, theirs) or (0.0, 0.0)
    assert low == pytest.approx(float(np.quantile(every, 0.025)), abs=0.02)
    assert high == pytest.approx(float(np.quantile(every, 0.975)), abs=0.02)
    assert paired_interval(ours, ours) == (0.0, 0.0)


def test_one_round_that_rounding_moved_is_no_alarm_and_a_lost_tenth_is_one() -> None:
    rng = random.Random(0)
    told = [rounds(rng.choices([1, 2, 3, 4], k=20)) for _ in range(8)]
    flipped = [prompt[:-1] + rounds([max(1, prompt[-1].emitted - 1)]) for prompt in told[:2]]
    assert compare_rounds(told, [*flipped, *told[2:]]).agrees
    worse = [prompt + rounds([1] * 4) for prompt in told]
    found = compare_rounds(told, worse)
    assert not found.agrees
    assert found.difference < -0.1
    one = compare_rounds(told[:1], [flipped[0]])
    assert one.interval is None, "one prompt says nothing of others"
    assert one.agrees, "and then rounding alone decides"
    assert not compare_rounds(told[:1], worse[:1]).agrees


def test_a_difference_within_the_interval_of_the_prompts_agrees() -> None:
    found = Agreement(8, 100, 2.0, (1.8, 2.2), 1.8, -0.2, (-0.5, 0.1))
    assert found.agrees
    assert not dataclasses.replace(found, interval=(-0.3, -0.1)).agrees
