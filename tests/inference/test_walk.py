"""Greedy and coupled acceptance: a node is kept only if it is the target's own choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from drafthead.inference.history import History
from drafthead.inference.noise import Noise
from drafthead.inference.sampling import AT_ONCE, NotFiniteError, Sampler
from drafthead.inference.tree import Tree
from drafthead.inference.verify import RULES, choose, walk
from drafthead.inference.warps import UnsupportedSamplingError, Warps

V = 4


def scripted(choices: dict[int, int]) -> Callable[[Sequence[int]], int]:
    """The target's token after each node (-1: the root); a node that is not listed is not asked."""
    return lambda path: choices[path[-1] if path else -1]


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
    asked: list[list[int]] = []

    def choice_after(path: Sequence[int]) -> int:
        asked.append(list(path))
        return choices[path[-1] if path else -1]

    path, token = walk(tokens, parents, choice_after)
    at = -1
    for node in path:
        assert parents[node] == at
        assert tokens[node] == choices[at]
        at = node
    assert token == choices[at]
    assert not [n for n in range(30) if parents[n] == at and tokens[n] == token]
    assert asked == [path[:length] for length in range(len(path) + 1)]


def test_ties_go_to_the_lowest_id() -> None:
    assert choose(torch.tensor([1.0, 2.0, 2.0, 0.0]), None) == 1
    assert choose(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 0


def test_coupled_choice_is_the_draft_choice_where_laws_are_equal() -> None:
    """Same logits and same noise: the draft's best candidate is the target's token."""
    sampler = Sampler(noise=[Noise(0, 0, V)])
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    scores, law = sampler.draft_scores(0, logits, torch.arange(V), 9)
    _, token = sampler.accept(0, Tree(), logits, History(range(9), 9))
    assert law is None
    assert int(scores[0].argmax()) == token


# The sampler


def random_trees(count: int, nodes: int, seed: int, tokens: int = 3) -> list[Tree]:
    """Trees of few tokens, so that branches agree with the target now and then."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    return [
        Tree([draw(tokens) for _ in range(nodes)], [draw(n + 1) - 1 for n in range(nodes)])
        for _ in range(count)
    ]


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.exact])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [3, AT_ONCE // 20])
def test_greedy_is_the_walk_whatever_exact_rule_is_named(
    rule: str, dtype: torch.dtype, vocab: int
) -> None:
    """In one pass over a batch, or node by node: the lowest of the best ids, after each node."""
    trees = random_trees(4, 6, seed=vocab)
    logits = torch.full((4, 7, vocab), -1.0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    logits[..., :3] = torch.randint(0, 2, (4, 7, 3), generator=generator).to(dtype)  # many ties
    histories = {row: History(range(5), 20) for row in range(4)}
    ours = Sampler(rule=rule).decide(histories, trees, logits)
    for row, tree in enumerate(trees):
        best = [values.index(max(values)) for values in logits[row].tolist()]
        at = {-1: best[0]} | dict(enumerate(best[1:]))
        assert ours[row] == walk(tree.tokens, tree.parents, scripted(at))
    assert any(path for path, _ in ours.values())


@pytest.mark.parametrize("vocab", [512, AT_ONCE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "coupled"])
def test_logits_that_are_not_finite_are_refused_only_where_they_decide(
    vocab: int, value: float, noise: bool
) -> None:
    """In a branch that is not kept they do not matter; a kept node's become the next root's; the
    root's own are an error.
    """
    sampler = Sampler(noise=[Noise(0, row, vocab) for row in range(2)] if noise else None)
    histories = {row: History(range(5), 20) for row in range(2)}
    logits = torch.zeros(2, 3, vocab)
    logits[:, :, 7] = 1e3
    trees = [Tree([7, 6], [-1, -1]), Tree([7, 6], [-1, -1])]
    logits[1, 2] = value  # after node 1, which is not the target's choice
    assert sampler.decide(histories, trees, logits) == {0: ([0], 7), 1: ([0], 7)}
    logits[1, 1, 400] = value
    assert sampler.decide(histories, trees, logits) == {0: ([0], 7), 1: ([], 7)}
    logits[1, 0, 400] = value
    with pytest.raises(NotFiniteError, match="not finite at a committed token"):
        sampler.decide(histories, trees, logits)


def test_a_rule_that_changes_the_law_must_be_allowed_to() -> None:
    with pytest.raises(UnsupportedSamplingError, match="allow it with lossy=True") as refusal:
        Sampler(rule="typical")
    assert "\n" not in str(refusal.value)
    assert Sampler(rule="typical", lossy=True).rule == "typical"
    with pytest.raises(UnsupportedSamplingError, match="rule 'lenient': choose one of coupled"):
        Sampler(rule="lenient", lossy=True)


def test_block_refuses_a_tree() -> None:
    """A tree is not a chain with more tokens: siblings would be taken for successors."""
    tree, logits, history = Tree([1, 2], [-1, -1]), torch.zeros(3, V), History(range(4), 4)
    with pytest.raises(UnsupportedSamplingError, match="'block' verifies chains only"):
        Sampler(noise=[Noise(0, 0, V)], rule="block").accept(0, tree, logits, history)
    Sampler(noise=[Noise(0, 0, V)], rule="rejection").accept(0, tree, logits, history)


@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "sampled"])
def test_typical_is_typical_at_temperature_0_too(noise: bool) -> None:
    """It keeps a likely token that is not the best, and drafts without noise."""
    logits = torch.tensor([[2.0, 1.9, -9, -9], [-9, -9, -9, 9.0], [-9, -9, 9.0, -9]])
    sampler = Sampler(noise=[Noise(0, 0, V)] if noise else None, rule="typical", lossy=True)
    tree = Tree([1, 2], [-1, -1])
    assert sampler.decide({0: History(range(3), 6)}, [tree], logits[None]) == {0: ([0], 3)}
    scores, law = sampler.draft_scores(0, logits, torch.arange(V), 3)
    assert torch.equal(scores, logits)
    assert law is None


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical", "greedy"])
def test_f51_processors_see_each_nodes_own_path(rule: str) -> None:
    """What is decided after a node is what plain decoding decides after that node's text."""
    vocab, history = 6, History([1, 2, 3, 1], 12)
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Watched(Warps):
        def __call__(
            self, logits: Tensor, history: History | None = None, path: Sequence[int] = ()
        ) -> Tensor:
            assert history is not None
            seen.append((int(logits.argmax()), tuple(history.text(path)[0].tolist())))
            return super().__call__(logits, history, path)

    warps = Watched([RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)])
    noise = None if rule == "greedy" else [Noise(0, 0, vocab)]
    sampler = Sampler(warps, noise, "coupled" if rule == "greedy" else rule, lossy=True)
    tree = (
        Tree([5, 4, 3], [-1, 0, 1]) if rule == "block" else Tree([0, 5, 2, 4, 3], [-1, -1, 0, 1, 3])
    )
    texts = {-1: (1, 2, 3, 1)}
    for node, parent in enumerate(tree.parents):
        texts[node] = (*texts[parent], tree.tokens[node])
    # Every node's logits are for a token of its own, so that rows cannot be mixed up unseen.
    rows = {n: 5 - len(texts[n]) if rule == "block" else n for n in texts}
    logits = torch.stack([3.0 * torch.eye(vocab)[rows[n] % vocab] for n in texts])
    for node, parent in enumerate(tree.parents):  # and says strongly what is drafted below it
        if rule == "block" or node in (1, 3, 4):
            logits[parent + 1, tree.tokens[node]] = 60
    path, _ = sampler.accept(0, tree, logits, history)
    assert path == ([0, 1, 2] if rule == "block" else [1, 3, 4])
    best = {texts[n]: int(logits[n + 1].argmax()) for n in texts}
    assert {text for _, text in seen} >= {texts[n] for n in (-1, *path)}
    assert all(top == best[text] for top, text in seen), "logits of another node than the text's"


def test_f50_draws_that_underflow_are_no_draws() -> None:
    """A sharp draft at a low temperature: what its law cannot tell from 0 is not drawn, so that no
    sibling is tested with a probability that was lost.
    """
    logits = torch.tensor([[9.0, 8.0, 1.9, 1.7, -2.0]])
    sampler = Sampler(Warps.of(0.1), [Noise(0, 0, 5)], "rejection")
    scores, law = sampler.draft_scores(0, logits, torch.arange(5), 4)
    assert law is not None
    assert scores.isfinite().tolist() == (law > 0).tolist() == [[True, True, False, False, False]]
    best = scores[0].argsort(descending=True, stable=True).tolist()
    tree = Tree(best[:4], [-1] * 4, [law[0]] * 4)
    target = torch.full((5, 5), -5.0)
    target[:, 4] = 5.0  # refuses them all
    assert sampler.accept(0, tree, target, History(range(4), 6)) == ([], 4)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("broken", [1, 2, 3])
def test_f44_a_kept_node_that_broke_is_emitted_and_becomes_the_next_root(
    rule: str, broken: int
) -> None:
    """The tokens up to it are those of the unbroken draft; nothing behind it is decided."""
    tokens, V = [3, 1, 2], 6
    logits = torch.zeros(4, V)
    for row, token in enumerate([*tokens, 4]):
        logits[row, token] = 50.0
    law = torch.full((V,), 1 / V)
    tree = Tree(tokens, [-1, 0, 1], [law] * 3 if rule != "coupled" else [])

    def kept(rows: torch.Tensor) -> list[int]:
        path, token = Sampler(noise=[Noise(1, 0, V)], rule=rule).accept(
            0, tree, rows, History(range(4), 9)
        )
        return [*(tree.tokens[node] for node in path), token]

    assert kept(logits) == [*tokens, 4]
    logits[broken] = float("nan")
    assert kept(logits) == tokens[:broken]
