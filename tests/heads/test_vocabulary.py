"""The reduced draft vocabulary: how it is filled, its maps both ways, what is refused."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.heads.vocabulary import (
    check_maps,
    count_tokens,
    draft_vocabulary,
    ids_of,
    maps_of,
)


def test_counts() -> None:
    counts = count_tokens([[1, 1, 3], [], [3, 3]], 5)
    assert counts.tolist() == [0, 2, 0, 3, 0]


def test_f59_ids_of_another_tokenizer_are_refused() -> None:
    for row in ([5], [-1]):
        with pytest.raises(ValueError, match="another tokenizer"):
            count_tokens([row], 5)


def test_most_frequent_first_ties_by_id() -> None:
    counts = torch.tensor([0, 5, 1, 1, 1, 9])
    assert draft_vocabulary(counts, 3, ()).tolist() == [1, 2, 5]
    assert draft_vocabulary(counts, 3, (4,)).tolist() == [1, 4, 5]


def test_f35_more_asked_than_seen_is_filled_in_fixed_order() -> None:
    rows = [[i % 60 + 100 for i in range(500)]]
    ids = draft_vocabulary(count_tokens(rows, 512), 128, (0, 2, 511))
    assert len(set(ids.tolist())) == 128
    assert {0, 2, 511} <= set(ids.tolist())
    assert set(range(100, 160)) <= set(ids.tolist())
    assert ids.tolist() == sorted(ids.tolist())
    d2t, t2d = maps_of(ids, 512)
    assert (torch.arange(128) + d2t).equal(ids)
    assert t2d.nonzero()[:, 0].equal(ids)


@pytest.mark.parametrize("size", [0, -1, 513])
def test_f35_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size: .* 1\.\.512"):
        draft_vocabulary(torch.ones(512), size, ())


def test_stop_ids_must_fit() -> None:
    with pytest.raises(ValueError, match="cannot hold the 3"):
        draft_vocabulary(torch.ones(8), 2, (1, 2, 3))
    with pytest.raises(ValueError, match="do not fit"):
        draft_vocabulary(torch.ones(8), 4, (8,))


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1))
def test_maps_go_both_ways(chosen: set[int]) -> None:
    ids = torch.tensor(sorted(chosen))
    d2t, t2d = maps_of(ids, 64)
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert ids_of(d2t).equal(ids)
    check_maps(d2t, t2d)


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [0, 8], [-1, 3], []])
def test_f59_bad_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="draft vocabulary"):
        maps_of(torch.tensor(ids, dtype=torch.int64), 8)


def test_f75_zeroed_map_is_flagged(caplog: pytest.LogCaptureFixture) -> None:
    d2t, t2d = maps_of(torch.tensor([1, 4, 5]), 8)
    with pytest.raises(ValueError, match="the map was lost"):
        check_maps(torch.zeros_like(d2t), t2d)
    with pytest.raises(ValueError, match="the map was lost"):
        check_maps(torch.zeros_like(d2t), torch.zeros_like(t2d))
    with caplog.at_level(logging.WARNING):
        check_maps(*maps_of(torch.tensor([0, 1, 2]), 8))
    assert "first 3 of 8" in caplog.text


def test_disagreeing_maps_are_refused() -> None:
    d2t, t2d = maps_of(torch.tensor([1, 4, 5]), 8)
    with pytest.raises(ValueError, match="disagree"):
        check_maps(d2t, t2d.roll(1))
