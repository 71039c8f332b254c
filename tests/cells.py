"""The matrix of decoding: families × drafters × trees × attention, and how one cell is run.

Every cell begins with three forced rounds, of which the target accepts nothing, a part and all; in
trees the right token comes after a wrong sibling, so that a branch is committed that is not the
first. Then the drafter under test goes on from there.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from drafts import HalfRight, Random, own_greedy, prompt_of
from families import EAGER_ONLY, FAMILIES
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.heads.contract import ContractError, describe
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.decoder import decode
from drafthead.inference.drafters import Drafter, LookupDrafter, MergedDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, parse_shape
from drafthead.inference.warps import Warps

DRAFTERS = ("oracle", "half-right", "always wrong", "random", "n-gram", "sibling", "head")
TREES = ("chain", "static", "dynamic")
ATTENTION = ("sdpa", "eager")
SHAPES = {"chain": "chain:4", "static": "static:0,1,0.0,0.1,1.0,0.1.0", "dynamic": "tree:4x2:7"}

LENGTHS = (1, 7, 23, 60)
"""Of the prompts; windows are of 16."""
TOKENS = 64
DEPTH = 4
LAYERS = (1, 2, 3)


@dataclass(frozen=True)
class Cell:
    family: str
    drafter: str
    tree: str
    attention: str

    def __str__(self) -> str:
        return f"{self.family}, {self.drafter}, {self.tree}, {self.attention}"


def cells() -> list[Cell]:
    """All of them; sdpa knows no soft cap inside the attention."""
    return [
        Cell(family, drafter, tree, attention)
        for family in FAMILIES
        for attention in ATTENTION
        if attention == "eager" or family not in EAGER_ONLY
        for drafter in DRAFTERS
        for tree in TREES
    ]


def pairwise() -> list[Cell]:
    """One cell for each family and drafter, such that all pairs of other settings meet, too."""
    chosen = []
    for f, family in enumerate(FAMILIES):
        for d, drafter in enumerate(DRAFTERS):
            tree = TREES[(f + d) % 3]
            eager = family in EAGER_ONLY or (f + d // 3 + d % 2) % 2
            chosen.append(Cell(family, drafter, tree, ATTENTION[bool(eager)]))
    return chosen


@dataclass(frozen=True)
class Ground:
    """A target in fp64, and what transformers' own greedy loop makes of the prompts."""

    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]


@functools.lru_cache(maxsize=4)
def ground(family: str, attention: str) -> Ground:
    model = FAMILIES[family]().double()
    model.set_attn_implementation(attention)
    target = Target(model)
    prompts = [prompt_of(n, vocab_size=min(512, target.vocab_size)) for n in LENGTHS]
    return Ground(target, prompts, [own_greedy(target, p, TOKENS) for p in prompts])


# Drafters


class Varying(HalfRight):
    """Each right token comes after none, one or two wrong ones, another number each time."""

    def _branching(self, branch: list[int]) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for depth, token in enumerate(branch):
            # The first level has a wrong branch before the right one in any case.
            for wrong in range(random.Random(token + depth).randint(depth == 0, 2)):
                tokens.append(self._other(token, by=2 + wrong))
                parents.append(at)
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        return Tree(tokens, parents, source=self.name)


class RandomStatic(Random):
    """Random tokens in a tree of one shape."""

    PARENTS = (-1, -1, 0, 0, 1, 2)

    def _draft(self, depth: int) -> Tree:
        if depth < 3:
            return Tree()
        tokens = self.random.choices(range(self.vocab_size), k=len(self.PARENTS))
        return Tree(tokens, list(self.PARENTS), source=self.name)


class Salted:
    """Three forced rounds for each row, then the drafter's own."""

    name = "salted"
    RIGHT = (0, 2, DEPTH)

    def __init__(self, own: Drafter, texts: Sequence[Sequence[int]], tree: str) -> None:
        self.own, self.layers = own, own.layers
        self.forced = [forced(texts, right, tree) for right in self.RIGHT]
        self.nodes = max(own.nodes, self.forced[0].nodes)

    def open(self, batch: int, capacity: int) -> None:
        self.rounds = [0] * batch
        for part in (self.own, *self.forced):
            part.open(batch, capacity)

    def start(self, row: int) -> None:
        self.rounds[row] = 0
        for part in (self.own, *self.forced):
            part.start(row)

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        for part in (self.own, *self.forced):
            part.observe(row, ids, features)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        salted = [n < len(self.forced) for n in self.rounds]
        rest = [0 if s else depth for s, depth in zip(salted, depths, strict=True)]
        trees = self.own.propose(ids, rest, sampler) if max(rest) > 0 else [Tree()] * len(ids)
        for row, depth in enumerate(depths):
            if salted[row] and depth > 0:
                only = [depth if r == row else 0 for r in range(len(ids))]
                trees[row] = self.forced[self.rounds[row]].propose(ids, only, sampler)[row]
            self.rounds[row] += 1
        return trees


def forced(texts: Sequence[Sequence[int]], right: int, tree: str) -> HalfRight:
    """The first `right` of four tokens are right."""
    kind = Varying if tree == "dynamic" else HalfRight
    made = kind(texts, right, DEPTH, tree=tree != "chain")
    made.nodes = 3 * DEPTH + 1
    return made


def drafter_of(cell: Cell, on: Ground, texts: Sequence[Sequence[int]]) -> Drafter:
    """The cell's drafter; `texts` are what forced ones look up."""
    if cell.drafter in ("oracle", "half-right", "always wrong"):
        right = {"oracle": DEPTH, "half-right": 2, "always wrong": 0}[cell.drafter]
        return forced(texts, right, cell.tree)
    if cell.drafter == "random":
        if cell.tree == "static":
            return RandomStatic(0)
        return Random(0, tree=cell.tree == "dynamic")
    if cell.drafter == "n-gram":
        if cell.tree == "chain":
            return LookupDrafter(DEPTH, longest=2, shortest=1)
        # A tree of n-grams is one that they share with another drafter.
        lookup = LookupDrafter(DEPTH, longest=9, shortest=1)
        return MergedDrafter(lookup, forced(texts, 1, cell.tree))
    head = sibling_of(on) if cell.drafter == "sibling" else head_of_family(cell.family)
    return HeadDrafter(head, parse_shape(SHAPES[cell.tree]))


def sibling_of(on: Ground) -> Sibling:
    """The target itself with a little noise in its weights: often right, never always."""
    model = copy.deepcopy(on.target.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.std() * 0.05)
    return Sibling.of(model, None, on.target, check=False)


@functools.lru_cache(maxsize=4)
def head_of_family(family: str) -> DraftHead:
    """A tiny EAGLE-3 head, overfitted to the very texts, so that it is right now and then.

    Raises ContractError for a target whose output rows no head can borrow.
    """
    on = ground(family, "eager")
    ids, mask = _padded(on.texts, on.prompts)
    model: PreTrainedModel = copy.deepcopy(on.target.model).float()
    target = Target(model)
    features, last = target.states(ids, LAYERS)
    batch = TeacherBatch(ids, mask, features, last, top=ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = Eagle3Settings(draft_vocab_size=None, intermediate_size=96)
        head = settings.build(describe(model, None, LAYERS, {}), model.config, None)
        head.bind(model)
    optimiser = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(80):
        loss = torch.zeros(())
        for prediction in head.unroll(batch, 2):
            loss = loss + F.cross_entropy(prediction.logits, ids.flatten()[prediction.teacher + 1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    head = head.double().eval()
    head.bind(on.target.model, check=False)
    return head


def has_head(family: str) -> bool:
    """Whether a head can borrow this family's output rows."""
    try:
        describe(FAMILIES[family](), None, LAYERS, {})
    except ContractError:
        return False
    return True


def _padded(
    texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """(B, T) ids, padded on the right, and the mask of what followed the prompts."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    at = torch.arange(width)[None]
    begin, end = (torch.tensor([len(x) for x in rows])[:, None] for rows in (prompts, texts))
    return ids, (at >= begin) & (at < end)


# Running a cell


def run(cell: Cell) -> None:
    """Greedy ids of all prompts together, and of one alone, are transformers' own."""
    on = ground(cell.family, cell.attention)
    drafter = Salted(drafter_of(cell, on, on.texts), on.texts, cell.tree)
    for rows in (slice(0, 4), slice(2, 3)):
        decoded, _ = decode(on.target, on.prompts[rows], Sampler(), drafter, max_new_tokens=TOKENS)
        for row, text in zip(decoded, on.texts[rows], strict=True):
            assert row.ids == text, f"{cell}: differs at {first_difference(row, text)}"
            assert [r.accepted for r in row.rounds[:3]] == list(Salted.RIGHT), f"{cell}: forced"
            assert len(row.rounds) > 3, f"{cell}: its own drafter was never asked"


SAMPLED: dict[str, list[LogitsProcessor]] = {
    "T = 0.3": [TemperatureLogitsWarper(0.3)],
    "T = 1": [],
    "top-k 5": [TopKLogitsWarper(5)],
    "top-p 0.8": [TopPLogitsWarper(0.8)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)],
}


def run_sampled(family: str, drafter: str, setting: str) -> None:
    """With one seed the ids are plain keyed decoding's, for all trees and in any batch order."""
    on = ground(family, "eager")

    def drawn(made: Drafter | None, order: Sequence[int]) -> list[list[int]]:
        noise = [Noise(7, stream, on.target.vocab_size) for stream in order]
        sampler = Sampler(Warps(SAMPLED[setting]), noise)
        prompts = [on.prompts[row] for row in order]
        rows, _ = decode(on.target, prompts, sampler, made, max_new_tokens=TOKENS // 2)
        return [row.ids for row in rows]

    texts = [drawn(None, [row])[0] for row in range(len(LENGTHS))]
    assert texts != [text[: len(texts[row])] for row, text in enumerate(on.texts)], "not sampled"
    for tree in TREES:
        made = Salted(drafter_of(Cell(family, drafter, tree, "eager"), on, texts), texts, tree)
        for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
            found = drawn(made, order)
            assert found == [texts[row] for row in order], f"{drafter}, {tree}, {setting}"


def first_difference(row: Row, text: Sequence[int]) -> int:
    pairs: Iterator[tuple[int, int]] = zip(row.ids, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(row.ids))
