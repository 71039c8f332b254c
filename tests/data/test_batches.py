"""Micro-batches: which rows, in which order, as which tensors."""

from __future__ import annotations

import random

from drafthead.data.batches import collate, epoch_order, plan
from drafthead.data.chat import Row


def test_a_plan_uses_every_row_once_within_the_budget_and_with_little_padding() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(8, 40) for _ in range(200)]
    batches = plan(lengths, 200, seed=3)
    assert sorted(row for batch in batches for row in batch) == list(range(200))
    sizes = [len(batch) * max(lengths[row] for row in batch) for batch in batches]
    assert max(sizes) <= 200
    assert sum(lengths) / sum(sizes) > 0.9
    assert plan(lengths, 200, seed=3) == batches
    assert plan(lengths, 200, seed=4) != batches
    assert plan([500, 3], 200, seed=0) == [(0,), (1,)]


def test_epoch_orders_are_permutations_that_depend_on_seed_and_epoch_only() -> None:
    first = epoch_order(30, seed=1, epoch=0)
    assert sorted(first) == list(range(30))
    assert first == epoch_order(30, seed=1, epoch=0)
    assert len({tuple(epoch_order(30, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_collate_pads_on_the_right() -> None:
    rows = [Row("a", [5, 6, 7], [False, True, True]), Row("b", [8], [True])]
    ids, mask, real = collate(rows)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[False, True, True], [True, False, False]]
    assert real.tolist() == [[True, True, True], [True, False, False]]
