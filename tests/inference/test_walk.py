"""Greedy and coupled acceptance: a node is kept only if it is the target's own choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafthead.inference.noise import Noise
from drafthead.inference.sampling import Sampler
from drafthead.inference.tree import Tree
from drafthead.inference.verify import choose, walk

V = 4


def scripted(choices: dict[int, int]) -> Callable[[int, int], int]:
    """The target's token after each node (-1: the root); a node that is not listed is not asked."""
    return lambda node, depth: choices[node]


TREE = ([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3])
"""Children of the root: 5 and 6; of 6: 7 and 8; of 8: 9."""


@pytest.mark.parametrize(
    ("choices", "path", "token"),
    [
        ({-1: 5, 0: 7}, [0], 7),
        ({-1: 6, 1: 8, 3: 9, 4: 4}, [1, 3, 4], 4),
        ({-1: 6, 1: 8, 3: 5}, [1, 3], 5),
        ({-1: 6, 1: 5}, [1], 5),
        ({-1: 7}, [], 7),
        ({-1: 9}, [], 9),
    ],
)
def test_greedy_walk_golden(choices: dict[int, int], path: list[int], token: int) -> None:
    """Includes right tokens below wrong parents, and second branches."""
    assert walk(*TREE, scripted(choices)) == (path, token)


def test_walk_of_an_empty_tree_is_plain_decoding() -> None:
    assert walk([], [], scripted({-1: 3})) == ([], 3)


def test_walk_takes_the_first_of_equal_siblings_once() -> None:
    assert walk([5, 5], [-1, -1], scripted({-1: 5, 0: 1})) == ([0], 1)


@pytest.mark.parametrize("seed", range(20))
def test_walk_keeps_a_node_only_if_it_is_the_targets_choice(seed: int) -> None:
    """Against the definition: kept tokens are the choices along the path, and no child goes on."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    parents = [draw(node + 1) - 1 for node in range(30)]
    tokens = [draw(3) for _ in parents]
    choices = {node: draw(3) for node in range(-1, 30)}
    depths: list[int] = []

    def choice_after(node: int, depth: int) -> int:
        depths.append(depth)
        return choices[node]

    path, token = walk(tokens, parents, choice_after)
    at = -1
    for node in path:
        assert parents[node] == at
        assert tokens[node] == choices[at]
        at = node
    assert token == choices[at]
    assert not [n for n in range(30) if parents[n] == at and tokens[n] == token]
    assert depths == list(range(len(path) + 1))


def test_ties_go_to_the_lowest_id() -> None:
    assert choose(torch.tensor([1.0, 2.0, 2.0, 0.0]), None) == 1
    assert choose(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 0


def test_coupled_choice_is_the_draft_choice_where_laws_are_equal() -> None:
    """Same logits and same noise: the draft's best candidate is the target's token."""
    sampler = Sampler(noise=[Noise(0, 0, V)])
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    scores, law = sampler.draft_scores(0, logits, torch.arange(V), 9)
    _, token = sampler.accept(0, Tree(), logits, 9)
    assert law is None
    assert int(scores[0].argmax()) == token
