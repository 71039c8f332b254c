"""Trees grown from a head: their shape, their bounds, their order, and the laws they carry."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from drafts import endless, ids_of, keyed, own_greedy, prompt_of, rows_of_run
from tiny import tiny_head, tiny_target
from torch import Tensor

from drafthead.heads.base import DraftHead, HeadState
from drafthead.heads.eagle3 import Eagle3Head
from drafthead.inference.costs import Costs
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.noise import Purpose
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, Static, Tree, parse_shape

STATIC = "static:0,1,2,0.0,0.1,1.0,0.0.0,0.1.0,0.1.1"
SHAPES = ("chain:3", STATIC, "tree:3x3:8")


@pytest.fixture(scope="module")
def sibling(target64: Target) -> Sibling:
    model = endless().double()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(0.3)
    return Sibling.of(model, None, target64, check=False)


def draft(
    head: DraftHead,
    shape: str | Shape | Static,
    text: Sequence[int],
    sampler: Sampler | None = None,
    depth: int = 9,
    costs: Costs | None = None,
) -> Tree:
    """One row's first draft by a head that reads tokens."""
    shape = parse_shape(shape) if isinstance(shape, str) else shape
    drafter = HeadDrafter(head, shape, costs)
    drafter.open(1, len(text) + 40)
    drafter.start(0)
    drafter.observe(0, text, None)
    return drafter.propose([text], [depth], sampler or Sampler())[0]


def logits_after(head: Sibling, text: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = head.lm(torch.tensor([list(text)])).logits[0, -1]
    return logits


# What is drafted


@pytest.mark.parametrize("text", [prompt_of(7), prompt_of(7, 1)])
def test_static_nodes_are_the_tokens_of_their_ranks(sibling: Sibling, text: list[int]) -> None:
    tree = draft(sibling, STATIC, text)
    shape = parse_shape(STATIC)
    assert isinstance(shape, Static)
    for ranks, path, parent in zip(shape.paths, tree.paths, tree.parents, strict=True):
        order = logits_after(sibling, [*text, *path[:-1]]).argsort(descending=True)
        assert path[-1] == order[ranks[-1]]
        assert parent == (shape.paths.index(ranks[:-1]) if len(ranks) > 1 else -1)


def test_best_first_nodes_are_the_likeliest_paths(sibling: Sibling) -> None:
    """The same search, one path at a time, each from a plain forward of its own."""
    text, width, depth, nodes = prompt_of(7), 4, 4, 50
    tree = draft(sibling, f"tree:{depth}x{width}:{nodes}", text)
    laws: dict[tuple[int, ...], Tensor] = {(): logits_after(sibling, text).log_softmax(-1)}
    values: dict[tuple[int, ...], float] = {}
    for level in range(depth):
        for path in [p for p in laws if len(p) == level]:
            for token in laws[path].topk(width).indices.tolist():
                before = values.get(path, 0.0)
                values[*path, token] = before + float(laws[path][token])
        best = sorted((p for p in values if len(p) == level + 1), key=lambda p: -values[p])
        for path in best[:width]:
            laws[path] = logits_after(sibling, [*text, *path]).log_softmax(-1)
    expected = sorted(values, key=lambda path: -values[path])[:nodes]
    assert set(tree.paths) == set(expected)
    assert len(tree) == nodes


def test_coupled_children_are_ranked_by_probability_and_shared_noise(
    target64: Target, sibling: Sibling
) -> None:
    text, sampler = prompt_of(5), keyed(target64, temperature=0.7)
    tree = draft(sibling, "static:0,1,0.0,0.1", text, sampler)
    assert sampler.noise is not None
    for path, siblings in (((), (0, 1)), (tuple(tree.tokens[:1]), (2, 3))):
        scores = logits_after(sibling, [*text, *path]) / 0.7
        scores = scores.float() + sampler.noise[0].gumbel(len(text) + len(path))
        order = scores.topk(2).indices.tolist()
        assert [tree.tokens[node] for node in siblings] == order


# Ratio rules


def test_siblings_are_drawn_without_replacement_and_carry_their_law(
    target64: Target, sibling: Sibling
) -> None:
    """One tensor for the children of a node: the law that their parent's logits make."""
    text = prompt_of(5)
    sampler = keyed(target64, rule="rejection", temperature=0.7, top_k=20)
    tree = draft(sibling, STATIC, text, sampler)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    assert [len(nodes) for nodes in children.values()] == [3, 2, 1, 1, 2]
    assert sampler.noise is not None
    for parent, nodes in children.items():
        path = tree.paths[parent] if parent >= 0 else ()
        law = tree.proposals[nodes[0]]
        assert law is not None
        assert all(tree.proposals[node] is law for node in nodes)
        raw = logits_after(sibling, [*text, *path]) / 0.7
        raw[raw < raw.topk(20).values[-1]] = -torch.inf
        torch.testing.assert_close(law.double(), raw.softmax(-1), atol=1e-6, rtol=0)
        noise = sampler.noise[0].gumbel(len(text) + len(path), Purpose.DRAFT)
        order = (raw + noise).topk(len(nodes)).indices.tolist()
        assert [tree.tokens[node] for node in nodes] == order


def test_a_law_of_a_reduced_draft_vocabulary_is_one_over_the_targets(target64: Target) -> None:
    ids = torch.arange(3, 512, 5)
    head = tiny_head(endless(), draft_ids=ids).double()
    head.bind(target64.model, check=False)
    drafter = HeadDrafter(head, parse_shape("static:0,1"))
    drafter.open(1, 60)
    drafter.start(0)
    text = prompt_of(6)
    drafter.observe(
        0, text, target64.prefill(target64.open(1, 9), 0, text[:-1], (2, 4, 5)).features[0]
    )  # type: ignore[index]
    (tree,) = drafter.propose([text], [3], keyed(target64, rule="rejection"))
    law = tree.proposals[0]
    assert law is not None
    assert law.shape == (512,)
    assert float(law.sum()) == pytest.approx(1.0)
    assert set(law.nonzero()[:, 0].tolist()) <= set(ids.tolist())


def test_no_token_without_a_chance_is_drafted(target64: Target, sibling: Sibling) -> None:
    """Top-k leaves two candidates where the tree wants three."""
    for rule in ("coupled", "rejection"):
        tree = draft(sibling, STATIC, prompt_of(5), keyed(target64, rule=rule, top_k=2))
        assert tree.depths.count(1) == 2
        assert tree.depths.count(3) == 3, "the others are all there"


@pytest.mark.parametrize("shape", ["tree:3x3:8", "tree:2x2:3"])
def test_a_best_first_tree_is_no_draw_and_ratio_rules_refuse_it(
    target64: Target, sibling: Sibling, shape: str
) -> None:
    with pytest.raises(ValueError, match=r"depends on what is drawn.*'rejection'.*static tree"):
        draft(sibling, shape, prompt_of(5), keyed(target64, rule="rejection"))
    assert len(draft(sibling, shape, prompt_of(5), Sampler(rule="rejection"))), "greedy is no draw"


# Bounds


class Counting:
    """Counts the levels and nodes that a head is asked for."""

    def __init__(self, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.levels: list[int] = []
        inner = head.expand

        def expand(state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
            self.levels.append(ids.shape[1])
            return inner(state, ids, parents)

        monkeypatch.setattr(head, "expand", expand)


@pytest.mark.parametrize(("shape", "depth"), list(product(SHAPES, range(5))))
def test_f48_no_deeper_than_what_is_left_and_no_step_for_what_cannot_be_used(
    sibling: Sibling, shape: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(sibling, monkeypatch)
    tree = draft(sibling, shape, prompt_of(6), depth=depth)
    deepest = max(tree.depths, default=0)
    assert deepest <= min(depth, 3)
    assert deepest == min(depth, 3) or shape.startswith("tree")
    assert len(counting.levels) == max(0, min(depth, 3) - 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_f48_rows_with_unequal_rests_draft_what_each_can_use(sibling: Sibling, shape: str) -> None:
    drafter = HeadDrafter(sibling, parse_shape(shape))
    texts = [prompt_of(6), prompt_of(6), prompt_of(9)]
    drafter.open(3, 60)
    for row, text in enumerate(texts):
        drafter.start(row)
        drafter.observe(row, text, None)
    for tree, depth, text in zip(
        drafter.propose(texts, [1, 3, 0], Sampler()), (1, 3, 0), texts, strict=True
    ):
        assert tree.paths == draft(sibling, shape, text, depth=depth).paths
        assert max(tree.depths, default=0) <= depth


def test_f48_a_row_with_little_left_spends_its_nodes_where_they_can_be_used(
    sibling: Sibling,
) -> None:
    one = draft(sibling, "tree:3x6:9", prompt_of(6), depth=1)
    assert one.depths == [1] * 6, "all candidates of the one level"
    assert max(draft(sibling, "tree:3x6:9", prompt_of(6)).depths) > 1


def test_an_empty_static_tree_is_plain_decoding(target64: Target, sibling: Sibling) -> None:
    drafter = HeadDrafter(sibling, parse_shape("static:"))
    text = own_greedy(target64, prompt_of(6), 8)
    assert drafter.nodes == 0
    assert ids_of(target64, [prompt_of(6)], Sampler(), drafter, 8) == [text]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("chain:5", "tree chain:5: depth 5, the head drafts 3 tokens at most"),
        ("tree:4x2:6", "tree tree:4x2:6: depth 4, the head drafts 3 tokens at most"),
        ("static:0,0.0,0.0.0,1,0.0.0.0", r"node 0\.0\.0\.0: depth 4, the head drafts 3 tokens"),
    ],
)
def test_f58_a_tree_deeper_than_the_head_is_refused(
    target32: Target, shape: str, said: str
) -> None:
    head = tiny_head(tiny_target(num_layers=6))
    head.max_depth = 3
    HeadDrafter(head, parse_shape("chain:3"))
    with pytest.raises(ValueError, match=said):
        HeadDrafter(head, parse_shape(shape))


# Position limits


def test_f55_the_notice_counts_positions_really_used(
    target64: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Many draft slots, few positions: nothing to say until the text gets there."""
    head: Eagle3Head = tiny_head(endless()).double()
    head.bind(target64.model, check=False)
    head.config.max_position_embeddings = 40
    drafter = HeadDrafter(head, parse_shape("tree:3x8:24"))
    with caplog.at_level(logging.WARNING):
        ids_of(target64, [prompt_of(10)], Sampler(), drafter, 30)
        assert "positions" not in caplog.text, "40 tokens in all, of which 24 + 40 draft slots"
        text = own_greedy(target64, prompt_of(10), 50)
        assert ids_of(target64, [prompt_of(10)], Sampler(), drafter, 50) == [text]
        ids_of(target64, [prompt_of(10)], Sampler(), drafter, 50)
    assert caplog.text.count("the head was made for 40 positions: past them drafts may get") == 1


# Cost


PRICES = (0.0, 0.001, 0.01, 0.05, 0.2, 1.0)


def priced(step: float, slope: float = 0.0) -> Costs:
    return Costs(tokens=(1, 33), seconds=(1.0, 1.0 + 32 * slope), extend=step, step=step)


def test_dearer_steps_never_give_deeper_trees_and_free_ones_the_whole_budget(
    sibling: Sibling,
) -> None:
    for seed in range(4):
        text = prompt_of(7, seed)
        trees = [draft(sibling, "auto:6x3:14", text, costs=priced(step)) for step in PRICES]
        depths = [max(tree.depths, default=0) for tree in trees]
        assert depths == sorted(depths, reverse=True)
        assert depths[0] > depths[-1]
        free = draft(sibling, "tree:6x3:14", text)
        assert trees[0].paths == free.paths


def test_dearer_verifying_never_gives_larger_trees(sibling: Sibling) -> None:
    text = prompt_of(7)
    slopes = (0.0, 0.003, 0.01, 0.03, 0.1, 0.5)
    trees = [draft(sibling, "auto:4x4:16", text, costs=priced(0.0, s)) for s in slopes]
    sizes = [len(tree) for tree in trees]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-1] < 4


def test_a_tree_stopped_by_cost_changes_no_text(target64: Target, sibling: Sibling) -> None:
    prompts = [prompt_of(6), prompt_of(15)]
    texts = [own_greedy(target64, prompt, 24) for prompt in prompts]
    for step in (0.01, 0.1):
        drafter = HeadDrafter(sibling, parse_shape("auto:5x3:9"), priced(step, 0.02))
        assert ids_of(target64, prompts, Sampler(), drafter, 24) == texts


def test_a_head_that_never_pays_is_asked_seldom_and_takes_up_what_it_missed(
    target64: Target, sibling: Sibling
) -> None:
    """Its steps cost three forwards each, so most rounds go without; the text is the same."""
    prompt = prompt_of(9)
    text = own_greedy(target64, prompt, 60)
    drafter = HeadDrafter(sibling, parse_shape("auto:3x2:5"), priced(3.0))
    asked = 0
    extend = sibling.extend

    def counting(*given: Any) -> Tensor:
        nonlocal asked
        asked += 1
        return extend(*given)

    sibling.extend = counting  # type: ignore[method-assign]
    try:
        rows = rows_of_run(target64, [prompt], drafter, 60)
    finally:
        sibling.extend = extend  # type: ignore[method-assign]
    assert rows[0].ids == text
    assert 0 < asked < len(rows[0].rounds) / 4


def test_an_auto_tree_is_given_the_costs_that_it_stops_by(sibling: Sibling) -> None:
    with pytest.raises(ValueError, match=r"tree auto:4x4:9: .*use drafting"):
        HeadDrafter(sibling, parse_shape("auto:4x4:9"))


def test_f58_a_tree_wider_than_the_draft_vocabulary_is_refused(target32: Target) -> None:
    head = tiny_head(tiny_target(num_layers=6), draft_ids=torch.tensor([5, 9, 11, 40]))
    with pytest.raises(ValueError, match=r"width 5 exceeds the draft vocabulary .*4"):
        HeadDrafter(head, parse_shape("tree:3x5:9"))
    drafter = HeadDrafter(head, parse_shape("tree:3x4:30"))
    text = own_greedy(target32, prompt_of(6), 12)
    assert ids_of(target32, [prompt_of(6)], Sampler(), drafter, 12) == [text]


@pytest.mark.parametrize("shape", ["tree:4x8:8", "tree:5x8:16", "tree:6x10:6"])
def test_f58_a_tree_that_expands_more_than_it_verifies_fits_the_heads_memory(
    target64: Target, head64: DraftHead, shape: str
) -> None:
    """To the last token of the longer row, and of a row that waits beside it."""
    prompts = [prompt_of(6), prompt_of(40)]
    drafter = HeadDrafter(head64, parse_shape(shape))
    texts = [own_greedy(target64, prompt, 24) for prompt in prompts]
    assert ids_of(target64, prompts, Sampler(), drafter, 24) == texts
    assert ids_of(target64, prompts[:1], Sampler(), drafter, 24) == texts[:1]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_f44_a_head_that_is_not_finite_decides_nothing(target64: Target, rule: str) -> None:
    """Its NaN must not pass for the certainty that a ratio rule accepts."""
    head = tiny_head(endless()).double()
    head.bind(target64.model, check=False)
    with torch.no_grad():
        head.norm.weight.fill_(torch.nan)
    drafter = HeadDrafter(head, parse_shape("chain:3"))
    sampler = keyed(target64, 1, rule=rule, top_k=5)
    (text,) = ids_of(target64, [prompt_of(6)], sampler, drafter, 24)
    laws = target64.model(torch.tensor([text])).logits[0]
    best = laws.topk(5).indices.tolist()
    assert all(token in best[at - 1] for at, token in enumerate(text) if at >= 6)
