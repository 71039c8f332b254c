"""After every round the store equals the one of a fresh prefill, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from drafts import AlwaysWrong, HalfRight, Oracle, Random, own_greedy, prompt_of

from drafthead.inference.decoder import Decoder, Row, stop_at
from drafthead.inference.drafters import Drafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.store import StoreFullError
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain

Make = Callable[[Sequence[Sequence[int]]], Drafter]
TOKENS = 20


def held(decoder: Decoder, row: int) -> list[torch.Tensor]:
    """Keys and values of a row's committed slots, layer by layer."""
    length = decoder.store.lengths[row]
    buffers = [b for layer in decoder.store.kept for b in (layer.keys, layer.values)]
    return [b[row, :, :length] for b in buffers if b is not None]


def fresh(target: Target, ids: Sequence[int]) -> list[torch.Tensor]:
    """Keys and values that a prefill of the ids makes."""
    cache = target.model(torch.tensor([list(ids)]), use_cache=True).past_key_values
    return [b[0] for layer in cache.layers for b in (layer.keys, layer.values)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda texts: HalfRight(texts, 2),
        lambda texts: HalfRight(texts, 2, tree=True),
        lambda texts: HalfRight(texts, [0, 1, 3][: len(texts)], tree=True),
        lambda texts: Oracle(texts, tree=True),
        lambda texts: AlwaysWrong(texts, tree=True),
        lambda texts: Random(3, tree=True),
    ],
    ids=["half chain", "half tree", "ragged tree", "oracle tree", "wrong tree", "random tree"],
)
def test_f40_store_equals_a_fresh_prefill_after_every_round(
    target32: Target, make: Make, batch: int
) -> None:
    prompts = [prompt_of(n) for n in (5, 1, 12)[:batch]]
    drafter = make([own_greedy(target32, prompt, TOKENS + 1) for prompt in prompts])
    decoder = Decoder(target32, Sampler(), drafter, batch=batch, capacity=12 + TOKENS)
    rows = [Row(list(p), len(p), TOKENS, stop_at(())) for p in prompts]
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    while decoder.running:
        running = [not row.done for row in rows]
        decoder.round()
        for slot, row in enumerate(rows):
            if not running[slot]:
                continue
            assert decoder.store.lengths[slot] == len(row.ids) - 1, "all but the root"
            pairs = zip(held(decoder, slot), fresh(target32, row.ids[:-1]), strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_f40_a_cleared_row_holds_nothing_of_the_sequence_before(target32: Target) -> None:
    decoder = Decoder(target32, Sampler(), batch=2, capacity=40)
    for slot, length in enumerate((30, 9)):
        decoder.start(slot, Row(prompt_of(length), length, 4, stop_at(())))
    decoder.round()
    again = Row(prompt_of(4), 4, 6, stop_at(()))
    decoder.start(0, again)
    while decoder.running:
        decoder.round()
    assert again.ids == own_greedy(target32, prompt_of(4), 6)
    for ours, theirs in zip(held(decoder, 0), fresh(target32, again.ids[:-1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_commit_keeps_the_accepted_branch_in_order(target32: Target) -> None:
    """Literal: root and nodes [x, a, y, b], path a then b: slots 0, 2, 4 are kept, at the front."""
    store = target32.open(1, 16)
    target32.prefill(store, 0, prompt_of(3))
    tree = Tree([10, 11, 12, 13], [-1, -1, 1, 1])
    target32.verify(store, [9], [tree])
    keys = store.kept[0].keys
    assert keys is not None
    before = keys[0, :, 3:8].clone()
    store.commit([[0, 2, 4]])
    assert store.lengths == [6]
    assert torch.equal(keys[0, :, 3:6], before[:, [0, 2, 4]])


def test_a_forward_beyond_the_capacity_is_refused_before_it_runs(target32: Target) -> None:
    store = target32.open(2, 8)
    with pytest.raises(StoreFullError, match="8 slots but 9 are needed: shorten the prompt"):
        target32.prefill(store, 0, prompt_of(9))
    target32.prefill(store, 0, prompt_of(6))
    target32.prefill(store, 1, prompt_of(2))
    target32.verify(store, [1, 1], [chain([2]), chain([3])])
    store.commit([[0], [0]])
    with pytest.raises(StoreFullError, match="8 slots but 9 are needed"):
        target32.verify(store, [1, 1], [chain([2]), chain([3])])
    assert store.lengths == [7, 3]
