"""Each token sees its committed slots, its ancestors and itself inside the window, nothing else."""

from __future__ import annotations

import pytest
import torch
from families import EAGER_ONLY, FAMILIES, TOLERANCE, WINDOW, WINDOWED
from tiny import tiny_target
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask

from drafthead.inference.masks import Attention, attention_of, visible, within
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, ancestors, chain

SEVEN = Tree([10, 11, 12, 13, 14, 15, 16], [-1, -1, 0, 1, 1, 3, 3])
"""
    root ─┬─ 0 ── 2
          └─ 1 ─┬─ 3 ─┬─ 5
                │     └─ 6
                └─ 4
"""
PATHS = [[], [0], [1], [0, 2], [1, 3], [1, 4], [1, 3, 5], [1, 3, 6]]
"""Nodes of the path that ends in each row of a verify pass, the root's first."""
LENGTHS = [6, 2]
WIDTH = 14


def allowed(row: int, query: int, window: int | None) -> set[int]:
    """The slots that a query sees, from the definition: a path's slots and their positions."""
    positions = {slot: slot for slot in range(LENGTHS[row])}
    own = LENGTHS[row]
    if row == 0:
        path = PATHS[query]
        positions |= {own: own} | {own + n + 1: own + d + 1 for d, n in enumerate(path)}
    else:  # the second row holds one drafted token; behind it the root and the filler see the root
        positions |= {own: own} | ({own + 1: own + 1} if query == 1 else {own + query: own})
    mine = max(positions[slot] for slot in positions if slot >= own)
    return {s for s, at in positions.items() if window is None or at > mine - window}


def tree_masks(attention: Attention, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Masks of the seven-node tree beside a chain of one, by kind."""
    trees = [SEVEN, chain([5])]
    seen = visible(torch.tensor(LENGTHS), ancestors(trees), WIDTH)
    depths = [[0, *SEVEN.depths], [0, 1, 0, 0, 0, 0, 0, 0]]
    queries = torch.tensor(LENGTHS)[:, None] + torch.tensor(depths)
    keys = torch.arange(WIDTH).repeat(2, 1)
    for row, length in enumerate(LENGTHS):
        keys[row, length : length + 8] = queries[row]
    masks = attention.masks(seen, queries, keys, dtype)
    return masks if isinstance(masks, dict) else {attention.kinds[0]: masks}


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
def test_f45_each_query_sees_itself_and_its_ancestors_and_nothing_else(
    eager: bool, dtype: torch.dtype, window: int
) -> None:
    kinds = ("full_attention", "sliding_attention")
    masks = tree_masks(Attention(kinds, window), dtype if eager else None)
    assert set(masks) == set(kinds)
    for kind, mask in masks.items():
        assert mask.shape == (2, 1, 8, WIDTH)
        if eager:
            assert mask.dtype == dtype
            assert mask.isfinite().all(), "two minimum planes must not be added"
            assert set(mask.unique().tolist()) <= {0.0, torch.finfo(dtype).min}
        else:
            assert mask.dtype == torch.bool
        seen = mask == 0 if eager else mask
        for row in (0, 1):
            for query in range(8):
                expected = allowed(row, query, window if kind == "sliding_attention" else None)
                got = set(seen[row, 0, query].nonzero()[:, 0].tolist())
                assert got == expected, (kind, row, query)
                assert LENGTHS[row] + query in got, "itself"


def test_f42_a_window_counts_positions_not_slots() -> None:
    """Literal: window 2 after three committed slots; two siblings share the position behind them.

    Slots      0  1  2  root a  b  c      c is a child of b
    Positions  0  1  2  3    4  4  5
    """
    tree = ancestors([Tree([7, 8, 9], [-1, -1, 1])])
    queries = torch.tensor([[3, 4, 4, 5]])
    keys = torch.tensor([[0, 1, 2, 3, 4, 4, 5]])
    seen = visible(torch.tensor([3]), tree, 7) & within(2, queries, keys)
    assert seen[0].int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0, 1, 0],  # by slots, the root would be out of b's window
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_f45_a_short_row_never_sees_the_slots_of_longer_ones() -> None:
    """Six committed slots beside one: behind the short row's tree there is nothing of its own."""
    seen = visible(torch.tensor([6, 1]), ancestors([chain([5]), chain([5])]), 8)
    assert seen[0].int().tolist() == [[1] * 7 + [0], [1] * 8]
    assert seen[1].int().tolist() == [[1, 1] + [0] * 6, [1, 1, 1] + [0] * 5]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "qwen2", "phi3"])
def test_f42_the_bound_is_transformers_own(family: str) -> None:
    """On a prompt of 40 tokens, the mask that transformers makes itself."""
    model = FAMILIES[family]()
    embedded = torch.zeros(1, 40, 64)
    theirs = create_sliding_window_causal_mask(model.config, embedded, None, cache=None)
    positions = torch.arange(40)[None]
    causal = torch.ones(1, 40, 40, dtype=torch.bool).tril()
    attention = attention_of(model)
    dtype = torch.float32 if family in EAGER_ONLY else None
    ours = attention.masks(causal, positions, positions, dtype)
    mask = ours["sliding_attention"] if isinstance(ours, dict) else ours
    assert attention.window == WINDOW
    assert torch.equal(mask, theirs)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ("full_attention",)),
        ("mistral", ("sliding_attention",)),
        ("phi3", ("sliding_attention",)),
        ("qwen2", ("full_attention", "sliding_attention")),
        ("gemma2", ("full_attention", "sliding_attention")),
    ],
)
def test_a_models_kinds_of_attention(family: str, kinds: tuple[str, ...]) -> None:
    assert Target(FAMILIES[family]())._attention.kinds == kinds


DEEP = Tree([10, 11, 12, 13, 14, 15], [-1, -1, 1, 1, 3, 4])
"""
    root ─┬─ 10
          └─ 11 ─┬─ 12
                 └─ 13 ── 14 ── 15
"""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [3, WINDOW])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_f42_a_tree_run_level_by_level_is_the_tree_run_at_once(
    family: str, window: int, attention: str
) -> None:
    """Logits of every node equal those of its own path as plain text, past the window, ragged.

    From the second forward on, the first one's slots lie behind the committed ones. A window of 3
    ends inside the tree, where slots and positions are not the same.
    """
    model = FAMILIES[family]().double()
    model.set_attn_implementation(attention)
    if family in WINDOWED:
        model.config.sliding_window = window
    target = Target(model)
    texts = [list(range(5, 30)), list(range(40, 43))]
    store = target.open(2, 40)
    for row, text in enumerate(texts):
        target.prefill(store, row, text)
    at_once = target.verify(store, [9, 8], [DEEP, DEEP]).logits
    lengths = torch.tensor([25, 3])
    seen = visible(lengths, ancestors([DEEP, DEEP]), 32)
    tokens = torch.tensor([[9, *DEEP.tokens], [8, *DEEP.tokens]])
    positions = lengths[:, None] + torch.tensor([0, *DEEP.depths])
    store.rows = slice(0, 2)
    parts = []
    for begin, end in ((0, 1), (1, 3), (3, 5), (5, 7)):
        at = slice(begin, end)
        parts.append(target.run(store, tokens[:, at], positions[:, at], seen[:, at, : 25 + end]))
        store.drafted += end - begin
    tolerance = TOLERANCE[attention]
    torch.testing.assert_close(torch.cat(parts, 1), at_once, atol=tolerance, rtol=0)
    paths = [[], [10], [11], [11, 12], [11, 13], [11, 13, 14], [11, 13, 14, 15]]
    for row, text in enumerate(texts):
        for node, path in enumerate(paths):
            ids = torch.tensor([[*text, tokens[row, 0], *path]])
            plain = model(ids).logits[0, -1]
            torch.testing.assert_close(at_once[row, node], plain, atol=tolerance, rtol=0)
    store.commit([[0, 2, 4], [0]])
    assert (store.lengths, store.drafted, store.offsets) == ([28, 4], 0, [28, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_f45_a_model_gets_the_mask_that_its_attention_takes_now(dtype: torch.dtype) -> None:
    """The attention and the dtype may be set after the target was made."""
    model = tiny_target(num_layers=2)
    target = Target(model)
    taken: list[Tensor] = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: taken.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        model.to(dtype)
        store = target.open(1, 16)
        target.prefill(store, 0, [5, 6, 7])
        assert target.verify(store, [9], [SEVEN]).logits.isfinite().all()
    assert [None if mask is None else mask.dtype for mask in taken] == [
        None,
        torch.bool,
        None,
        dtype,
    ]
