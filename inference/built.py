"""Trees made of what was drawn for a batch: the nodes of a plan, or the best candidates; pure.

Shapes: B rows, m candidates of one level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drafthead.inference.tree import Tree

Path = tuple[int, ...]
"""Ranks that lead to a node."""
Level = tuple[Tensor, Tensor, Tensor]
"""Candidates of one level, each (B, m): tokens, parents (candidate numbers), values."""


def of_paths(
    paths: Sequence[Path],
    tokens: Mapping[Path, Tensor],
    possible: Mapping[Path, Tensor],
    laws: Sequence[Mapping[Path, Tensor | None]],
    limits: Sequence[int],
    source: str,
) -> list[Tree]:
    """Every row's tree of those nodes that were drawn: no deeper than its limit, and no token that
    has no chance.

    tokens: (B,) by path; possible: (B,) bool by path; laws: of each row, by the parent's path.
    """
    paths = [path for path in paths if path in tokens]
    drawn = torch.stack([tokens[path] for path in paths], dim=1).tolist()
    chance = torch.stack([possible[path] for path in paths], dim=1).tolist()
    trees = []
    for row, limit in enumerate(limits):
        number: dict[Path, int] = {(): -1}
        row_tokens: list[int] = []
        parents: list[int] = []
        proposals: list[Tensor | None] = []
        for i, path in enumerate(paths):
            if len(path) > limit or not chance[row][i] or path[:-1] not in number:
                continue
            number[path] = len(row_tokens)
            row_tokens.append(drawn[row][i])
            parents.append(number[path[:-1]])
            proposals.append(laws[row][path[:-1]])
        fixed = all(law is None for law in proposals)
        trees.append(Tree(row_tokens, parents, [] if fixed else proposals, source))
    return trees


def of_candidates(found: Sequence[Level], count: int, source: str) -> list[Tree]:
    """Of each row, the tree of the best `count` candidates of all levels; -inf is none."""
    tokens, owners, values = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
    order = values.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    possible = (values.gather(1, order) > -torch.inf).tolist()
    trees = []
    for row, candidates in enumerate(order.tolist()):
        chosen = [c for c, fine in zip(candidates, possible[row], strict=True) if fine]
        number = {candidate: node for node, candidate in enumerate(chosen)} | {-1: -1}
        row_tokens, row_owners = tokens[row].tolist(), owners[row].tolist()
        trees.append(
            Tree(
                [row_tokens[c] for c in chosen],
                [number[row_owners[c]] for c in chosen],
                source=source,
            )
        )
    return trees
