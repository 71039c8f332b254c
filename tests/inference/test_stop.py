"""Chains that stop and trees that grow by a head's confidence: what is drafted, and exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import generate
from drafts import endless, keyed, own_greedy, prompt_of
from enumeration import Drafts, Fork, Rule, Table, Text, distance, joint, plain, table
from ladder import LADDER, ladder_head
from torch import Tensor

from drafthead.heads.borrowing import BorrowingHead
from drafthead.inference.grow import HeadDrafter, check_rule_of, check_shape
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain, parse_shape
from drafthead.inference.verify import block, reject

Chance = Callable[[Text], float]


class TableHead:
    """Drafts from a table of laws, (V,) by text; `chance` of the draft after a text, if it tells.

    It reads tokens alone; a text is what follows the first token of a row.
    """

    max_depth, goes_on, drafter, positions = None, True, "table", None

    def __init__(self, q: Table, V: int, chance: Chance | None = None) -> None:
        self.q, self.chance, self.draft_ids = q, chance, torch.arange(V)
        self.contract = SimpleNamespace(layers=(), vocab_size=V)
        self.expanded = 0

    def open(self, batch: int, capacity: int) -> SimpleNamespace:
        return SimpleNamespace(rows=[[] for _ in range(batch)], start=lambda row: None)

    def extend(self, state: Any, features: Tensor, next_ids: Tensor, counts: Tensor) -> Tensor:
        for row, (ids, n) in enumerate(zip(next_ids.tolist(), counts.tolist(), strict=True)):
            state.rows[row] += ids[:n]
        state.nodes = [[] for _ in state.rows]
        state.asked = [[tuple(row[1:])] for row in state.rows]
        return self._logits(state)[:, 0]

    def expand(self, state: Any, ids: Tensor, parents: Tensor) -> Tensor:
        self.expanded += 1
        for row, pairs in enumerate(zip(ids.tolist(), parents.tolist(), strict=True)):
            nodes, root = state.nodes[row], tuple(state.rows[row][1:])
            state.asked[row] = [
                (*(nodes[parent] if parent >= 0 else root), token)
                for token, parent in zip(*pairs, strict=True)
            ]
            nodes += state.asked[row]
        return self._logits(state)

    def _logits(self, state: Any) -> Tensor:
        return torch.stack([torch.stack([self.q(x).log() for x in row]) for row in state.asked])

    def confidence(self, state: Any) -> Tensor | None:
        if self.chance is None:
            return None
        return torch.tensor([[self.chance(x) for x in row] for row in state.asked])


def sure_of(seed: int) -> Chance:
    """A chance for every text, of which no two are alike."""
    law = table(2, seed)
    return lambda text: float(law(text)[0])


def draft(
    head: TableHead, shape: str, texts: Sequence[Text], depths: Sequence[int], sampler: Any = None
) -> list[Tree]:
    drafter = HeadDrafter(head, parse_shape(shape))  # type: ignore[arg-type]
    drafter.open(len(texts), 60)
    rows = [[0, *text] for text in texts]
    for row, ids in enumerate(rows):
        drafter.start(row)
        drafter.observe(row, ids, None)
    return drafter.propose(rows, depths, sampler or Sampler())


# What is drafted


TEXTS: list[Text] = [(1, 2), (3,), (0, 4, 4), (2, 2)]


@pytest.mark.parametrize("tells", [False, True], ids=["own probability", "confidence"])
def test_a_row_stops_where_its_chance_falls_below(tells: bool) -> None:
    """Greedy, worked out token by token; every row for itself, at most as deep as it can use."""
    q, chance = table(5, 3, 4.0), sure_of(9)
    lengths = set()
    for least in (0.1, 0.3, 0.6):
        depths = [6, 2, 6, 6]
        head = TableHead(q, 5, chance if tells else None)
        trees = draft(head, f"stop:4:{least}", TEXTS, depths)
        for tree, text, depth in zip(trees, TEXTS, depths, strict=True):
            expected: list[int] = []
            left = 1.0
            while len(expected) < min(4, depth):
                law = q((*text, *expected))
                if tells:
                    left *= chance((*text, *expected))
                    if left < least:
                        break
                expected.append(int(law.argmax()))
                if not tells:
                    left *= float(law.max())
                    if left < least:
                        break
            assert tree == chain(expected, source=tree.source)
            lengths.add(len(expected))
        longest = max(map(len, trees))
        assert longest - 1 <= head.expanded <= longest, "no step for what nobody can use"
    assert lengths >= ({0, 1, 2, 4} if tells else {1, 2, 4})


def test_best_first_nodes_are_those_of_the_best_chances() -> None:
    """The same search written out: the best child has the confidence's chance, others share what
    that leaves, none above the best. What is verified is a prefix-closed set.
    """
    q, chance, width, depth, nodes = table(5, 3), sure_of(4), 3, 3, 7
    (tree,) = draft(TableHead(q, 5, chance), f"tree:{depth}x{width}:{nodes}", [(1, 2)], [9])
    values: dict[Text, float] = {(): 1.0}
    level: list[Text] = [()]
    for _ in range(depth):
        below: list[Text] = []
        for path in level:
            law = q((1, 2, *path))
            sure = chance((1, 2, *path))
            for rank, token in enumerate(law.topk(width).indices.tolist()):
                share = (1 - sure) * float(law[token] / (1 - law.max()))
                values[*path, token] = values[path] * (min(sure, share) if rank else sure)
                below.append((*path, token))
        level = sorted(below, key=lambda path: -values[path])[:width]
    best = sorted((path for path in values if path), key=lambda path: -values[path])[:nodes]
    assert set(tree.paths) == set(best)
    silent = draft(TableHead(q, 5), f"tree:{depth}x{width}:{nodes}", [(1, 2)], [9])[0]
    assert set(silent.paths) != set(best)


@pytest.mark.parametrize("shape", ["stop:3:0.2", "tree:3x2:5"])
def test_f44_a_chance_that_is_no_number_is_none(shape: str) -> None:
    (tree,) = draft(TableHead(table(5, 3), 5, lambda text: float("nan")), shape, [(1,)], [9])
    assert len(tree) == 0


# Exactness


class Forked:
    """A sampler of a ratio rule whose draws follow a fork."""

    needs_proposals, rule = True, "rejection"

    def __init__(self, fork: Fork) -> None:
        self.fork = fork

    def draft_scores(
        self, row: int, logits: Tensor, draft_ids: Tensor, position: int
    ) -> tuple[Tensor, Tensor]:
        law = logits.softmax(-1)
        scores = torch.full_like(law, -torch.inf)
        scores[0, self.fork.pick(law[0])] = 0.0
        return scores, law


V = 3
P, Q = table(V, 1), table(V, 2)
LEAST = 0.3


def stopping(chance: Chance | None, lengths: set[int] | None = None) -> Drafts:
    """Chains as the drafter makes them."""

    def drafts(text: Text, fork: Fork) -> Tree:
        head = TableHead(Q, V, chance)
        (tree,) = draft(head, f"stop:3:{LEAST}", [text], [9], Forked(fork))
        if lengths is not None:
            lengths.add(len(tree))
        return tree

    return drafts


def bias(drafts: Drafts, rule: Rule) -> float:
    return distance(joint(drafts, rule, P, 3), plain(P, V, 3))


ratio_rules = pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])


@ratio_rules
@pytest.mark.parametrize("chance", [None, sure_of(6)], ids=["own probability", "confidence"])
def test_f50_stopping_leaves_the_targets_law(rule: Rule, chance: Chance | None) -> None:
    lengths: set[int] = set()
    assert bias(stopping(chance, lengths), rule) < 1e-10
    assert len(lengths) > 2, "it stops at several depths"


@ratio_rules
def test_control_dropping_the_token_that_ended_the_chain_is_seen(rule: Rule) -> None:
    drafts = stopping(None)

    def dropping(text: Text, fork: Fork) -> Tree:
        tree = drafts(text, fork)
        left = 1.0
        for token, law in zip(tree.tokens, tree.proposals, strict=True):
            assert law is not None
            left *= float(law[token])
        return tree.only(range(len(tree) - (left < LEAST)))

    assert bias(dropping, rule) > 0.03


@ratio_rules
def test_control_a_confidence_that_knows_the_draw_is_seen(rule: Rule) -> None:
    """It says beforehand what only the drawn token can tell: the last one is left out for it."""
    drafts, sure = stopping(sure_of(6)), sure_of(8)

    def anticipating(text: Text, fork: Fork) -> Tree:
        tree = drafts(text, fork)
        kept = [sure((*text, *tree.tokens[: n + 1])) > 0.5 for n in range(len(tree))]
        return tree.only(range((*kept, False).index(False)))

    assert bias(anticipating, rule) > 0.03


@pytest.fixture(scope="module")
def heads() -> dict[str, BorrowingHead]:
    model = endless(num_layers=8).double()
    made = {name: ladder_head(name, model) for name in ("block", "eagle3")}
    assert set(made) <= set(LADDER)
    return made


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(endless(num_layers=8).double())


@pytest.mark.parametrize(
    ("name", "tree"), [("block", "stop:5:0.2"), ("block", "tree:4x3:8"), ("eagle3", "stop:5:0.2")]
)
def test_seeded_and_greedy_text_is_the_targets_own(
    name: str, tree: str, heads: dict[str, BorrowingHead], target: Target
) -> None:
    """Whatever a head says about its chances, at T = 1 as at T = 0, in ragged batches."""
    prompts, length = [prompt_of(3), prompt_of(8)], {"max_new_tokens": 10}
    sampled: dict[str, Any] = {"do_sample": True, "seed": 3, **length}
    drafted = generate(target, heads[name], prompts, tree=tree, **sampled)
    assert drafted.equal(generate(target, None, prompts, **sampled))
    out = generate(target, heads[name], prompts[1:], tree=tree, **length)
    assert out[0].tolist() == own_greedy(target, prompts[1], 10)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_ratio_rules_verify_what_stopped(
    rule: str, heads: dict[str, BorrowingHead], target: Target
) -> None:
    """Every submitted node has its law, and rows that stop early are no longer than they were."""
    shape = parse_shape("stop:5:0.2")
    check_rule_of(shape, rule)
    drafter = HeadDrafter(heads["block"], shape)
    texts = [prompt_of(n) for n in (4, 6, 9)]
    together = []
    for rows in ([0, 1, 2], [0], [1], [2]):
        drafter.open(len(rows), 40)
        store = target.open(len(rows), 40)
        for at, row in enumerate(rows):
            drafter.start(at)
            out = target.prefill(store, at, texts[row][:-1], drafter.layers)
            assert out.features is not None
            drafter.observe(at, texts[row], out.features[0])
        sampler = keyed(target, len(rows), rule=rule, streams=rows)
        together.append(drafter.propose([texts[row] for row in rows], [9] * len(rows), sampler))
    for row, tree in enumerate(together[0]):
        (alone,) = together[1 + row]
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)
        assert len(tree.proposals) == len(tree)
        for token, law in zip(tree.tokens, tree.proposals, strict=True):
            assert law is not None
            assert law[token] > 0
    assert len({len(tree) for tree in together[0]}) > 1
    out = generate(target, heads["block"], texts[:1], tree=str(shape), rule=rule,
                   do_sample=True, seed=1, max_new_tokens=12)  # fmt: skip
    assert out.shape == (1, 4 + 12)


# How it is written


def test_a_stop_is_written_as_it_is_read() -> None:
    for text in ("stop:7:0.3", "stop:1:0.05", "stop:3:1e-05", "stop:3:0.1234567"):
        assert str(parse_shape(text)) == text
    shape = parse_shape("stop:4:.5")
    assert (shape.depth, shape.nodes, shape.width, shape.is_chain) == (4, 4, 1, True)
    assert shape != parse_shape("chain:4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stop:7", r"tree 'stop:7': write chain:DEPTH, stop:DEPTH:CHANCE"),
        ("stop:7:x", r"tree 'stop:7:x': write"),
        ("stop:0:0.3", "depth and width are at least 1"),
        ("stop:3:1.5", r"tree stop:3:1\.5: the chance .* between 0 and 1"),
        ("stop:3:0", r"tree stop:3:0: the chance"),
    ],
)
def test_what_is_no_stop_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)


def test_f58_a_stop_deeper_than_the_head_is_refused(heads: dict[str, BorrowingHead]) -> None:
    with pytest.raises(ValueError, match=r"tree stop:6:0\.3: depth 6, the head drafts 5 tokens"):
        check_shape(parse_shape("stop:6:0.3"), heads["block"])
