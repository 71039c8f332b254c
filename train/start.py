"""Begin a run with the weights of a head that was trained before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.heads.load import load_head
from drafthead.train.checkpoint import head_weights

logger = logging.getLogger(__name__)


def begin_from(folder: Path, head: DraftHead) -> dict[str, Tensor]:
    """A trained head's tensors, its draft vocabulary included, by the names that they have here.

    They are put into the head, which is not bound yet and borrows by that vocabulary. Binding makes
    first weights, so `put` them there once more: what the trained head does not have then starts as
    in any new head. One of another type is taken where the settings say so (`follows`). Raises
    ValueError for any that does not fit.
    """
    found = load_head(folder, torch.float32)
    kind, mine = found.settings.type, head.settings
    if kind not in (mine.type, *mine.follows):
        raise ValueError(
            f"training.start: {folder} is a head of type {kind!r}; one of type {mine.type!r} "
            f"begins from {' or '.join(map(repr, (mine.type, *mine.follows)))}"
        )
    if mine.warm_start:
        raise ValueError("head.warm_start: would undo training.start; use 0")
    found.contract.check(head.contract)
    turns, ours = (getattr(h.config, "rope_parameters", None) for h in (found, head))
    if turns != ours:
        raise ValueError(
            f"training.start: {folder} was trained with rotary positions by {turns}, this head has "
            f"{ours}; head.rope_theta sets the base, and a scaling is the target's own"
        )
    given, own = head_weights(found), head.state_dict()
    unlike = [name for name in given if name not in own or given[name].shape != own[name].shape]
    if kind == mine.type:
        unlike += own.keys() - given.keys()
    if unlike:
        raise ValueError(
            f"training.start: {folder} and this head differ in {min(unlike)!r}; use the head "
            "settings that it was trained with"
        )
    put(given, head)
    logger.info("begun from %s: %d tensors, %d stay new", folder, len(given), len(own) - len(given))
    return given


def put(given: Mapping[str, Tensor], head: DraftHead) -> None:
    """Copy tensors into the head's own of the same names."""
    own = head.state_dict()
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)
