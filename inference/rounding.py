"""How much a target's own forwards round, so that a tie of two tokens can be told from a fault.

A pass over many tokens rounds differently from one over one token, so where the target's two best
tokens nearly tie, either may come out. How near that is, is measured by transformers' own forwards
of given texts alone, so that a fault in this package cannot widen it.

What can change a choice is not that both logits move, which they mostly do together, but that they
move against each other: so their difference is what is measured. In half precision that is a few
steps of the logits' own rounding, a fraction of what the logits themselves move.

Shapes: T tokens of a text, n new ones, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from drafthead.inference.target import Target

CHUNK = 5
"""Tokens of one forward where rounding is measured, besides one and all of them: as in a round."""
MARGIN = 2
"""Passes of yet other shapes, as over trees and in batches, may round by so much more."""


@dataclass(frozen=True)
class Truth:
    """A text of the target's, with what its forwards of one token say of it."""

    prompt: list[int]
    new: list[int]
    logits: Tensor
    """(n, V) behind each new token."""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new]


@dataclass(frozen=True)
class Rounding:
    """How far the target's own forwards of one, few and all tokens of a text differ."""

    apart: float
    """The largest change of the difference of two logits, of the two best tokens of either forward;
    one rounding step of a logit at least."""
    states: float
    """The largest change of a key or value, as a share of the largest of its layer; as above."""

    @property
    def tie(self) -> float:
        """Two tokens so near may change places."""
        return MARGIN * self.apart


@torch.no_grad()
def one_by_one(target: Target, prompt: Sequence[int], new: Sequence[int]) -> Truth:
    """What transformers' forwards of one token say of a given text of one new token or more."""
    held = DynamicCache()
    pieces = [list(prompt), *([token] for token in new[:-1])]
    rows = [
        target.model(
            torch.tensor([piece], device=target.device), cache=held, use_cache=True
        ).logits[0, -1:]
        for piece in pieces
    ]
    return Truth(list(prompt), list(new), torch.cat(rows))


def rounding(target: Target, texts: Sequence[Truth]) -> Rounding:
    """Measured on these texts, the widest over all of them."""
    measured = [_rounding(target, text) for text in texts]
    return Rounding(max(r.apart for r in measured), max(r.states for r in measured))


@torch.no_grad()
def _rounding(target: Target, text: Truth) -> Rounding:
    ids = torch.tensor([text.ids[:-1]], device=target.device)
    whole, parts, start = DynamicCache(), DynamicCache(), len(text.prompt)
    cuts = [start, *[CHUNK] * ((ids.shape[1] - start) // CHUNK), (ids.shape[1] - start) % CHUNK]
    at_once = target.model(ids, cache=whole, use_cache=True).logits[0, start - 1 :]
    pieces = [
        target.model(piece, cache=parts, use_cache=True).logits[0]
        for piece in ids.split([cut for cut in cuts if cut], dim=1)
    ]
    chunked = torch.cat(pieces)[start - 1 :]
    step = torch.finfo(target.dtype).eps
    states = step
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for name in ("keys", "values"):
            states = max(states, relative_change(getattr(one, name), getattr(other, name)))
    moved = max(_moved(text.logits, many) for many in (at_once, chunked))
    return Rounding(max(moved, step * float(text.logits.amax(-1).abs().max())), states)


def _moved(one: Tensor, many: Tensor) -> float:
    """Of two (n, V) logits: how far two tokens move against each other at most, of those that are
    among the two best of either.
    """
    best = torch.cat([one.topk(2).indices, many.topk(2).indices], dim=1)
    change = one.double().gather(1, best) - many.double().gather(1, best)
    return float((change.amax(1) - change.amin(1)).max())


def relative_change(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors as a share of the largest number in `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    largest = float(theirs.abs().max())
    change = float((ours - theirs).abs().max())
    if not math.isfinite(change):
        return math.inf
    return change / largest if largest > 0 else change


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place at which two texts have another token; None where one only ends earlier."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (one, other) in pairs if one != other), None)
