"""The protocol of all drafters, prompt n-gram lookup, and several drafters merged into one tree.

A drafter sees committed tokens and the target's features, proposes a tree per row, and never
decides anything: whatever it proposes, the acceptance rule keeps the output the target's own.

Shapes: B rows, n newly committed tokens, L * D captured features, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.tree import Tree, chain


class Drafter(Protocol):
    """What the decoder needs of a drafter; rows are numbered as in the batch."""

    name: str
    layers: tuple[int, ...]
    """Target layers whose features `observe` wants, ascending; empty for none."""
    nodes: int
    """Most nodes of one tree: the decoder reserves that many slots."""

    def open(self, batch: int, capacity: int) -> None:
        """Start anew for `batch` rows of at most `capacity` tokens, draft nodes included."""

    def start(self, row: int) -> None:
        """Forget what a row held: another sequence begins there."""

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        """Take newly committed tokens.

        `ids` is the row so far; its last token, the root, the target has not run yet. `features`
        (n, L * D) are the states of the n tokens before it that were not observed before.
        """

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        """One tree per row, at most `depths[row]` deep; an empty tree where nothing is proposed."""


class SureDrafter(Drafter, Protocol):
    """A cheap drafter that knows when to be relied on."""

    def sure(self, row: int) -> bool:
        """Whether the row's last proposal is so good that others need not be asked."""


class LookupDrafter:
    """Prompt n-gram lookup: go on as the text did at the latest place with the same ending."""

    name = "lookup"
    layers: tuple[int, ...] = ()

    def __init__(self, length: int, longest: int = 3, shortest: int = 1) -> None:
        if length < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"lookup of {length} tokens on {shortest} to {longest}-grams: "
                "all must be positive, the shortest first"
            )
        self.nodes = length
        self._sizes = range(longest, shortest - 1, -1)

    def open(self, batch: int, capacity: int) -> None:
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(batch)]
        self._indexed = [0] * batch
        self._matched = [0] * batch

    def start(self, row: int) -> None:
        self._places[row], self._indexed[row], self._matched[row] = {}, 0, 0

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        """Note where each n-gram was last followed by something, which an ending is not yet."""
        for end in range(max(self._indexed[row], 1), len(ids)):
            for size in self._sizes:
                if end >= size:
                    self._places[row][tuple(ids[end - size : end])] = end
        self._indexed[row] = len(ids)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        trees = []
        for row, (tokens, depth) in enumerate(zip(ids, depths, strict=True)):
            found = self._find(row, tokens)[: max(0, min(depth, self.nodes))]
            trees.append(chain(found, source=self.name))
        return trees

    def _find(self, row: int, ids: Sequence[int]) -> list[int]:
        for size in self._sizes:
            if len(ids) > size and (place := self._places[row].get(tuple(ids[-size:]))):
                self._matched[row] = size
                return list(ids[place : place + self.nodes])
        self._matched[row] = 0
        return []

    def sure(self, row: int) -> bool:
        """Whether the longest n-gram was found."""
        return self._matched[row] == self._sizes[0]


class MergedDrafter:
    """Several drafters and one tree: the first alone where it is sure, else what all of them draft.

    Common prefixes are shared. Shallow nodes go before deep ones where the budget is short, and the
    others' before the first's, which is not sure of them.
    """

    name = "merged"

    def __init__(self, first: SureDrafter, *others: Drafter, nodes: int | None = None) -> None:
        """`nodes`: most nodes of a merged tree; by default those of the largest part."""
        if not others:
            raise ValueError("merged drafter: nothing to merge; give two drafters or more")
        self.first, self.others = first, others
        self.layers = tuple(sorted({layer for part in others for layer in part.layers}))
        largest = max(part.nodes for part in (first, *others))
        if nodes is not None and nodes < largest:
            raise ValueError(
                f"merged drafter: {nodes} nodes cannot hold one part's {largest}; give more, or "
                "smaller parts"
            )
        self.nodes = nodes or largest

    def open(self, batch: int, capacity: int) -> None:
        for part in (self.first, *self.others):
            part.open(batch, capacity)

    def start(self, row: int) -> None:
        for part in (self.first, *self.others):
            part.start(row)

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        self.first.observe(row, ids, None)
        for part in self.others:
            part.observe(row, ids, self._part_of(features, part.layers))

    def _part_of(self, features: Tensor | None, layers: tuple[int, ...]) -> Tensor | None:
        """The columns of (n, L * D) features that belong to these layers."""
        if not layers or features is None or layers == self.layers:
            return features if layers else None
        by_layer = features.chunk(len(self.layers), dim=-1)
        return torch.cat([by_layer[self.layers.index(layer)] for layer in layers], dim=-1)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        found = self.first.propose(ids, depths, sampler)
        sure = [bool(tree) and self.first.sure(row) for row, tree in enumerate(found)]
        # Sure rows ask the others for nothing; they keep what was committed for their next draft.
        rest = [0 if alone else depth for alone, depth in zip(sure, depths, strict=True)]
        if max(rest) < 1:
            return found
        drafted = [part.propose(ids, rest, sampler) for part in self.others]
        candidates = zip(*drafted, found, strict=True)
        return [
            tree if alone else merge(trees, self.nodes, as_draws=sampler.needs_proposals)
            for alone, tree, trees in zip(sure, found, candidates, strict=True)
        ]


def merge(trees: Sequence[Tree], nodes: int, as_draws: bool = False) -> Tree:
    """One tree of at most `nodes` nodes that holds several; the first tree's come first.

    `as_draws`: for ratio rules, to which a mixture is no draw: the first tree that is not empty.
    """
    trees = [tree for tree in trees if len(tree)]
    if as_draws or len(trees) < 2:
        return trees[0] if trees else Tree()
    number: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    sources: dict[str, None] = {}
    pairs = [(path, tree.source) for tree in trees for path in tree.paths]
    for path, source in sorted(pairs, key=lambda pair: len(pair[0])):
        if path not in number:
            if len(tokens) == nodes or path[:-1] not in number:
                continue
            number[path] = len(tokens)
            parents.append(number[path[:-1]])
            tokens.append(path[-1])
        sources[source] = None
    return Tree(tokens, parents, source="+".join(sources))


def heads_of(drafter: Drafter | None) -> list[DraftHead]:
    """The heads that a drafter asks."""
    if isinstance(drafter, MergedDrafter):
        return [head for part in drafter.others for head in heads_of(part)]
    return [drafter.head] if isinstance(drafter, HeadDrafter) else []
