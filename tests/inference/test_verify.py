"""The pieces of the acceptance rules, by hand and at their edges; `test_rules` enumerates them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from enumeration import (
    Fork,
    Rule,
    Table,
    Text,
    table,
)
from torch import Tensor

from drafthead.inference.tree import Tree, chain
from drafthead.inference.verify import (
    RULES,
    accept_probability,
    block,
    drawn,
    reject,
    residual,
    typical,
    typical_threshold,
    without,
)

V = 3
P, Q = table(V, 1), table(V, 2)


def probabilities(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Pieces


def test_residual_of_equal_laws_is_a_law() -> None:
    """It has probability zero up to rounding; NaN there would be worse than any choice."""
    p = P(())
    assert torch.equal(residual(p, p), p)
    assert residual(p, p * (1 + 1e-15)).sum() == pytest.approx(1)


@pytest.mark.parametrize("probability", [0.0, math.nan])
@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_f50_a_token_its_law_does_not_know_is_an_error(rule: Rule, probability: float) -> None:
    law = torch.tensor([0.5, probability, 0.5])
    with pytest.raises(ValueError, match="q is not the law it was drawn from"):
        rule(chain([1], [law]), lambda path: P(()), Fork(()))


def test_f50_a_sibling_drawn_twice_is_an_error() -> None:
    """Draws with replacement are not what the rule can verify."""
    law = probabilities(0.5, 0.25, 0.25)
    with pytest.raises(ValueError, match=r"token 1 was proposed with probability 0\.0"):
        reject(Tree([1, 1], [-1, -1], [law, law]), lambda path: P(()), Fork((0, 0)))


def test_without_renormalises_what_is_left() -> None:
    law = probabilities(0.5, 0.3, 0.2)
    assert without(law, []) is law
    assert without(law, [0]).tolist() == pytest.approx([0, 0.6, 0.4])  # type: ignore[union-attr]
    assert without(law, [0, 2]).tolist() == [0, 1, 0]  # type: ignore[union-attr]
    assert without(law, [0, 1, 2]) is None
    assert law.tolist() == [0.5, 0.3, 0.2], "siblings share it"


def test_siblings_drawn_from_unlike_laws_keep_their_own() -> None:
    """Equal numbers do not make one group: sharing the tensor does."""
    law = probabilities(0.5, 0.5, 0)
    tree = Tree([0, 0], [-1, -1], [law, law.clone()])
    fork = Fork((0,))
    reject(tree, lambda path: probabilities(0.2, 0.2, 0.6), fork)
    assert fork.probability == pytest.approx(0.6), "the second is tested with q = 0.5, p = 0"


def test_a_law_shared_by_two_levels_makes_no_group() -> None:
    """A draft whose law depends on nothing may hand out the same tensor everywhere."""
    law, fork = probabilities(0.5, 0.4, 0.1), Fork((0, 1, 1))
    tree = Tree([0, 1, 0], [-1, -1, 1], [law] * 3)
    path, _ = reject(tree, lambda path: probabilities(0.4, 0.5, 0.1), fork)
    assert path == [1, 2], "token 0, refused above, is still a draw below"


def test_an_impossible_token_is_never_kept_and_a_certain_one_always() -> None:
    for rule in (reject, block):
        p, q = probabilities(0, 0.6, 0.4), probabilities(0.8, 0.1, 0.1)
        path, token = rule(chain([0], [q]), lambda path: p, Fork(()))  # noqa: B023
        assert (path, token) == ([], 1)
        certain = probabilities(0, 1, 0)
        assert rule(chain([1], [certain]), lambda path: certain, Fork(()))[0] == [0]  # noqa: B023


def test_only_reached_nodes_are_looked_at() -> None:
    """A branch that is not kept cannot matter, not even by being NaN."""
    tree = Tree([0, 1, 2, 2], [-1, -1, 0, 1], [None] * 4)
    asked: list[list[int]] = []

    def law_after(path: Sequence[int]) -> Tensor:
        asked.append(list(path))
        return probabilities(0, 1, 0)

    assert reject(tree, law_after, Fork(()))[0] == [1]
    assert asked == [[], [1]]


def test_block_probabilities_golden() -> None:
    """Two tokens; by hand from h_1 = S / (S + 1 - w_1) and h_2 = w_2 (arXiv 2403.10444)."""
    p = [probabilities(0.2, 0.3, 0.5), probabilities(0.6, 0.3, 0.1), probabilities(1, 0, 0)]
    q = [probabilities(0.4, 0.3, 0.3), probabilities(0.5, 0.2, 0.3)]
    # w_1 = 0.2 / 0.4 = 0.5; w_2 = 0.5 * 0.3 / 0.2 = 0.75.
    # S_1 = max(0.3 - 0.5, 0) + max(0.15 - 0.2, 0) + max(0.05 - 0.3, 0) = 0: h_1 = 0.
    tree = chain([0, 1], q)
    whole = Fork((1,))
    assert block(tree, lambda path: p[len(path)], whole) == ([0, 1], 0)
    assert whole.probability == pytest.approx(0.75)
    none = Fork(())
    assert block(tree, lambda path: p[len(path)], none) == ([], 2)
    assert none.probability == pytest.approx(0.25), "h_1 = 0; max(p_1 - q_1, 0) is all on token 2"
    # With q_2 = (0.1, 0.2, 0.7): S_1 = 0.3 - 0.1 = 0.2, h_1 = 0.2 / 0.7.
    tree = chain([0, 1], [q[0], probabilities(0.1, 0.2, 0.7)])
    one = Fork((0, 1))
    assert block(tree, lambda path: p[len(path)], one) == ([0], 0)
    assert one.probability == pytest.approx(0.25 * 0.2 / 0.7)


def test_block_survives_laws_that_differ_by_rounding() -> None:
    """No prefix has mass left over, yet the whole was refused: a chance of 1e-16, and 0 / 0."""
    q = probabilities(0.5, 0.25, 0.25)
    p = probabilities(0.5, 0.25, 0.25 - 2**-54)
    path, token = block(chain([0, 2], [q, q]), lambda path: p if path else q, Fork((0,)))
    assert path == [0]
    assert p[token] > 0


def test_block_asks_for_nothing_behind_an_impossible_token() -> None:
    asked: list[list[int]] = []

    def law_after(path: Sequence[int]) -> Tensor:
        asked.append(list(path))
        return probabilities(0, 0.5, 0.5)

    block(chain([1, 0, 1], [P(())] * 3), law_after, Fork(()))
    assert asked == [[], [0]]


@pytest.mark.parametrize("uniform", [0.0, 0.1, 0.29, 0.31, 0.999, 1 - 2**-53])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 0.7, 1 + 2**-52, 1 - 2**-53])
def test_drawn_inverts_the_cumulative_law(uniform: float, scale: float) -> None:
    """Token 0 and 3 have no probability, and are not drawn at the ends either."""
    law = scale * probabilities(0, 0.3, 0.7, 0)
    assert drawn(law, uniform) == (1 if uniform < 0.3 else 2)
    assert drawn(law.float(), uniform) in (1, 2)


@pytest.mark.parametrize("law", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_law_without_mass_is_an_error(law: list[float]) -> None:
    with pytest.raises(ValueError, match="has no token to draw"):
        drawn(torch.tensor(law), 0.5)


# Typical acceptance


def test_typical_threshold_golden() -> None:
    """min(epsilon, delta exp(-H)): epsilon where the law is sharp, less where it is flat."""
    assert typical_threshold(probabilities(1, 0, 0)) == pytest.approx(0.09)
    assert typical_threshold(torch.full((100,), 0.01)) == pytest.approx(0.3 / 100)
    p = probabilities(0.7, 0.2, 0.1)
    entropy = -sum(x * math.log(x) for x in p.tolist())
    assert typical_threshold(p, 0.5) == pytest.approx(0.3 * math.exp(-entropy))


def test_typical_takes_the_longest_likely_path_and_the_likelier_of_two() -> None:
    flat, sharp = probabilities(0.5, 0.45, 0.05), probabilities(0.92, 0.05, 0.03)
    laws: dict[Text, Tensor] = {
        (): flat,
        (0,): flat,
        (1,): sharp,
        (1, 0): probabilities(0.15, 0.8, 0.05),
    }

    def run(tree: Tree) -> tuple[list[int], Text]:
        def text(path: Sequence[int]) -> Text:
            return tuple(tree.tokens[node] for node in path)

        path, token = typical(tree, lambda path: laws[text(path)], lambda path: 7)
        assert token == 7
        return path, text(path)

    # 0.05 is unlikely even for `flat`, whose threshold is 0.09.
    assert run(Tree([2, 1], [-1, -1])) == ([1], (1,))
    # Both are two long: 0.5 * 0.45 is less than 0.45 * 0.92.
    assert run(Tree([0, 1, 1, 0], [-1, -1, 0, 1])) == ([1, 3], (1, 0))
    # 0.15 is likely enough for any law, though it be the least likely token of this one.
    assert run(Tree([1, 0, 0], [-1, 0, 1])) == ([0, 1, 2], (1, 0, 0))
    # The longest wins, whatever its likelihood; below a refused node nothing counts.
    assert run(Tree([0, 1, 0, 2], [-1, -1, 1, 1])) == ([1, 2], (1, 0))
    assert run(Tree([2, 0], [-1, 0])) == ([], ())


def test_rules_say_what_they_can_do() -> None:
    assert [name for name, rule in RULES.items() if not rule.exact] == ["typical"]
    assert [name for name, rule in RULES.items() if rule.chains_only] == ["block"]
    assert [n for n, rule in RULES.items() if rule.needs_proposals] == ["rejection", "block"]


@pytest.mark.parametrize("seed", range(8))
def test_kept_and_recovered_make_the_target(seed: int) -> None:
    """sum_x q(x) min(1, p(x)/q(x)) = sum_x min(p, q) = 1 - TV."""
    p: Table = table(V, seed, 2.0, zeros=seed % 2 == 0)
    q: Table = table(V, seed + 50, 2.0)
    chances = torch.tensor(
        [accept_probability(p(()), q(()), x) for x in range(V)], dtype=torch.float64
    )
    rate = float((q(()) * chances).sum())
    assert rate == pytest.approx(1 - float((p(()) - q(())).abs().sum() / 2), abs=1e-12)
    whole = q(()) * chances + (1 - rate) * residual(p(()), q(()))
    assert (whole - p(())).abs().max() < 1e-12
