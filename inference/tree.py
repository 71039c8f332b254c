"""Draft trees: topology, depths, ancestor masks, positions; pure, and no model.

A tree hangs below the root, the last committed token, which the target has not seen yet. A verify
pass runs root and nodes together, so row 0 of its input is the root and row i + 1 is node i.

Shapes: N nodes, n = N + 1 rows of a verify pass, B batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """One row's draft: `tokens[i]` is a child of node `parents[i]`, -1 meaning the root; parents
    come first.

    `proposals` (N, V), only for the ratio rules, holds the law each token was drawn from; None
    there means that the tokens are a fixed guess.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    proposals: Tensor | None = None
    source: str = ""
    """Which drafter made it, so that none is credited with another's gain."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"tree of {len(self.tokens)} tokens but {len(self.parents)} parents")
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


def chain(tokens: Sequence[int], proposals: Tensor | None = None, source: str = "") -> Tree:
    """A tree of one branch."""
    return Tree(list(tokens), list(range(-1, len(tokens) - 1)), proposals, source)


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


@dataclass(frozen=True)
class Shape:
    """How large a draft may get: `depth` levels, `width` nodes expanded a level, `nodes` in all."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        if self.depth < 1 or self.width < 1 or self.nodes < self.depth:
            raise ValueError(
                f"tree of depth {self.depth}, width {self.width}, nodes {self.nodes}: "
                "depth and width are at least 1, nodes at least the depth"
            )

    @property
    def is_chain(self) -> bool:
        return self.nodes == self.depth

    def __str__(self) -> str:
        return (
            f"chain:{self.depth}"
            if self.is_chain
            else f"tree:{self.depth}x{self.width}:{self.nodes}"
        )

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `chain:DEPTH` or `tree:DEPTHxWIDTH:NODES`."""
        if match := re.fullmatch(r"chain:(\d+)", text):
            depth = int(match[1])
            return cls(depth, 1, depth)
        if match := re.fullmatch(r"tree:(\d+)x(\d+):(\d+)", text):
            return cls(int(match[1]), int(match[2]), int(match[3]))
        raise ValueError(
            f"tree {text!r}: write chain:DEPTH or tree:DEPTHxWIDTH:NODES, as in tree:4x4:12"
        )
