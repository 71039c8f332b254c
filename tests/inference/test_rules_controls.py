"""Known mistakes, put in on purpose, must be seen by the enumeration that `test_rules` rests on.

A control that passed would mean that the enumeration proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from enumeration import (
    Drafts,
    Fork,
    Nodes,
    Rule,
    Text,
    Verdict,
    chain_of,
    distance,
    grown,
    joint,
    plain,
    table,
)
from torch import Tensor

from drafthead.inference import verify
from drafthead.inference.tree import Tree
from drafthead.inference.verify import (
    Chance,
    LawAfter,
    accept_probability,
    block,
    reject,
    residual,
    without,
)

V = 3
P, Q = table(V, 1), table(V, 2)
WIDE: Nodes = [(-1, "q"), (-1, "q"), (0, "q"), (0, "q"), (1, "q"), (1, "q")]


def bias(drafts: Drafts, rule: Rule, steps: int = 3) -> float:
    return distance(joint(drafts, rule, P, steps), plain(P, V, steps))


def drawn_tree(nodes: Nodes, lazy: bool = True) -> Drafts:
    return grown(nodes, {"q": Q}, lazy)


@pytest.mark.parametrize("nodes", [chain_of(2), [(-1, "q")] * 2, WIDE])
@pytest.mark.parametrize("soft", [False, True], ids=["honest", "soft"])
def test_control_soft_q_on_fixed_guesses_is_seen(nodes: Nodes, soft: bool) -> None:
    """The most likely tokens, always, with the claim that they were drawn."""

    def drafts(text: Text, fork: Fork) -> Tree:
        tokens: list[int] = []
        laws: list[Tensor | None] = []
        paths: dict[int, Text] = {-1: text}
        groups: dict[int, Tensor] = {}
        for node, (parent, _) in enumerate(nodes):
            law = groups.setdefault(parent, Q(paths[parent]).clone())
            rank = sum(other == parent for other, _ in nodes[:node])
            tokens.append(int(law.argsort(descending=True)[rank]))
            laws.append(law if soft else None)
            paths[node] = (*paths[parent], tokens[-1])
        return Tree(tokens, [parent for parent, _ in nodes], laws)

    assert bias(drafts, reject) > 0.03 if soft else bias(drafts, reject) < 1e-10


@pytest.mark.parametrize("per_path", [False, True], ids=["per node", "per path"])
def test_control_one_draw_per_path_is_seen(per_path: bool) -> None:
    """Paths share nodes: drawing anew for each of them gives a shared node several chances."""

    def rule(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
        known: dict[tuple[int, ...], int] = {}

        def longest(leaf: int) -> Verdict:
            branch = [leaf]
            while tree.parents[branch[0]] >= 0:
                branch.insert(0, tree.parents[branch[0]])
            path: list[int] = []
            while True:
                key = (*path, -1 - leaf) if per_path else tuple(path)
                if key not in known:
                    known[key] = chance.draw(law_after(path), len(path))
                if len(path) == len(branch) or tree.tokens[branch[len(path)]] != known[key]:
                    return path, known[key]
                path.append(branch[len(path)])

        leaves = [node for node in range(len(tree.parents)) if node not in tree.parents]
        return max((longest(leaf) for leaf in leaves), key=lambda verdict: len(verdict[0]))

    shape: Nodes = [(-1, "q"), (-1, "q"), (0, "q")]
    found = bias(drawn_tree(shape, lazy=False), rule, steps=2)
    assert found > 0.05 if per_path else found < 1e-10


def test_control_dropping_a_drawn_sibling_is_seen() -> None:
    """Of two draws only those are submitted that the draft finds likely."""

    def drafts(text: Text, fork: Fork) -> Tree:
        law = Q(text)
        first = fork.pick(law)
        left = without(law, [first])
        assert left is not None
        both = [first, fork.pick(left)]
        kept = [token for token in both if law[token] >= 0.3]
        return Tree(kept, [-1] * len(kept), [law] * len(kept))

    assert bias(drafts, reject) > 0.03


@pytest.mark.parametrize(
    "wrong",
    [lambda law, drawn: law, lambda law, drawn: law.index_fill(0, torch.tensor(drawn).long(), 0)],
    ids=["not removed", "not renormalised"],
)
def test_control_q_that_is_not_conditional_is_seen(
    wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = drawn_tree([(-1, "q")] * 2)
    assert bias(drafts, reject) < 1e-10
    monkeypatch.setattr(verify, "without", wrong)
    assert bias(drafts, reject) > 0.02


@pytest.mark.parametrize(
    "wrong",
    [lambda p, q, weight=1.0: (p - q).clamp_min(1e-9), lambda p, q, weight=1.0: p],
    ids=["not renormalised", "the target's law"],
)
def test_control_a_wrong_residual_is_seen(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", wrong)
    assert bias(drawn_tree([(-1, "q")] * 2), reject) > 0.02


def test_control_a_block_residual_without_its_weight_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts = drawn_tree(chain_of(3), lazy=False)
    monkeypatch.setattr(verify, "residual", lambda p, q, weight=1.0: residual(p, q))
    assert bias(drafts, block) > 1e-3


def test_control_lenience_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verify, "accept_probability", lambda p, q, x: min(1.0, 1.5 * float(p[x] / q[x]))
    )
    assert bias(drawn_tree(chain_of(2)), reject) > 0.01


@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_control_warps_after_the_test_are_seen(rule: Rule) -> None:
    """Drafts are tested against the raw law, and only the added token is drawn from the warped."""
    warped = {text: law / law.sum() for text, law in _truncated().items()}

    def late(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
        class Late:
            accept = staticmethod(chance.accept)

            def draw(self, law: Tensor, depth: int) -> int:
                kept = law.clone()
                kept[law < law.max() / 4] = 0
                return chance.draw(kept, depth)

        return rule(tree, law_after, Late())

    def own(text: Text) -> Tensor:
        return warped[text]

    drafts = drawn_tree(chain_of(2), lazy=False)
    assert distance(joint(drafts, rule, own, 2), plain(own, V, 2)) < 1e-10
    assert distance(joint(drafts, late, P, 2), plain(own, V, 2)) > 0.02


def _truncated() -> dict[Text, Tensor]:
    texts = [x for n in range(5) for x in itertools.product(range(V), repeat=n)]
    return {x: torch.where(P(x) < P(x).max() / 4, 0, P(x)) for x in texts}


def test_control_penalties_from_the_wrong_branch_are_seen() -> None:
    """The history of a node is its own path, not the first path of that length."""

    def wrong(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
        return reject(tree, lambda path: law_after([0, 2][: len(path)]), chance)

    assert bias(drawn_tree(WIDE, lazy=False), wrong) > 0.05


def test_control_the_last_token_from_the_wrong_node_is_seen() -> None:
    """The token after a leaf is drawn from the law before it."""

    def wrong(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
        def stale(path: Sequence[int]) -> Tensor:
            leaf = path and path[-1] not in tree.parents
            return law_after(path[:-1] if leaf else path)

        return reject(tree, stale, chance)

    assert bias(drawn_tree(WIDE), wrong) > 0.05
    assert bias(drawn_tree(chain_of(2)), wrong) > 0.05


def test_control_one_number_for_draft_and_accept_is_seen() -> None:
    """One step: x by inverse transform of u, accepted iff the same u < p(x) / q(x); u is uniform.

    The measure of each event is the length of an interval, so this too is exact.
    """
    p, q = P(()), Q(())
    ends = q.cumsum(0).tolist()
    shared, separate = torch.zeros(V, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    for x in range(V):
        start, end = ends[x] - float(q[x]), ends[x]
        limit = accept_probability(p, q, x)
        for law, kept in ((shared, max(0.0, min(end, limit) - start)), (separate, q[x] * limit)):
            law[x] += kept
            law += (float(q[x]) - kept) * residual(p, q)
    assert (separate - p).abs().sum() / 2 < 1e-12
    assert (shared - p).abs().sum() / 2 > 0.02
