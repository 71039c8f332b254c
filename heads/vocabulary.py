"""The reduced draft vocabulary: which target tokens a head can propose, and the maps both ways.

Pure functions of counts and ids. It knows no tokenizer, no head and no file: the map travels inside
the head's weights as `d2t` (offsets: target id = draft id + d2t[draft id]) and `t2d` (mask).

Shapes: V target vocabulary (the model's, padding included), Vd draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def count_tokens(rows: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Count token ids → (V,) int64; ValueError for an id outside 0 .. V - 1."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        ids = torch.as_tensor(row, dtype=torch.int64)
        if ids.numel() == 0:
            continue
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(
                f"token ids {int(ids.min())}..{int(ids.max())} do not fit a vocabulary of "
                f"{vocab_size}; the rows were made with another tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """Choose `size` target ids: all of `always`, then the most frequent → (Vd,) int64, ascending.

    counts: (V,). Ties, unseen tokens included, go to the smaller id, so the size is always reached
    in one fixed order. ValueError for a size that is not in 1 .. V or cannot hold `always`.
    """
    vocab_size = counts.shape[0]
    if not 0 < size <= vocab_size:
        raise ValueError(
            f"head.draft_vocab_size: {size} must be in 1..{vocab_size} (the target's vocabulary), "
            "or null for all of it"
        )
    kept = sorted(set(always))
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise ValueError(f"stop or special ids {kept} do not fit a vocabulary of {vocab_size}")
    if len(kept) > size:
        raise ValueError(
            f"head.draft_vocab_size: {size} cannot hold the {len(kept)} stop and special tokens"
        )
    first = counts.to(torch.int64).clone()
    first[kept] = int(counts.max()) + 1
    order = torch.sort(first, descending=True, stable=True).indices
    return order[:size].sort().values


def check_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Return (Vd,) int64 ids; ValueError unless they are strictly ascending and in 0 .. V - 1."""
    ids = ids.to(torch.int64)
    if ids.ndim != 1 or ids.numel() == 0:
        raise ValueError(f"draft vocabulary: expected (Vd,) ids, got shape {tuple(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"draft vocabulary: ids {int(ids.min())}..{int(ids.max())} do not fit a target "
            f"vocabulary of {vocab_size}; the map belongs to another tokenizer"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("draft vocabulary: target ids must be strictly ascending")
    return ids


def maps_of(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(Vd,) ids → d2t (Vd,) int64 offsets and t2d (V,) bool."""
    ids = check_ids(ids, vocab_size)
    kept = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    kept[ids] = True
    return ids - torch.arange(ids.shape[0], device=ids.device), kept


def ids_of(d2t: Tensor) -> Tensor:
    """d2t (Vd,) offsets → (Vd,) target ids."""
    return d2t + torch.arange(d2t.shape[0], device=d2t.device)


def check_maps(d2t: Tensor, t2d: Tensor) -> None:
    """Raise ValueError unless both maps name the same tokens.

    Offsets that are all zero on a reduced vocabulary are what a lost map looks like. They are
    refused when the mask contradicts them, and warned of when it agrees (the first Vd tokens).
    """
    ids = check_ids(ids_of(d2t), t2d.shape[0])
    lost = ids.shape[0] < t2d.shape[0] and not bool(d2t.any())
    if int(t2d.sum()) != ids.shape[0] or not bool(t2d[ids].all()):
        raise ValueError(
            f"d2t and t2d disagree: {ids.shape[0]} draft tokens against {int(t2d.sum())} kept ones"
            + ("; all offsets are zero, so the map was lost" if lost else "")
        )
    if lost:
        logger.warning(
            "d2t: the draft vocabulary is the first %d of %d tokens, expected of toy tokenizers",
            ids.shape[0],
            t2d.shape[0],
        )
