"""The real code path draws from the target's joint law: sampler, noise, drafting, many seeds.

What enumeration cannot see is tested here: that the random numbers behind the decisions are uniform
and independent of each other, within a round and between rounds. The target and the draft are
tables of logits, a law for every text, so that the joint law of the first two tokens is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from chi_square import p_value
from torch import Tensor

from drafthead.inference.history import History
from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.sampling import Sampler
from drafthead.inference.tree import Tree
from drafthead.inference.warps import Warps

V = 6
DRAFT_IDS = torch.tensor([0, 1, 2, 4, 5])
"""The draft knows fewer tokens than the target."""
PROMPT = (1, 4, 2)
DRAWS = 100_000
Nodes = Sequence[int]
"""A tree's shape: each node's parent; siblings are draws of one group."""
CHAIN: Nodes = (-1, 0)
TREE: Nodes = (-1, -1, 0, 0)

CASES: dict[str, tuple[str, Nodes]] = {
    "coupled, chain": ("coupled", CHAIN),
    "coupled, tree": ("coupled", TREE),
    "rejection, chain": ("rejection", CHAIN),
    "rejection, tree": ("rejection", TREE),
    "block, chain": ("block", CHAIN),
}


class Tables:
    """Logits by text: the target's, and a draft that resembles it (draft vocabulary)."""

    def __init__(self, unlike: float = 0.8) -> None:
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._unlike = unlike

    def __call__(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if text not in self._known:
            key = 7 + sum((t + 1) * 11**i for i, t in enumerate(text))
            generator = torch.Generator().manual_seed(key)
            target = 1.2 * torch.randn(V, generator=generator)
            noise = self._unlike * torch.randn(len(DRAFT_IDS), generator=generator)
            self._known[text] = target, target[DRAFT_IDS] + noise
        return self._known[text]


TABLES = Tables()
Draft = Callable[[Sampler, tuple[int, ...], Nodes], Tree]


def drafted(sampler: Sampler, text: tuple[int, ...], nodes: Nodes) -> Tree:
    """A tree of fixed shape, as a head grows it: the best-scored tokens below each node."""
    tokens: list[int] = []
    laws: list[Tensor | None] = []
    texts = {-1: text}
    groups: dict[int, tuple[list[int], Tensor | None]] = {}
    ranks: dict[int, int] = {}
    for node, parent in enumerate(nodes):
        if parent not in groups:
            above = texts[parent]
            scores, law = sampler.draft_scores(0, TABLES(above)[1][None], DRAFT_IDS, len(above))
            best = DRAFT_IDS[scores[0].argsort(descending=True)].tolist()
            full = None if law is None else torch.zeros(V).index_copy_(0, DRAFT_IDS, law[0])
            groups[parent] = best, full
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        tokens.append(groups[parent][0][rank])
        laws.append(groups[parent][1])
        texts[node] = (*texts[parent], tokens[-1])
    return Tree(tokens, list(nodes), laws if sampler.needs_proposals else [])


def text_of(sampler: Sampler, nodes: Nodes, draft: Draft = drafted, length: int = 2) -> list[int]:
    """The first tokens after the prompt, decoded as `Decoder` does: by rounds, no token prefilled.

    One token more is drawn, so that a last round that keeps drafts is not cut short.
    """
    history = History(PROMPT, len(PROMPT) + length + len(nodes) + 1)
    text = PROMPT
    while len(text) < len(PROMPT) + length:
        tree = draft(sampler, text, nodes)
        texts = {-1: text}
        for node, parent in enumerate(tree.parents):
            texts[node] = (*texts[parent], tree.tokens[node])
        logits = torch.stack([TABLES(texts[node])[0] for node in range(-1, len(tree))])
        path, token = sampler.accept(0, tree, logits, history)
        for emitted in (*(tree.tokens[node] for node in path), token):
            history.append(emitted)
            text = (*text, emitted)
        sampler.forget(0, len(text))
    return list(text[len(PROMPT) : len(PROMPT) + length])


def target_law(warps: Warps) -> Tensor:
    """(V * V,) of the first two tokens."""

    def after(*text: int) -> Tensor:
        return warps(TABLES((*PROMPT, *text))[0][None])[0].double().softmax(-1)

    return (after()[:, None] * torch.stack([after(first) for first in range(V)])).flatten()


def fit(
    rule: str,
    nodes: Nodes,
    draws: int,
    warps: Warps | None = None,
    *,
    draft: Draft = drafted,
    noise: type[Noise] = Noise,
) -> float:
    """The p-value of as many texts, each of a stream of its own; 0 if one is impossible."""
    warps = warps or Warps()
    counts = torch.zeros(V * V, dtype=torch.float64)
    for stream in range(draws):
        first, second = text_of(Sampler(warps, [noise(3, stream, V)], rule), nodes, draft)
        counts[V * first + second] += 1
    law = target_law(warps)
    if counts[law == 0].sum() > 0:
        return 0.0
    return p_value(counts[law > 0], law[law > 0] * draws)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_f50_drafted_text_has_the_targets_joint_law(case: str) -> None:
    """Bonferroni over the cases."""
    assert fit(*CASES[case], DRAWS) > 1e-3 / len(CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "warps",
    [Warps.of(1.5), Warps.of(0.7, top_k=3), Warps.of(1.0, top_p=0.8)],
    ids=["hot", "top-k", "top-p"],
)
def test_f51_every_rule_draws_from_the_warped_law(case: str, warps: Warps) -> None:
    assert fit(*CASES[case], 3000, warps) > 1e-3 / (3 * len(CASES))


@pytest.mark.parametrize("case", CASES)
def test_f51_top_k_1_is_greedy(case: str) -> None:
    """Whatever the seed: the law has one token left, and no draft survives without it."""
    rule, nodes = CASES[case]
    greedy = text_of(Sampler(), nodes)
    for stream in range(50):
        noise = [Noise(3, stream, V)]
        assert text_of(Sampler(Warps.of(1.0, top_k=1), noise, rule), nodes) == greedy


# Negative controls: mistakes that only the real numbers can show


class OneStream(Noise):
    """Drafts, tests and recoveries read the same numbers."""

    def _uniform(self, position: int, purpose: Purpose, count: int):  # type: ignore[no-untyped-def]
        return super()._uniform(position, Purpose.COUPLED, count)


class OneNumberForSiblings(Noise):
    """Siblings are tested with the same number."""

    def uniform(self, position: int, purpose: Purpose = Purpose.ACCEPT, index: int = 0) -> float:
        return super().uniform(position, purpose, 0)


class LooksAheadTwice(Noise):
    """What a round drew for positions that it did not decide, a later round draws again."""

    def forget(self, position: int) -> None:
        super().forget(position)
        self._decided = 0


def guessed(sampler: Sampler, text: tuple[int, ...], nodes: Nodes) -> Tree:
    """The draft's most likely tokens, always, with the claim that they were drawn."""
    drawn = drafted(sampler, text, nodes)
    likely = drafted(Sampler(), text, nodes)
    return Tree(likely.tokens, likely.parents, drawn.proposals)


@pytest.mark.parametrize("case", ["rejection, chain", "rejection, tree", "block, chain"])
def test_control_one_stream_for_all_is_seen(case: str) -> None:
    assert fit(*CASES[case], 3000, noise=OneStream) < 1e-6


def test_control_one_number_for_siblings_is_seen() -> None:
    assert fit("rejection", TREE, 3000, noise=OneNumberForSiblings) < 1e-6


def test_control_numbers_of_a_refused_block_used_again_are_seen() -> None:
    """Block verification looks at all its draws before it refuses some; token by token does not."""
    assert fit("block", CHAIN, 30_000, noise=LooksAheadTwice) < 1e-6
    assert fit("rejection", CHAIN, 3000, noise=LooksAheadTwice) > 1e-3


def test_control_likely_tokens_called_draws_are_seen() -> None:
    assert fit("rejection", CHAIN, 3000, draft=guessed) < 1e-6
