"""Teacher features: batching, sources that agree, forecasts, and states that are not finite."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_runs import LAYERS, three_layers
from torch import Tensor

from drafthead.data.batches import plan
from drafthead.data.chat import Row
from drafthead.heads.base import TeacherBatch
from drafthead.inference.target import Target
from drafthead.train.teacher import (
    FeatureError,
    FeatureMemory,
    OnlineFeatures,
    blank,
    choose_features,
    forecast,
    supervised,
)


def make_rows(count: int, seed: int = 0, longest: int = 40) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        length = rng.randint(8, longest)
        ids = [rng.randrange(3, 500) for _ in range(length)]
        start = rng.randint(3, length - 2)
        rows.append(Row(f"row-{index}", ids, [t >= start for t in range(length)]))
    return rows


def make_source(rows: list[Row], tokens: int = 90, target: Target | None = None) -> OnlineFeatures:
    batches = plan([len(row.ids) for row in rows], tokens, seed=0)
    return OnlineFeatures(target or Target(three_layers()), rows, batches, LAYERS)


def tensors(batch: TeacherBatch) -> list[Tensor]:
    return [batch.ids, batch.mask, batch.features, batch.last_hidden, batch.top]


def test_batches_hold_the_targets_own_states_and_choices() -> None:
    rows = make_rows(7)
    source = make_source(rows)
    model = source.target.model
    for index, members in enumerate(source.batches):
        batch = source.batch(index)
        needed = supervised(batch.mask)
        for place, row in enumerate(members):
            ids = torch.tensor([rows[row].ids])
            with torch.no_grad():
                out = model(ids, output_hidden_states=True)
            T = ids.shape[1]
            want = torch.cat([out.hidden_states[layer] for layer in LAYERS[:-1]], dim=-1)[0]
            got = batch.features[place, :T, : want.shape[-1]].float()
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
            at = needed[place, :T]
            assert at.sum() == sum(rows[row].mask[1:])
            torch.testing.assert_close(batch.top[place, :T][at], out.logits[0].argmax(-1)[at])
            assert not needed[place, T:].any()


def test_memory_and_online_give_the_same_bits_and_the_forecast_is_exact() -> None:
    rows = make_rows(12)
    online, memory = make_source(rows), FeatureMemory(make_source(rows))
    for _epoch in range(2):
        for index in range(len(online.batches)):
            for left, right in zip(
                tensors(online.batch(index)), tensors(memory.batch(index)), strict=True
            ):
                assert torch.equal(left, right)
    lengths = [len(row.ids) for row in rows]
    assert memory.bytes == forecast(lengths, online.batches, len(LAYERS), 64)


def test_the_budget_decides_and_a_memory_that_does_not_fit_is_refused() -> None:
    source = make_source(make_rows(5))
    size = forecast([len(row.ids) for row in source.rows], source.batches, len(LAYERS), 64)
    assert isinstance(choose_features(source, "auto", size), FeatureMemory)
    assert choose_features(source, "auto", size - 1) is source
    assert choose_features(source, "online", size) is source
    with pytest.raises(ValueError, match=r"training\.features: memory needs"):
        choose_features(source, "memory", size - 1)


def target_with_poison(token: int, value: float) -> Target:
    """A target whose embedding of one token is not usable."""
    model = three_layers()
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value  # type: ignore[operator, union-attr]
    return Target(model)


@pytest.mark.parametrize("bad", [1, 15])
def test_rows_with_states_that_are_not_finite_are_dropped_and_too_many_stop_the_run(
    bad: int,
) -> None:
    """F18: NaN in one row of twenty costs that row; in fifteen, the run."""
    rows = make_rows(20)
    rows = [
        Row(row.id, [501, *row.ids[1:]], row.mask) if index < bad else row
        for index, row in enumerate(rows)
    ]
    source = make_source(rows, target=target_with_poison(501, float("nan")))
    if bad == 15:
        with pytest.raises(FeatureError, match=r"target\.dtype: .*float32.* of 20 rows"):
            [source.batch(index) for index in range(len(source.batches))]
        return
    batches = [source.batch(index) for index in range(len(source.batches))]
    assert list(source.dropped) == ["row-0"]
    assert all(batch.features.isfinite().all() for batch in batches)
    assert all(batch.last_hidden.isfinite().all() for batch in batches)
    assert sum(int(batch.mask.any(dim=1).sum()) for batch in batches) == 19
    [source.batch(index) for index in range(len(source.batches))]
    assert len(source.dropped) == 1  # a second epoch does not count it again


def test_a_blank_batch_supervises_nothing() -> None:
    assert not blank(make_source(make_rows(3)).batch(0)).mask.any()
