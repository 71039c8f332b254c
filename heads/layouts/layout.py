"""What a layout is: how one kind of head is written for others, and read back. No files here.

A layout turns a head into a config and named tensors and back. Writing folders is `files`, what a
consumer takes is `schema`, which layout a folder has is `recognise`.

Shapes: V target vocabulary, D hidden width.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import Contract

WEIGHTS = "model.safetensors"


class LayoutError(ValueError):
    """What a layout cannot express or understand, and what to do instead, in one line."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint folder as it is in memory."""

    config: dict[str, Any]
    """What config.json holds."""
    tensors: dict[str, Tensor]
    """By the names they have in the file."""
    weights: str = WEIGHTS
    """File that the tensors are written to."""
    place: str = ""
    """The folder, for errors; never written."""


@dataclass(frozen=True)
class Asked:
    """What is known of the target, and said by the user, when a foreign folder is read."""

    contract_of: Callable[[tuple[int, ...]], Contract]
    """Makes the contract of the target for these captured states, ids as in `contract`."""
    target: PreTrainedConfig
    embedding: Tensor
    """(V, D) the target's, to tell a borrowed copy from a trained one."""
    rows: Tensor
    """(V, D) the target's output rows, for the same."""
    layers: tuple[int, ...] | None = None
    """Captured states that the user names, ids as in `contract`; they win over the folder's."""
    producer: str | None = None
    """Who made the folder (its conventions differ): a name that the layout knows."""


class Layout(Protocol):
    """One way to store one kind of head."""

    @property
    def kind(self) -> str:
        """The head's `type`."""

    @property
    def name(self) -> str:
        """Its own, no other layout's."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Values of --format that it answers."""

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the schemas that what it writes is checked against."""

    def refusals(self, head: DraftHead) -> list[str]:
        """Why this head cannot be expressed, a line each, with what to do; none if it can."""

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        """Express a bound head, its floating tensors in `dtype`; LayoutError where it cannot be."""

    def recognises(self, stored: Stored) -> bool:
        """Whether the folder looks like this layout."""

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        """Make the unbound head, all its tensors set; ValueError where the folder is not clear."""


LAYOUTS: list[Layout] = []


def register(layout: Layout) -> None:
    """Make a layout known, once."""
    if any(known.name == layout.name for known in LAYOUTS):
        raise ValueError(f"layout {layout.name!r} is registered already")
    LAYOUTS.append(layout)


def formats() -> list[str]:
    """Every value of --format, sorted."""
    return sorted({name for layout in LAYOUTS for name in layout.formats})


def layouts_for(format: str, kind: str) -> list[Layout]:
    """Layouts of a head type that a --format stands for; LayoutError where there is none."""
    known = formats()
    if format not in known:
        near = difflib.get_close_matches(format, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"--format: unknown format {format!r}{hint} (known: {', '.join(known)})")
    found = [x for x in LAYOUTS if x.kind == kind and format in x.formats]
    if not found:
        # A layout without consumers is there to say why.
        others = sorted({n for x in LAYOUTS if x.kind == kind and x.consumers for n in x.formats})
        instead = f"use --format {' or '.join(others)}" if others else "no layout is known for it"
        raise LayoutError(f"--format {format}: it has no {kind} heads; {instead}")
    return found


def layout_of(format: str, head: DraftHead) -> Layout:
    """The layout in which a head is written for a format.

    LayoutError with each reason, one line in all, where none can express it.
    """
    found: list[list[str]] = []
    for layout in layouts_for(format, head.settings.type):
        refusals = layout.refusals(head)
        if not refusals:
            return layout
        found.append(refusals)
    # What a narrower layout of the same format wants besides is in nobody's way.
    least = [own for own in found if not any({*own} > {*other} for other in found)]
    reasons = dict.fromkeys(line for own in least for line in own)
    raise LayoutError(f"--format {format}: {'; '.join(reasons)}")
