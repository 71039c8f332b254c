"""Draft trees: topology, depths, ancestor masks, positions, and the shapes they may take; pure.

A tree hangs below the root, the last committed token, which the target has not seen yet. A verify
pass runs root and nodes together, so row 0 of its input is the root and row i + 1 is node i.

Shapes are written so:

    chain:D            one branch of D tokens
    stop:D:C           a chain of D tokens at most, drafted while the chance that all of it is
                       accepted is C or more, as stop:7:0.3: the product of the head's confidences,
                       or of its drafts' own probabilities where it has none
    static:0,1,0.0     these nodes, each the path of ranks that leads to it: the two best tokens,
                       and the best one after the first of them
    tree:DxW:N         best-first: D levels, W nodes expanded a level, the N best of all kept
    auto:DxW:N         the same at most: stopped where the measured cost of a round says so
    off                nothing is drafted: plain decoding

Ranks count from 0, the best.

Shapes: N nodes, n = N + 1 rows of a verify pass, B batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """One row's draft: `tokens[i]` is a child of node `parents[i]`, -1 meaning the root; parents
    come first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    proposals: list[Tensor | None] = field(default_factory=list)
    """For ratio rules: the (V,) law over the target's vocabulary from which a node and its siblings
    were drawn one after another without replacement, in node order (one tensor for all of them);
    None for a fixed guess. Empty: all are."""
    source: str = ""
    """Which drafters made it, so that none is credited with another's gain: `lookup+head`."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"tree of {len(self.tokens)} tokens but {len(self.parents)} parents")
        if self.proposals and len(self.proposals) != len(self.tokens):
            raise ValueError(f"tree of {len(self.tokens)} tokens but {len(self.proposals)} laws")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"tree node {node}: parent {parent} does not come before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Depth of each node; the root's children are at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The tokens that lead to each node, its own the last."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths

    def only(self, kept: Sequence[int]) -> Tree:
        """The tree of these nodes, ascending; each one's parent must be among them."""
        number = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Tree(
            [self.tokens[n] for n in kept],
            [number[self.parents[n]] for n in kept],
            [self.proposals[n] for n in kept] if self.proposals else [],
            self.source,
        )


def chain(tokens: Sequence[int], proposals: Sequence[Tensor | None] = (), source: str = "") -> Tree:
    """A tree of one branch."""
    return Tree(list(tokens), list(range(-1, len(tokens) - 1)), list(proposals), source)


def ancestors(trees: Sequence[Tree]) -> Tensor:
    """(B, n, n) bool: row i of a verify pass may see row j, itself included.

    Rows past a tree's end see the root and themselves.
    """
    n = 1 + max(len(tree) for tree in trees)
    seen = np.zeros((len(trees), n, n), dtype=bool)
    seen[:, np.arange(n), np.arange(n)] = True
    seen[:, :, 0] = True
    for mask, tree in zip(seen, trees, strict=True):
        for node, parent in enumerate(tree.parents):
            mask[node + 1] |= mask[parent + 1]
    return torch.from_numpy(seen)


def rows_of(trees: Sequence[Tree], roots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Token ids and depths, both (B, n), of a verify pass; short rows repeat the root."""
    n = 1 + max(len(tree) for tree in trees)
    tokens = [[r, *t.tokens] + [r] * (n - 1 - len(t)) for r, t in zip(roots, trees, strict=True)]
    depths = [[0, *t.depths] + [0] * (n - 1 - len(t)) for t in trees]
    return torch.tensor(tokens), torch.tensor(depths)


# Shapes

MOST_NODES = 1024
"""Of one tree: its mask alone has as many squared entries."""

WRITTEN = (
    "write chain:DEPTH, stop:DEPTH:CHANCE, static:0,1,0.0, tree:DEPTHxWIDTH:NODES, "
    "auto:DEPTHxWIDTH:NODES or off"
)


def _check_size(nodes: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(f"tree of {nodes} nodes: at most {MOST_NODES} are verified in one round")


def _dotted(path: list[int] | tuple[int, ...]) -> str:
    return ".".join(map(str, path)) or "(the root)"


@dataclass(frozen=True)
class Shape:
    """A chain, or a best-first tree: `depth` levels, `width` nodes expanded a level, `nodes` in
    all.
    """

    depth: int
    width: int
    nodes: int
    by_cost: bool = False
    """Grown only as far as the measured cost of a round says."""
    stop: float | None = None
    """Of a chain: the chance of being accepted below which it is not drafted on."""

    def __post_init__(self) -> None:
        if self.depth < 1 or self.width < 1 or self.nodes < self.depth:
            raise ValueError(
                f"tree of depth {self.depth}, width {self.width}, nodes {self.nodes}: "
                "depth and width are at least 1, nodes at least the depth"
            )
        if self.stop is not None and not (self.is_chain and 0 < self.stop < 1):
            raise ValueError(
                f"tree stop:{self.depth}:{self.stop:g}: the chance is that of a chain, and lies "
                "between 0 and 1"
            )
        _check_size(self.nodes)

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and not self.by_cost

    @property
    def expanded(self) -> int:
        """Most nodes of one draft that a head is asked to go on from."""
        return self.width * (self.depth - 1)

    def __str__(self) -> str:
        if self.stop is not None:
            return f"stop:{self.depth}:{self.stop}"
        if self.is_chain:
            return f"chain:{self.depth}"
        kind = "auto" if self.by_cost else "tree"
        return f"{kind}:{self.depth}x{self.width}:{self.nodes}"


@dataclass(frozen=True)
class Static:
    """A tree whose nodes are fixed, each the path of ranks that leads to it; parents first."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_size(len(self.paths))
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            *above, rank = path or (-1,)
            problem = ""
            if rank < 0 or min(path) < 0:
                problem = "ranks count from 0"
            elif path in known:
                problem = "it is there twice"
            elif tuple(above) not in known:
                problem = f"its parent {_dotted(above)} does not come before it"
            elif rank and (*above, rank - 1) not in known:
                problem = (
                    f"its better sibling {_dotted([*above, rank - 1])} does not come before it"
                )
            if problem:
                raise ValueError(f"static tree: node {_dotted(path)}: {problem}")
            known.add(path)

    @classmethod
    def chain(cls, depth: int) -> Static:
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Candidates looked at after one node: the highest rank and one."""
        return max((1 + max(path) for path in self.paths), default=0)

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def is_chain(self) -> bool:
        return self.width < 2

    @property
    def expanded(self) -> int:
        """Nodes that a head is asked to go on from."""
        return sum(map(len, self.inner[1:]))

    @cached_property
    def inner(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By level, the root's first: the paths that have children."""
        above = {path[:-1] for path in self.paths}
        levels = range(self.depth)
        return tuple(tuple(sorted(p for p in above if len(p) == level)) for level in levels)

    def children(self, path: tuple[int, ...]) -> int:
        """How many children a node has; their ranks are 0, 1, …"""
        return self._children.get(path, 0)

    @cached_property
    def _children(self) -> dict[tuple[int, ...], int]:
        counts: dict[tuple[int, ...], int] = {}
        for path in self.paths:
            counts[path[:-1]] = counts.get(path[:-1], 0) + 1
        return counts

    def node_of_rank(self, rank: int) -> str | None:
        """The first node that needs this rank or a higher one, as it is written."""
        found = next((path for path in self.paths if max(path) >= rank), None)
        return None if found is None else _dotted(found)

    def node_at(self, depth: int) -> str | None:
        """The first node of this depth or deeper, as it is written."""
        found = next((path for path in self.paths if len(path) >= depth), None)
        return None if found is None else _dotted(found)

    def __str__(self) -> str:
        return "static:" + ",".join(map(_dotted, self.paths)) if self.paths else "off"


TreeShape = Shape | Static

OFF = Static(())
"""Draft nothing; `static:` without nodes is another way to write it."""

UNTUNED = Shape(3, 1, 3)
"""Drafted where no shape is asked for and none was chosen by measuring."""


def parse_shape(text: str) -> TreeShape:
    """Read a shape, written as the module says; ValueError says what is wrong, and where."""
    if text == "off":
        return OFF
    if match := re.fullmatch(r"chain:(\d+)", text):
        depth = int(match[1])
        return Shape(depth, 1, depth)
    if match := re.fullmatch(r"stop:(\d+):((\d+|\d*\.\d+)(e-\d+)?)", text):
        depth = int(match[1])
        return Shape(depth, 1, depth, stop=float(match[2]))
    if match := re.fullmatch(r"(tree|auto):(\d+)x(\d+):(\d+)", text):
        return Shape(int(match[2]), int(match[3]), int(match[4]), by_cost=match[1] == "auto")
    if match := re.fullmatch(r"static:((\d+(\.\d+)*)(,\d+(\.\d+)*)*)?", text):
        nodes = match[1].split(",") if match[1] else []
        return Static(tuple(tuple(map(int, node.split("."))) for node in nodes))
    raise ValueError(f"tree {text!r}: {WRITTEN}, as in tree:4x4:12")
