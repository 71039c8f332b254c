"""What may be wrong with a head as it is served, and how each of it is undone.

A *stream* is (layer, norms): the states that enter layer `layer`, or leave the last one, with the
target's final norm applied so many times. The contract's id n is (n, 0) and its LAST (n, 1). They
are read by transformers' own `output_hidden_states`, not by the path that serves: where the two
differ, that path is at fault.

It judges nothing: `diagnose` looks at what tau comes to when one thing is undone.

Shapes: T positions, D hidden width, L captured layers, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor, nn

from drafthead.heads.base import DraftHead
from drafthead.heads.blocks import rope_base
from drafthead.heads.borrowed import borrow
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.vocabulary import ids_of
from drafthead.inference.target import Target

Cause = Literal[
    "layer", "norm", "template", "vocabulary map", "rotary base", "embedding and rows", "decoding"
]
Stream = tuple[int, int]
Recipe = tuple[Stream, ...]
"""What a head is given in place of each layer of its contract."""

BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""Rotary bases that published models have."""
SAME = 0.02
"""Relative distance below which two states are one, computed by another kernel."""


@dataclass(frozen=True)
class Undoing:
    """One thing undone: other states, or another head inside the block."""

    cause: Cause
    what: str
    recipe: Recipe | None = None
    """None: the states that the target gives when it serves."""
    changed: Callable[[], AbstractContextManager[None]] = nullcontext


# States


def recipe_of(contract: Contract, layers: Sequence[int] | None = None) -> Recipe:
    """What these ids, or the contract's own, stand for."""
    n = contract.num_layers
    chosen = contract.layers if layers is None else layers
    return tuple((n, 1) if layer == LAST else (layer, 0) for layer in chosen)


def other_states(contract: Contract, trained: Contract | None = None) -> list[Undoing]:
    """Neighbouring layers, all together and one by one, and the final norm more or less often; and
    what the head in training reads, where that is known.
    """
    own, n = recipe_of(contract), contract.num_layers
    found: list[Undoing] = []

    def add(cause: Cause, recipe: Recipe) -> None:
        layers = [layer for layer, norms in recipe if norms == 0]
        sound = all(1 <= layer <= n for layer, _ in recipe) and layers == sorted(set(layers))
        if sound and recipe != own and recipe not in [undo.recipe for undo in found]:
            found.append(Undoing(cause, f"reads {_named(own, n)}, {_named(recipe, n)} fit", recipe))

    for step in (1, -1):
        beside = [_neighbours(stream, step, n) for stream in own]
        for all_at_once in zip_longest(*beside):
            pairs = zip(all_at_once, beside, strict=True)
            add("layer", tuple(near[0] if new is None else new for new, near in pairs))
        for at, near in enumerate(beside):
            for new in near:
                add("layer", (*own[:at], new, *own[at + 1 :]))
    for at, (layer, norms) in enumerate(own):
        for k in range(3):
            if layer == n and k != norms:
                add("norm", (*own[:at], (n, k), *own[at + 1 :]))
    if trained is not None and len(trained.layers) == len(own):
        add("layer", recipe_of(contract, trained.layers))
    return found


def _neighbours(stream: Stream, step: int, n: int) -> list[Stream]:
    """What may be read a layer on instead: beside the last one, normed or not."""
    layer, norms = stream
    if norms:
        return [(n - 1, 0)] if step < 0 else [stream]
    return [(layer + step, 0), (n, 1)] if layer + step == n else [(layer + step, 0)]


def _named(recipe: Recipe, n: int) -> str:
    names = []
    for layer, norms in recipe:
        how = ("", " after the final norm", " after the final norm twice")[norms]
        names.append(f"{layer}{how}" if layer < n or norms == 0 else f"the last{how}")
    return f"layer{'s' if len(names) > 1 else ''} {', '.join(names)}"


@torch.no_grad()
def streams(target: Target, contract: Contract, ids: Tensor) -> Callable[[Stream], Tensor]:
    """Read the states of (1, T) ids: stream → (1, T, D)."""
    n, model = contract.num_layers, target.model
    norm = None if contract.norm is None else model.get_submodule(_parent(contract.norm))
    before: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        before.append(given[0])

    hook = None if norm is None else norm.register_forward_pre_hook(keep)
    try:
        out = model.get_decoder()(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        if hook is not None:
            hook.remove()
    states = [*out.hidden_states[:n], before[-1] if before else out.last_hidden_state]

    def read(stream: Stream) -> Tensor:
        layer, norms = stream
        state: Tensor = states[layer].to(target.device)
        if norm is not None:
            for _ in range(norms):
                state = norm(state)
        return state

    return read


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def strayed(served: Tensor, contract: Contract, read: Callable[[Stream], Tensor]) -> Cause | None:
    """What is wrong with (1, T, L * D) features as the target serves them, or None.

    They are compared with the contract's own streams; those that differ, with all others.
    """
    parts = served.chunk(len(contract.layers), dim=-1)
    n = contract.num_layers
    for part, own in zip(parts, recipe_of(contract), strict=True):
        if _distance(part, read(own)) < SAME:
            continue
        others = [(layer, k) for layer in range(1, n + 1) for k in range(3) if (layer, k) != own]
        nearest = min(others, key=lambda stream: _distance(part, read(stream)))
        return "norm" if nearest[0] == own[0] else "layer"
    return None


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


# The head


def other_heads(head: DraftHead, target: Target, trained: DraftHead | None) -> list[Undoing]:
    """What of the head itself may be otherwise: norm, map, rotary base, what it borrows.

    `trained`: the head as training has it, whose own map and base are then tried, too.
    """
    found: list[Undoing] = []
    if "norm_output" in type(head.settings).model_fields:
        given = head.settings.model_dump()["norm_output"]
        what = f"norm_output={given}, {not given} fits"
        changed = partial(_with_settings, head, {"norm_output": not given})
        found.append(Undoing("norm", what, changed=changed))
    if isinstance(head, BorrowingHead):
        known = trained if isinstance(trained, BorrowingHead) else None
        found += _other_bases(head, target, known)
        found += _other_borrowed(head, target, known)
    return found


@contextmanager
def _with_settings(head: DraftHead, update: Mapping[str, object]) -> Iterator[None]:
    kept = head.settings
    head.settings = kept.model_copy(update=dict(update))
    try:
        yield
    finally:
        head.settings = kept


def _other_bases(
    head: BorrowingHead, target: Target, trained: BorrowingHead | None
) -> list[Undoing]:
    own = head.rotary_base
    asked = head.settings.model_dump().get("rope_theta")
    bases = [rope_base(target.config), *BASES]
    bases += [float(asked)] if asked else []
    bases += [] if trained is None else [trained.rotary_base]
    return [
        Undoing(
            "rotary base",
            f"turns by base {own:g}, {base:g} fits",
            changed=partial(_turning, head, base),
        )
        for base in dict.fromkeys(bases)
        if base != own
    ]


@contextmanager
def _turning(head: BorrowingHead, base: float) -> Iterator[None]:
    kept = head.rotary_base
    head.rebase(base)
    try:
        yield
    finally:
        head.rebase(kept)


def _other_borrowed(
    head: BorrowingHead, target: Target, trained: BorrowingHead | None
) -> list[Undoing]:
    """Other maps, each with the rows that are there and with the rows that it borrows; and the
    target's own embedding and rows where those of the head are neither.
    """
    theirs = borrow(target.model, head.contract, None, check=False)
    embedding, rows = head.bound()
    whole = theirs.rows.to(rows.device, rows.dtype)
    own, found, fits = head.draft_ids, [], [head.draft_ids]
    for name, ids in _other_maps(head, trained).items():
        fits.append(ids)
        kinds = [rows] if torch.equal(ids.sort().values, own) else [rows, whole[ids]]
        for kept in kinds:  # a map in another order with rows in that order drafts the same
            found.append(
                Undoing(
                    "vocabulary map",
                    f"draft ids stand for the wrong tokens, {name} fit",
                    changed=partial(_holding, head, ids, None, kept),
                )
            )
    mine = theirs.embedding.to(embedding.device, embedding.dtype)
    known = any(torch.equal(rows, whole[ids]) for ids in fits)
    if not (known and torch.equal(embedding, mine)):
        what = "borrows another embedding or other output rows than the target's"
        changed = partial(_holding, head, own, mine, whole[own])
        found.append(Undoing("embedding and rows", what, changed=changed))
    return found


def _other_maps(head: BorrowingHead, trained: BorrowingHead | None) -> dict[str, Tensor]:
    """Maps that the head's own may be taken for, (Vd,) target ids by name."""
    if not head.reduced:
        return {}
    own, most = ids_of(head.d2t), head.config.vocab_size - 1
    maps = {
        "ids one lower": (own - 1).clamp(0, most),
        "ids one higher": (own + 1).clamp(0, most),
        "those of the draft id before": own.roll(1),
        "those of the draft id after": own.roll(-1),
    }
    if trained is not None and trained.reduced and trained.d2t.shape == own.shape:
        ids = ids_of(trained.d2t).to(own.device)
        if not torch.equal(ids, own):
            maps["those that were trained"] = ids
    return maps


@contextmanager
def _holding(
    head: BorrowingHead, ids: Tensor, embedding: Tensor | None, rows: Tensor
) -> Iterator[None]:
    """Let the head stand for these ids, (Vd,), and borrow these tensors."""
    kept, shown = (head.embedding, head.rows), head.d2t.clone() if head.reduced else None
    if shown is not None:
        head.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    head.embedding, head.rows = kept[0] if embedding is None else embedding, rows
    try:
        yield
    finally:
        head.embedding, head.rows = kept
        if shown is not None:
            head.d2t.copy_(shown)
