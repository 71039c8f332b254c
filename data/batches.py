"""Which rows go into one micro-batch, in which order, and as which tensors.

Rows are put into micro-batches of similar length once; an epoch changes their order, never their
members. It knows no model and no states.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from drafthead.data.chat import Row


def plan(lengths: Sequence[int], tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Put rows into micro-batches of at most `tokens` positions, padding included.

    Rows of similar length go together; equal lengths are mixed by the seed. A row longer than
    `tokens` is alone. Returns row indices by micro-batch, the longest first.
    """
    order = list(range(len(lengths)))
    random.Random(f"plan/{seed}").shuffle(order)
    order.sort(key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    for row in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [tuple(batch) for batch in batches]


@lru_cache(maxsize=2)  # every step asks for its own epoch's and looks into the next one's
def epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of `count` micro-batches in one epoch: a function of seed and epoch only."""
    order = list(range(count))
    random.Random(f"epoch/{seed}/{epoch}").shuffle(order)
    return tuple(order)


def collate(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows → ids (B, T) int64, loss mask and real positions (B, T) bool; padded on the right."""
    T = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), T, dtype=torch.int64)
    mask, real = torch.zeros(2, len(rows), T, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        mask[index, : len(row.ids)] = torch.tensor(row.mask)
        real[index, : len(row.ids)] = True
    return ids, mask, real
