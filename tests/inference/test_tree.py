"""Trees: who sees whom, where each node stands, and how shapes are written."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_target

from drafthead.inference.masks import attention_of, visible
from drafthead.inference.target import Target
from drafthead.inference.tree import (
    OFF,
    Shape,
    Static,
    Tree,
    ancestors,
    chain,
    parse_shape,
    rows_of,
)

T, F = True, False

SEVEN = Tree([10, 11, 12, 13, 14, 15, 16], [-1, -1, 0, 0, 1, 2, 5])
"""The root has children 0 and 1; 0 has 2 and 3; 1 has 4; 2 has 5; 5 has 6."""

SEEN = [
    # root 0  1  2  3  4  5  6
    [T, F, F, F, F, F, F, F],
    [T, T, F, F, F, F, F, F],
    [T, F, T, F, F, F, F, F],
    [T, T, F, T, F, F, F, F],
    [T, T, F, F, T, F, F, F],
    [T, F, T, F, F, T, F, F],
    [T, T, F, T, F, F, T, F],
    [T, T, F, T, F, F, T, T],
]


def test_every_node_sees_its_ancestors_and_itself_only() -> None:
    assert ancestors([SEVEN])[0].tolist() == SEEN


def test_depths_and_positions_of_seven_nodes() -> None:
    assert SEVEN.depths == [1, 1, 2, 2, 2, 3, 4]
    assert not SEVEN.is_chain
    tokens, depths = rows_of([SEVEN], [9])
    assert tokens.tolist() == [[9, 10, 11, 12, 13, 14, 15, 16]]
    assert depths.tolist() == [[0, 1, 1, 2, 2, 2, 3, 4]]


def test_short_rows_of_a_batch_are_filled_with_rows_that_see_something() -> None:
    mask = ancestors([SEVEN, chain([5]), Tree()])
    assert mask[0].tolist() == SEEN
    assert mask[1, :2, :].tolist() == [[T] + [F] * 7, [T, T] + [F] * 6]
    assert mask.any(-1).all(), "no row is masked altogether"
    tokens, depths = rows_of([SEVEN, chain([5]), Tree()], [9, 8, 7])
    assert tokens[1].tolist() == [8, 5, 8, 8, 8, 8, 8, 8]
    assert depths[1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0], "no position beyond the row's own"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_f45_masks_are_bool_or_finite_and_exact(attention: str, dtype: torch.dtype) -> None:
    """Two rows, 3 and 1 committed slots: each sees its own committed slots, then its tree."""
    model = tiny_target(num_layers=1).to(dtype)
    model.set_attn_implementation(attention)
    seen = visible(torch.tensor([3, 1]), ancestors([SEVEN, chain([5])]), 11)
    additive = dtype if attention == "eager" else None
    mask = attention_of(model).masks(seen, torch.zeros(2, 8), None, additive)
    assert mask.shape == (2, 1, 8, 11)
    if attention == "sdpa":
        assert mask.dtype == torch.bool
        seen = mask
    else:
        assert mask.dtype == dtype
        assert mask.isfinite().all(), "two minimum planes must not be added"
        seen = mask == 0
        assert (mask[~seen] == torch.finfo(dtype).min).all()
    assert seen[0, 0].tolist() == [[T, T, T, *row] for row in SEEN]
    assert seen[1, 0, :2].tolist() == [[T, T] + [F] * 9, [T, T, T] + [F] * 8]
    assert seen.any(-1).all(), "no row is masked altogether"


def test_f45_a_short_row_never_sees_the_slots_of_longer_ones() -> None:
    """Six committed slots beside one: behind the short row's tree there is nothing of its own."""
    seen = visible(torch.tensor([6, 1]), ancestors([chain([5]), chain([5])]), 8)
    mask = seen[:, None]
    assert mask[0, 0].tolist() == [[T] * 7 + [F], [T] * 8]
    assert mask[1, 0].tolist() == [[T, T] + [F] * 6, [T, T, T] + [F] * 5]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_siblings_do_not_see_each_other_in_the_model(attention: str) -> None:
    """Logits of every node equal those of its own path run as plain text."""
    model = tiny_target(num_layers=3).double()
    model.set_attn_implementation(attention)
    target = Target(model)
    store = target.open(1, 20)
    target.prefill(store, 0, [4, 5, 6])
    out = target.verify(store, [9], [SEVEN])
    for node in range(-1, len(SEVEN)):
        path, at = [], node
        while at >= 0:
            path.insert(0, SEVEN.tokens[at])
            at = SEVEN.parents[at]
        plain = model(torch.tensor([[4, 5, 6, 9, *path]])).logits[0, -1]
        torch.testing.assert_close(out.logits[0, node + 1], plain, atol=1e-6, rtol=0)


def test_trees_with_impossible_parents_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        Tree([1, 2], [-1])
    with pytest.raises(ValueError, match="node 1: parent 1 does not come before it"):
        Tree([1, 2], [-1, 1])
    with pytest.raises(ValueError, match="node 0: parent -2"):
        Tree([1], [-2])


def test_chains_and_empty_trees() -> None:
    assert chain([7, 8, 9]).parents == [-1, 0, 1]
    assert chain([7, 8, 9]).is_chain
    assert Tree().is_chain
    assert len(Tree()) == 0
    assert ancestors([Tree()]).tolist() == [[[T]]]


UNREADABLE = r"write chain:DEPTH, stop:DEPTH:CHANCE, static:0,1,0\.0, tree:DEPTHxWIDTH:NODES, "


def test_paths_are_the_tokens_that_lead_to_each_node() -> None:
    assert SEVEN.paths == [
        (10,), (11,), (10, 12), (10, 13), (11, 14), (10, 12, 15), (10, 12, 15, 16)
    ]  # fmt: skip


def test_a_part_of_a_tree_keeps_tokens_parents_and_laws() -> None:
    part = SEVEN.only([0, 2, 3, 5])
    assert part.paths == [(10,), (10, 12), (10, 13), (10, 12, 15)]
    laws = [torch.tensor([float(node)]) for node in range(7)]
    assert Tree(SEVEN.tokens, SEVEN.parents, [*laws], "x").only([1, 4]).proposals == laws[1:5:3]
    with pytest.raises(KeyError):
        SEVEN.only([2])


def test_laws_are_one_for_each_node_or_none_at_all() -> None:
    law = torch.tensor([0.5, 0.5])
    assert Tree([1, 0], [-1, -1], [law, law]).proposals[1] is law
    assert Tree([1, 0], [-1, -1]).proposals == []
    with pytest.raises(ValueError, match="2 tokens but 1 laws"):
        Tree([1, 0], [-1, -1], [law])


# Shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("chain:4", Shape(4, 1, 4)),
        ("tree:4x3:12", Shape(4, 3, 12)),
        ("tree:2x8:2", Shape(2, 8, 2)),
        ("auto:4x3:12", Shape(4, 3, 12, by_cost=True)),
        ("static:0,1,0.0,0.1,1.0", Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))),
        ("static:", Static(())),
        ("off", OFF),
        ("static:0,0.0,0.0.0", Static.chain(3)),
        ("tree:10x1:1024", Shape(10, 1, 1024)),
    ],
)
def test_shapes_are_read_and_written(text: str, shape: Shape | Static) -> None:
    assert parse_shape(text) == shape
    assert parse_shape(str(shape)).depth == shape.depth
    if not shape.is_chain:
        assert str(shape) == text


def test_a_static_tree_knows_its_measures() -> None:
    shape = parse_shape("static:0,1,2,0.0,0.1,2.0,0.1.0")
    assert (shape.depth, shape.width, shape.nodes, shape.is_chain) == (3, 3, 7, False)
    assert isinstance(shape, Static)
    assert shape.inner == (((),), ((0,), (2,)), ((0, 1),))
    assert [shape.children(path) for path in ((), (0,), (1,), (2,))] == [3, 2, 0, 1]
    assert shape.expanded == 3, "a head goes on from 0, 2 and 0.1"
    assert Static.chain(3).is_chain
    assert (parse_shape("static:").depth, parse_shape("static:").width) == (0, 0)


def test_off_is_the_shape_without_nodes_and_written_so() -> None:
    assert str(parse_shape("static:")) == str(OFF) == "off"
    assert (OFF.nodes, OFF.depth, OFF.is_chain) == (0, 0, True)


def test_chains_are_shapes_of_width_one() -> None:
    assert parse_shape("chain:4").is_chain
    assert not parse_shape("tree:2x8:2").is_chain, "its two nodes may stand side by side"
    assert not parse_shape("auto:4x1:4").is_chain


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:", "chain:-1", "4", "tree:4x4", "tree:4:12", "chain:4 ", "Chain:4"],
)
def test_f58_unreadable_shapes_are_refused_with_the_right_way(text: str) -> None:
    with pytest.raises(ValueError, match=UNREADABLE):
        parse_shape(text)


@pytest.mark.parametrize(
    "text", ["static", "static:0,", "static:a", "static:0..1", "static:.0", "static:-1", "auto:4"]
)
def test_f58_unreadable_static_trees_are_refused_with_the_right_way(text: str) -> None:
    with pytest.raises(ValueError, match=UNREADABLE):
        parse_shape(text)


@pytest.mark.parametrize("text", ["chain:0", "tree:0x2:4", "tree:2x0:4", "tree:5x2:4"])
def test_f58_impossible_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at least 1, nodes at least the depth"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([(0,), (0, 0), (0, 0)], r"node 0\.0: it is there twice"),
        ([(0,), (1, 0)], r"node 1\.0: its parent 1 does not come before it"),
        ([(0, 0), (0,)], r"node 0\.0: its parent 0 does not come before it"),
        ([(0,), (2,)], r"node 2: its better sibling 1 does not come before it"),
        ([(1,), (0,)], r"node 1: its better sibling 0 does not come before it"),
        ([(0,), (0, -1)], r"node 0\.-1: ranks count from 0"),
        ([()], r"node \(the root\): ranks count from 0"),
    ],
)
def test_f58_static_trees_that_are_no_trees_are_refused_by_node(
    paths: list[tuple[int, ...]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Static(tuple(paths))


@pytest.mark.parametrize(
    "text", ["chain:1025", "tree:4x4:1025", "static:" + ",".join(map(str, range(1025)))]
)
def test_f58_more_nodes_than_a_round_can_verify_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tree of 1025 nodes: at most 1024"):
        parse_shape(text)
