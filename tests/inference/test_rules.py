"""Every exact rule emits the target's joint law, proved by exact enumeration: no sampling error.

What is enumerated is the code that decodes (`verify`), every outcome of it, on vocabularies of
three and four, over two and three tokens, with as many rounds as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from enumeration import (
    Drafts,
    Fork,
    Nodes,
    Rule,
    Table,
    Text,
    Verdict,
    accepted,
    chain_of,
    distance,
    grown,
    joint,
    outcomes,
    plain,
    played,
    table,
)
from torch import Tensor

from drafthead.inference.tree import Tree, chain
from drafthead.inference.verify import Chance, LawAfter, block, reject, typical, walk


def coupled(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
    """The target's token after a path is drawn once, and nothing drafted has a say in it."""
    return walk(
        tree.tokens, tree.parents, lambda path: chance.draw(law_after(path), depth=len(path))
    )


def fixed(law: Sequence[float]) -> Table:
    """The same law after every text."""
    always = torch.tensor(law, dtype=torch.float64)
    return lambda text: always


PAIRS: dict[str, tuple[Table, Table]] = {
    "unlike": (table(3, 1), table(3, 2)),
    "sharp and flat": (table(3, 3, 3.0), table(3, 4, 0.3)),
    "target truncated": (table(3, 5, zeros=True), table(3, 6)),
    "draft truncated": (table(3, 7), table(3, 8, zeros=True)),
    "equal": (table(3, 1), table(3, 1)),
    "disjoint": (fixed([0.3, 0.7, 0]), fixed([0, 0, 1])),
    "of four": (table(4, 11), table(4, 12)),
    "of four, both truncated": (table(4, 13, zeros=True), table(4, 14, zeros=True)),
}
GUESS, OTHER = {3: table(3, 21), 4: table(4, 22)}, {3: table(3, 23), 4: table(4, 24)}

TREES: dict[str, Nodes] = {
    "three siblings": [(-1, "q")] * 3,
    "two by two": [(-1, "q"), (-1, "q"), (0, "q"), (0, "q"), (1, "q"), (1, "q")],
    "three, then three": [(-1, "q")] * 3 + [(0, "q")] * 3 + [(1, "q")] * 3 + [(2, "q")] * 2,
    "one long branch": [(-1, "q"), (-1, "q"), (0, "q"), (2, "q"), (2, "q")],
    "guesses": [(-1, "guess"), (0, "guess"), (1, "guess")],
    "guess first": [(-1, "guess"), (-1, "q"), (-1, "q"), (0, "guess"), (1, "q"), (1, "guess")],
    "guess last": [(-1, "q"), (-1, "q"), (-1, "guess"), (0, "q"), (2, "guess"), (2, "q")],
    "two groups, mixed": [(-1, "q"), (-1, "other"), (-1, "q"), (-1, "other"), (1, "q")],
    "a guess, then draws": [(-1, "guess"), (0, "guess"), (1, "q"), (1, "q")],
}


def size(p: Table) -> int:
    return len(p(()))


def drafts_of(nodes: Nodes, p: Table, q: Table, lazy: bool = False) -> Drafts:
    return grown(nodes, {"q": q, "guess": GUESS[size(p)], "other": OTHER[size(p)]}, lazy)


def check(drafts: Drafts, rule: Rule, p: Table, steps: int = 3) -> None:
    law = joint(drafts, rule, p, steps)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, plain(p, size(p), steps)) < 1e-10


# The target's law


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_f50_chains_give_the_targets_joint_law(rule: Rule, length: int, pair: str) -> None:
    p, q = PAIRS[pair]
    long = rule is block and length == 3 and size(p) == 4
    check(drafts_of(chain_of(length), p, q), rule, p, steps=2 if long else 3)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("tree", TREES)
def test_f50_trees_give_the_targets_joint_law(tree: str, pair: str) -> None:
    """Drawn siblings, fixed guesses, and both below one node, in either order."""
    p, q = PAIRS[pair]
    check(drafts_of(TREES[tree], p, q, lazy=True), reject, p)


def test_f50_a_tree_drawn_whole_gives_the_targets_joint_law() -> None:
    """Nothing hides in drawing late: the lazily drawn tree has the same law."""
    p, q = PAIRS["unlike"]
    for steps in (2, 3):
        check(drafts_of(TREES["two by two"], p, q), reject, p, steps)


@pytest.mark.parametrize("nodes", [chain_of(2), chain_of(3), [(-1, "guess"), (0, "guess")]])
def test_f50_block_takes_guesses_as_it_takes_draws(nodes: Nodes) -> None:
    p, q = PAIRS["unlike"]
    named = [(parent, "guess" if node == 1 else law) for node, (parent, law) in enumerate(nodes)]
    check(drafts_of(named, p, q), block, p)


@pytest.mark.parametrize("tree", TREES)
def test_coupled_gives_the_targets_joint_law(tree: str) -> None:
    p, q = PAIRS["unlike"]
    check(drafts_of(TREES[tree], p, q, lazy=True), coupled, p, steps=2)


@pytest.mark.parametrize("wrong", [False, True], ids=["told", "misled"])
def test_coupled_is_exact_whatever_the_drafter_knows(wrong: bool) -> None:
    """Drafts may depend on the very noise that decides: to hit every time, or never."""
    p, _ = PAIRS["unlike"]

    def settled(text: Text, fork: Fork) -> Text:
        """The token that the target will choose next, and the one after it."""
        first = fork.pick(p(text))
        return first, fork.pick(p((*text, first)))

    def run(text: Text, fork: Fork) -> tuple[int, Text]:
        choices = settled(text, fork)
        tree = chain([(token + wrong) % 3 for token in choices])

        def choice_after(path: Sequence[int]) -> int:
            return choices[len(path)] if len(path) < 2 else fork.pick(p((*text, *choices)))

        path, token = walk(tree.tokens, tree.parents, choice_after)
        return len(path), (*choices[: len(path)], token)

    ours: dict[Text, float] = {}
    for chance, (kept, emitted) in outcomes(lambda fork: run((), fork)):
        assert kept == (0 if wrong else 2)
        ours[emitted] = ours.get(emitted, 0.0) + chance
    assert distance(ours, plain(p, 3, 1 if wrong else 3)) < 1e-10


# Non-anticipation


def stopping(q: Table, length: int, least: float, drop: bool) -> Drafts:
    """Stop at the first token of a probability below `least`: after it, or without it (`drop`)."""

    def drafts(text: Text, fork: Fork) -> Tree:
        tokens: list[int] = []
        laws: list[Tensor | None] = []
        for _ in range(length):
            law = q((*text, *tokens))
            token = fork.pick(law)
            low = bool(law[token] < least)
            if not (low and drop):
                tokens.append(token)
                laws.append(law)
            if low:
                break
        return chain(tokens, laws)

    return drafts


@pytest.mark.parametrize("least", [0.2, 0.4])
@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_f50_stopping_after_an_unlikely_token_is_harmless(rule: Rule, least: float) -> None:
    p, q = PAIRS["of four"]
    check(stopping(q, 2, least, drop=False), rule, p)
    p, q = PAIRS["unlike"]
    check(stopping(q, 3, least, drop=False), rule, p)


@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_control_dropping_unlikely_drawn_tokens_is_seen(rule: Rule) -> None:
    p, q = PAIRS["of four"]
    for least, seen in ((0.2, 0.02), (0.4, 0.05)):
        law = joint(stopping(q, 2, least, drop=True), rule, p, 3)
        assert distance(law, plain(p, 4, 3)) > seen


def siblings_of(p: Table, q: Table, guess_first: bool) -> Drafts:
    """A draw and a guess below the root; of two equal ones the later is left out."""

    def drafts(text: Text, fork: Fork) -> Tree:
        law = q(text)
        nodes = [(fork.pick(law), law), (int(p(text).argmax()), None)]
        if guess_first:
            nodes.reverse()
        if nodes[0][0] == nodes[1][0]:
            nodes.pop()
        return Tree([t for t, _ in nodes], [-1] * len(nodes), [law for _, law in nodes])

    return drafts


def test_f50_a_guess_that_was_drawn_may_be_left_out_but_no_draw_that_was_guessed() -> None:
    """What a drafter that merges two others may do about equal siblings."""
    p, q = PAIRS["unlike"]
    check(siblings_of(p, q, guess_first=False), reject, p)
    law = joint(siblings_of(p, q, guess_first=True), reject, p, 3)
    assert distance(law, plain(p, 3, 3)) > 0.03


# How much is kept


@pytest.mark.parametrize("pair", PAIRS)
def test_acceptance_is_one_minus_total_variation(pair: str) -> None:
    p, q = PAIRS[pair]
    rate = 1 - float((p(()) - q(())).abs().sum() / 2)
    for rule in (reject, block):
        assert accepted(drafts_of(chain_of(1), p, q), rule, p) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("length", [2, 3])
def test_block_keeps_at_least_as_much_as_token_by_token(length: int, pair: str) -> None:
    """On the same draws; more wherever a bad token may come before a good one."""
    p, q = PAIRS[pair]
    drafts = drafts_of(chain_of(length), p, q)
    blocks, tokens = accepted(drafts, block, p), accepted(drafts, reject, p)
    assert blocks > tokens - 1e-12
    if pair in ("unlike", "of four", "sharp and flat"):
        assert blocks > 1.005 * tokens


@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_equal_laws_accept_everything(rule: Rule) -> None:
    p, q = PAIRS["equal"]
    rounds = list(played(drafts_of(chain_of(3), p, q), rule, p))
    assert {len(path) for _, path, _ in rounds} == {3}


@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_disjoint_laws_accept_nothing_and_emit_the_targets(rule: Rule) -> None:
    p, q = PAIRS["disjoint"]
    rounds = list(played(drafts_of(chain_of(3), p, q), rule, p))
    assert {len(path) for _, path, _ in rounds} == {0}
    assert {x: pytest.approx(c) for c, _, (x,) in rounds} == {0: 0.3, 1: 0.7}


@pytest.mark.parametrize("pair", ["unlike", "of four", "target truncated"])
def test_more_siblings_keep_more_and_as_many_as_tokens_keep_for_certain(pair: str) -> None:
    p, q = PAIRS[pair]
    rates = [
        accepted(drafts_of([(-1, "q")] * count, p, q), reject, p) for count in range(1, size(p) + 1)
    ]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_guesses_are_kept_with_the_targets_probability(count: int) -> None:
    p, _ = PAIRS["of four"]
    best = p(()).topk(count)
    rounds = played(lambda text, fork: Tree(best.indices.tolist(), [-1] * count), reject, p)
    kept = sum(chance for chance, path, _ in rounds if path)
    assert kept == pytest.approx(float(best.values.sum()), abs=1e-12)


def test_more_siblings_than_the_draft_has_tokens_are_never_tested() -> None:
    """Three draws without replacement from a law of two tokens: the third is none."""
    p, q = fixed([0.5, 0.2, 0.3]), fixed([0.4, 0.6, 0])
    drafts = drafts_of([(-1, "q")] * 3, p, q)
    check(drafts, reject, p)
    assert {node for _, path, _ in played(drafts, reject, p) for node in path} == {0, 1}


# Lossy, and seen to be


def test_typical_acceptance_does_not_have_the_targets_law() -> None:
    p, q = PAIRS["of four"]

    def rule(tree: Tree, law_after: LawAfter, chance: Chance) -> Verdict:
        return typical(tree, law_after, lambda path: chance.draw(law_after(path), len(path)))

    assert distance(joint(drafts_of(chain_of(2), p, q), rule, p, 3), plain(p, 4, 3)) > 0.02
