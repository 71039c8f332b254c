"""What drafters propose, and vocabularies that differ from the target's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafts import (
    HalfRight,
    Oracle,
    endless,
    ids_of,
    keyed,
    own_greedy,
    prompt_of,
    rows_of_run,
)
from tiny import tiny_head, tiny_tokenizer
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.drafters import LookupDrafter, MergedDrafter, heads_of, merge
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, parse_shape

TREE = "tree:3x3:8"


@pytest.mark.parametrize("bad", [{"length": 0}, {"length": 3, "shortest": 0}])
def test_f58_impossible_lookups_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"lookup of .* must be positive"):
        LookupDrafter(**bad)


def test_a_reduced_draft_vocabulary_changes_no_text(target64: Target) -> None:
    """Tokens outside it are refusals; ids go through the map (greedy, coupled, rejection)."""
    head = tiny_head(endless(), draft_ids=torch.arange(3, 512, 5)).double()
    head.bind(target64.model, check=False)
    prompt = prompt_of(6)
    greedy = ids_of(target64, [prompt], Sampler(), None, 16)
    sampled = ids_of(target64, [prompt], keyed(target64, top_k=9), None, 16)
    for shape in ("chain:3", TREE):
        drafter = HeadDrafter(head, parse_shape(shape))
        assert ids_of(target64, [prompt], Sampler(), drafter, 16) == greedy
        assert ids_of(target64, [prompt], keyed(target64, top_k=9), drafter, 16) == sampled
    chained = HeadDrafter(head, parse_shape("chain:3"))
    text = ids_of(target64, [prompt], keyed(target64, rule="rejection"), chained, 16)
    assert len(text[0]) == 6 + 16


def test_f60_a_vocabulary_padded_beyond_the_tokenizers() -> None:
    """Model 544, tokenizer 512; the target emits 530 again and again, as in plain decoding."""
    model = endless(num_layers=6, vocab_size=544)
    with torch.no_grad():
        model.lm_head.weight[530] = 3 * model.lm_head.weight[40]
    target = Target(model.double(), tiny_tokenizer(512))
    prompt = next(
        p for p in (prompt_of(6, seed) for seed in range(40)) if 530 in own_greedy(target, p, 12)
    )
    text = own_greedy(target, prompt, 12)
    head = tiny_head(endless(num_layers=6, vocab_size=544)).double()
    head.bind(model, check=False)
    for drafter in (
        Oracle([text]),
        HalfRight([text], 1, tree=True, vocab_size=544),
        HeadDrafter(head, parse_shape(TREE)),
        LookupDrafter(4),
    ):
        assert ids_of(target, [prompt], Sampler(), drafter, 12) == [text]
    assert target.vocab_size == 544
    assert "530" not in target.tokenizer.decode(text, skip_special_tokens=True)


# Lookup and merged


def test_lookup_continues_as_the_text_did_after_the_latest_longest_match() -> None:
    drafter = LookupDrafter(3, longest=2, shortest=1)
    drafter.open(1, 64)
    drafter.start(0)
    ids = [7, 8, 1, 2, 9, 8, 3, 4, 5, 7, 8]
    drafter.observe(0, ids, None)
    assert drafter.propose([ids], [9], Sampler())[0].tokens == [1, 2, 9], "2-gram 7 8"
    ids += [3]
    drafter.observe(0, ids, None)
    assert drafter.propose([ids], [9], Sampler())[0].tokens == [4, 5, 7], "8 3"
    assert drafter.propose([ids], [2], Sampler())[0].tokens == [4, 5], "no deeper than asked"
    assert drafter.propose([ids], [0], Sampler())[0].tokens == []
    drafter.start(0)
    ids = [*range(20, 31), 7, 8]
    drafter.observe(0, ids, None)
    assert drafter.propose([ids], [9], Sampler())[0].tokens == [], "a new row knows nothing"


def test_lookup_is_sure_of_its_longest_n_gram_only() -> None:
    drafter = LookupDrafter(3, longest=2, shortest=1)
    drafter.open(1, 64)
    drafter.start(0)
    ids = [7, 8, 1, 2, 9, 8, 3, 4, 5, 7, 8]
    for more, sure in (([], True), ([1], True), ([5], False), ([6], False)):
        ids += more
        drafter.observe(0, ids, None)
        drafter.propose([ids], [9], Sampler())
        assert drafter.sure(0) == sure, more
    drafter.start(0)
    assert not drafter.sure(0)


class Fixed:
    """Proposes the same tree always, and counts how often it was asked."""

    layers: tuple[int, ...] = ()

    def __init__(self, *trees: Tree, sure: bool = False) -> None:
        self.name = trees[0].source
        self.nodes = max(map(len, trees))
        self.trees, self.is_sure = trees, sure
        self.asked: list[list[int]] = []

    def open(self, batch: int, capacity: int) -> None: ...

    def start(self, row: int) -> None: ...

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        assert features is None

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        self.asked.append(list(depths))
        return [t if depth else Tree() for t, depth in zip(self.trees, depths, strict=True)]

    def sure(self, row: int) -> bool:
        return self.is_sure


LEFT = Tree([1, 2, 3, 4], [-1, -1, 0, 2], source="left")
"""1 with 3 and 4 below, 2 beside it."""
RIGHT = Tree([1, 3, 5, 6], [-1, 0, 1, -1], source="right")
"""1 with 3 and 5 below, 6 beside it."""


def test_merged_trees_share_prefixes_and_keep_every_path() -> None:
    tree = merge([LEFT, RIGHT], 99)
    assert set(tree.paths) == set(LEFT.paths) | set(RIGHT.paths)
    assert len(tree) == len(set(tree.paths)) == 6
    assert tree.source == "left+right"


@pytest.mark.parametrize("nodes", range(1, 8))
def test_a_merged_tree_keeps_its_budget_and_shallow_nodes_first(nodes: int) -> None:
    tree = merge([LEFT, RIGHT], nodes)
    assert len(tree) == min(nodes, 6)
    everything = sorted(set(LEFT.paths) | set(RIGHT.paths), key=len)
    assert sorted(map(len, tree.paths)) == [len(path) for path in everything[:nodes]]


def test_merging_with_nothing_gives_the_tree_itself() -> None:
    assert merge([Tree(), LEFT, Tree()], 3) is LEFT
    assert len(merge([Tree(), Tree()], 3)) == 0
    law = torch.full((9,), 1 / 9)
    drawn = Tree([4], [-1], [law], "drawn")
    assert merge([Tree(), drawn, LEFT], 9, as_draws=True) is drawn, "a mixture is no draw"


def test_the_others_are_not_asked_where_the_first_is_sure() -> None:
    for sure in (True, False):
        first, other = Fixed(LEFT, LEFT, sure=sure), Fixed(RIGHT, RIGHT)
        merged = MergedDrafter(first, other)
        trees = merged.propose([[1], [1]], [3, 0], Sampler())
        assert other.asked == ([] if sure else [[3, 0]])
        assert trees[0].source == ("left" if sure else "right+left")
        assert len(trees[1]) == 0
        assert merged.nodes == 4


def test_merged_drafters_with_ratio_rules_take_one_tree(target64: Target) -> None:
    first, other, nothing = Fixed(LEFT), Fixed(RIGHT), Fixed(Tree(source="nothing"))
    sampler = keyed(target64, rule="rejection")
    assert MergedDrafter(first, nothing, other).propose([[1]], [3], sampler) == [RIGHT]
    assert MergedDrafter(first, nothing).propose([[1]], [3], sampler) == [LEFT]


def test_each_part_of_a_merged_drafter_sees_the_states_of_its_own_layers(
    target64: Target,
) -> None:
    """Two heads of other layers and a sibling: each drafts as it does alone."""
    heads = []
    for layers in ((2, 4, 5), (1, 4, 6)):
        head = tiny_head(endless(), layers=layers).double()
        head.bind(target64.model, check=False)
        heads.append(head)
    sibling = Sibling.of(endless(num_layers=2).double(), None, target64, check=False)
    parts = [HeadDrafter(head, parse_shape("chain:3")) for head in (*heads, sibling)]
    merged = MergedDrafter(LookupDrafter(3, longest=9), *parts, nodes=12)
    assert merged.layers == (1, 2, 4, 5, 6)
    assert heads_of(merged) == [*heads, sibling]
    text = prompt_of(9)
    alone = []
    for part in parts:
        states = target64.prefill(target64.open(1, 20), 0, text[:-1], part.layers).features
        part.open(1, 40)
        part.start(0)
        part.observe(0, text, None if states is None else states[0])
        alone += part.propose([text], [3], Sampler())
    merged.open(1, 40)
    merged.start(0)
    states = target64.prefill(target64.open(1, 20), 0, text[:-1], merged.layers).features
    assert states is not None
    merged.observe(0, text, states[0])
    (together,) = merged.propose([text], [3], Sampler())
    assert set(together.paths) == {path for tree in alone for path in tree.paths}
    assert len({tree.tokens[0] for tree in alone}) == 3, "the three differ"
    texts = [own_greedy(target64, prompt, 24) for prompt in (text, prompt_of(4))]
    assert ids_of(target64, [text, prompt_of(4)], Sampler(), merged, 24) == texts


def test_impossible_mergers_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        MergedDrafter(LookupDrafter(3))
    with pytest.raises(ValueError, match="3 nodes cannot hold one part's 4"):
        MergedDrafter(LookupDrafter(3), Fixed(LEFT), nodes=3)


def test_merged_credits_each_draft_to_its_source(target64: Target, head64: DraftHead) -> None:
    prompt = prompt_of(6) * 3
    lookup = LookupDrafter(4, longest=3, shortest=3)
    drafter = MergedDrafter(lookup, HeadDrafter(head64, parse_shape("chain:2")))
    (row,) = rows_of_run(target64, [prompt], drafter, 30)
    assert row.ids == own_greedy(target64, prompt, 30)
    assert {r.source for r in row.rounds} <= {"lookup", "head", ""}
    assert "head" in {r.source for r in row.rounds}
    assert all(r.source for r in row.rounds if r.drafted)
