"""After every round the store equals the one of a fresh prefill, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from drafts import AlwaysWrong, HalfRight, Oracle, Random, endless, ids_of, own_greedy, prompt_of
from transformers import LlamaForCausalLM

from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import NotFiniteError, Sampler
from drafthead.inference.store import StoreFullError
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain

Make = Callable[[Sequence[Sequence[int]]], Drafter]
TOKENS = 20


def held(decoder: Decoder, row: int) -> list[torch.Tensor]:
    """Keys and values of a row's committed slots, layer by layer."""
    length = decoder.store.lengths[row]
    buffers = [buffer for layer in decoder.store.kept for buffer in layer.buffers]
    return [buffer[row, :, :length] for buffer in buffers]


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
    rows = [Row(list(p), TOKENS, stop_at(())) for p in prompts]
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
        decoder.start(slot, Row(prompt_of(length), 4, stop_at(())))
    decoder.round()
    again = Row(prompt_of(4), 6, stop_at(()))
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


def test_slots_of_several_forwards_are_kept_until_the_commit(target32: Target) -> None:
    """Literal: rows of 5 and 2, forwards of 1 and 2 tokens; the second's last one is kept."""
    store = target32.open(2, 16)
    for row, length in enumerate((5, 2)):
        target32.prefill(store, row, prompt_of(length))
    store.rows = slice(0, 2)
    for count in (1, 2):
        offsets = torch.tensor(store.offsets)
        seen = torch.arange(max(store.offsets) + count) < (offsets + count)[:, None]
        seen = seen[:, None].expand(2, count, -1)
        positions = offsets[:, None] + torch.arange(count)
        target32.run(store, torch.full((2, count), 9 + count), positions, seen)
        store.drafted += count
    assert store.offsets == [8, 5]
    keys = store.kept[2].buffers[0]
    drafted = keys[0, :, 5:8].clone(), keys[1, :, 2:5].clone()
    assert all(slot.abs().sum() > 0 for one in drafted for slot in one.unbind(1))
    store.commit([[0, 2], [0, 1]])
    assert (store.lengths, store.offsets) == ([7, 4], [7, 4])
    assert torch.equal(keys[0, :, 5:7], drafted[0][:, [0, 2]])
    assert torch.equal(keys[1, :, 2:4], drafted[1][:, :2])


# Drafts that are not finite

BAD = 77
"""A token that no text below has."""


def broken(where: str, attention: str) -> LlamaForCausalLM:
    """A target that token 77 makes overflow: all of its states, or only its keys in one layer."""
    model = endless(num_layers=3).double()
    model.set_attn_implementation(attention)
    if where == "states":
        with torch.no_grad():
            model.model.embed_tokens.weight[BAD] = float("nan")
        return model
    now: list[torch.Tensor] = []

    def overflow(_module: object, _inputs: object, keys: torch.Tensor) -> torch.Tensor:
        return keys.masked_fill((now[-1] == BAD)[..., None], float("inf"))

    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: now.append(args[0]))
    model.model.layers[1].self_attn.k_proj.register_forward_hook(overflow)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("where", ["states", "keys"])
def test_f44_a_branch_that_is_not_finite_harms_no_other(where: str, attention: str) -> None:
    """Nor do its stale slots, which a longer row's view shows in the next round."""
    target, sound = Target(broken(where, attention)), Target(endless(num_layers=3).double())
    sound.model.set_attn_implementation(attention)
    tree, clean = Tree([5, BAD, 6, 8], [-1, -1, 0, 1]), Tree([5, 9, 6, 8], [-1, -1, 0, 1])
    logits = []
    for one, draft in ((target, tree), (sound, clean)):
        store = one.open(2, 40)
        one.prefill(store, 0, prompt_of(12))
        one.prefill(store, 1, prompt_of(3))
        first = one.verify(store, [4, 4], [draft, draft])
        store.commit([[0, 1, 3], [0]])
        if one is target:  # however it came there
            store.kept[0].buffers[1][1, :, store.lengths[1] + 2 :] = float("nan")
        second = one.verify(store, [7, 7], [clean, clean])
        logits.append((first.logits, second.logits))
    (first, second), (expected, later) = logits
    assert first[:, 2].isnan().all(), "the node itself decides nothing"
    kept = [0, 1, 3]
    torch.testing.assert_close(first[:, kept], expected[:, kept], atol=3e-6, rtol=0)
    torch.testing.assert_close(second, later, atol=3e-6, rtol=0)


@pytest.mark.parametrize("where", ["states", "keys"])
def test_f44_text_does_not_change_with_drafts_that_are_not_finite(where: str) -> None:
    target = Target(broken(where, "sdpa"))
    prompts = [prompt_of(n) for n in (3, 14, 6)]
    texts = [own_greedy(target, prompt, 20) for prompt in prompts]
    assert all(BAD not in text for text in texts)

    class Bad(HalfRight):
        def _other(self, token: int, by: int = 1) -> int:
            return BAD

    for tree in (False, True):
        drafter = Bad(texts, [1, 3, 0], tree=tree)
        assert ids_of(target, prompts, Sampler(), drafter, 20) == texts


def test_f44_a_committed_token_that_is_not_finite_is_an_error() -> None:
    model = broken("states", "sdpa")
    prompt = prompt_of(5)
    third = own_greedy(Target(model), prompt, 3)[-1]
    with torch.no_grad():
        model.lm_head.weight[BAD] = 1.01 * model.lm_head.weight[third]
    with pytest.raises(NotFiniteError, match="not finite at a committed token"):
        ids_of(Target(model), [prompt], Sampler(), None, 8)
