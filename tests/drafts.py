"""Drafters whose fate is known, for tests of decoding: no training, no luck.

A *text* is a prompt with the continuation that the target gives it. Forced drafters look a row up
among texts and propose its continuation, right or wrong on purpose. In trees, each right token
comes after a wrong sibling, so the accepted path is never the first branch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.inference.decoder import decode
from drafthead.inference.drafters import Drafter
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain
from drafthead.inference.warps import Warps

VOCAB = 512


class _Watching:
    """Keeps the features that the decoder gave for each row since its start."""

    name = "forced"

    def __init__(self, nodes: int, layers: tuple[int, ...] = ()) -> None:
        self.nodes = nodes
        self.layers = layers
        self.features: dict[int, list[Tensor]] = {}
        self.ids: dict[int, list[int]] = {}

    def open(self, batch: int, capacity: int) -> None:
        self.features, self.ids = {}, {}

    def start(self, row: int) -> None:
        self.features[row] = []

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        self.ids[row] = list(ids)
        if features is not None:
            self.features[row].append(features)


class HalfRight(_Watching):
    """The first `right` tokens of a draft are right, the next is wrong, later ones are right again.

    `right` may differ by text.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        right: int | Sequence[int],
        length: int = 4,
        *,
        tree: bool = False,
        layers: tuple[int, ...] = (),
        vocab_size: int = VOCAB,
    ) -> None:
        super().__init__(2 * length + 1 if tree else length, layers)
        self.texts = [list(text) for text in texts]
        self.right = [right] * len(texts) if isinstance(right, int) else list(right)
        self.length, self.tree, self.vocab_size = length, tree, vocab_size

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        pairs = zip(ids, depths, strict=True)
        return [self._draft(list(row), min(depth, self.length)) for row, depth in pairs]

    def _draft(self, ids: list[int], depth: int) -> Tree:
        known = [n for n, text in enumerate(self.texts) if text[: len(ids)] == ids]
        if depth < 1 or not known:
            return Tree()
        right = self.right[known[0]]
        branch = self.texts[known[0]][len(ids) : len(ids) + depth]
        tokens = [self._other(t) if d == right else t for d, t in enumerate(branch)]
        return self._branching(tokens) if self.tree else chain(tokens, source=self.name)

    def _other(self, token: int, by: int = 1) -> int:
        return (token + by) % self.vocab_size

    def _branching(self, branch: list[int]) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in branch:
            tokens += [self._other(token, by=2), token]
            parents += [at, at]
            at = len(tokens) - 1
        if len(branch) > 1:  # a right token below a wrong one: must not be kept
            tokens.append(branch[1])
            parents.append(0)
        return Tree(tokens, parents, source=self.name)


class Oracle(HalfRight):
    """Proposes the target's own continuation."""

    def __init__(
        self, texts: Sequence[Sequence[int]], length: int = 4, *, tree: bool = False
    ) -> None:
        super().__init__(texts, length, length, tree=tree)


class AlwaysWrong(HalfRight):
    """Its first token is never the target's."""

    def __init__(
        self, texts: Sequence[Sequence[int]], length: int = 4, *, tree: bool = False
    ) -> None:
        super().__init__(texts, 0, length, tree=tree)


class Random(_Watching):
    """Random tokens in chains or trees of random shape, an empty one now and then."""

    def __init__(
        self, seed: int, nodes: int = 6, *, tree: bool = False, vocab_size: int = VOCAB
    ) -> None:
        super().__init__(nodes)
        self.random = random.Random(seed)
        self.tree, self.vocab_size = tree, vocab_size

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        return [self._draft(depth) for depth in depths]

    def _draft(self, depth: int) -> Tree:
        size = self.random.randint(0, self.nodes)
        if not self.tree:
            size = min(size, max(0, depth))
        tokens = self.random.choices(range(self.vocab_size), k=size)
        if not self.tree:
            return chain(tokens, source=self.name)
        parents: list[int] = []
        depths: list[int] = []
        for node in range(size if depth > 0 else 0):
            parent = self.random.choice([-1, *(n for n in range(node) if depths[n] < depth)])
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return Tree(tokens[: len(parents)], parents, source=self.name)


# References


def endless(num_layers: int = 6, vocab_size: int = 512) -> LlamaForCausalLM:
    """A target without an end token, so that every run has its full length."""
    model = tiny_target(num_layers=num_layers, vocab_size=vocab_size)
    model.generation_config.eos_token_id = None
    return model


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    """Random ids, none of them special."""
    return random.Random(1000 * seed + length).choices(range(3, vocab_size), k=length)


def own_greedy(target: Target, prompt: Sequence[int], tokens: int) -> list[int]:
    """Prompt and greedy continuation as transformers' own loop makes it."""
    ids = torch.tensor([list(prompt)])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    text: list[int] = out[0].tolist()
    return text


def keyed(
    target: Target,
    rows: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 5,
    streams: Sequence[int] | None = None,
    rule: str = "coupled",
) -> Sampler:
    """A sampler with the noise of `rows` streams."""
    streams = range(rows) if streams is None else streams
    noise = [Noise(seed, stream, target.vocab_size) for stream in streams]
    return Sampler(Warps.of(temperature, top_k, top_p), noise, rule)


def ids_of(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    drafter: Drafter | None = None,
    tokens: int = 24,
    eos: Sequence[int] = (),
) -> list[list[int]]:
    """The texts of prompts decoded together."""
    rows, _ = decode(target, prompts, sampler, drafter, max_new_tokens=tokens, eos=eos)
    return [row.ids for row in rows]


def rows_of_run(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None,
    tokens: int = 24,
    eos: Sequence[int] = (),
) -> list[Row]:
    """The greedy rows of prompts decoded together."""
    return decode(target, prompts, Sampler(), drafter, max_new_tokens=tokens, eos=eos)[0]
