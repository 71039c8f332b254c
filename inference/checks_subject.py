"""What a certificate is about: a target, a head, prompts; how texts are written; what a check says.

Checks write texts by `written`, which is the decoder itself. What a control plants there are small
deliberate faults (`checks_faults`), so that a check and its control differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafthead.heads.base import DraftHead
from drafthead.inference.decoder import Decoder, check_prompt
from drafthead.inference.drafters import Drafter, LookupDrafter, MergedDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.row import Row, Stop, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.store import Store
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, Static

Ids = Sequence[int]

DEEPEST = 3
"""Of the drafts that are made here."""


@dataclass(frozen=True)
class Check:
    """One line of a certificate."""

    name: str
    passed: bool
    figure: str
    """What was measured, in a few words."""
    detail: str
    """What was done, and against which bound."""


@dataclass(frozen=True)
class Subject:
    """A bound head and its target in one dtype, and prompts as token ids."""

    target: Target
    head: DraftHead
    prompts: Sequence[Ids]
    seed: int = 0

    @property
    def exact(self) -> bool:
        """Whether the dtype leaves no room for a tie within rounding."""
        return self.target.dtype == torch.float64

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def end_ids(self) -> list[int]:
        """What ends a text, as the target's own settings say."""
        ends = self.target.model.generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def drafters(self) -> dict[str, Drafter]:
        """All that may draft: lookup, the head in shapes that it can draft, and both merged."""
        table: dict[str, Drafter] = {"lookup": LookupDrafter(8, longest=3, shortest=1)}
        for shape in shapes_for(self.head):
            table[f"head {shape}"] = HeadDrafter(self.head, shape)
        *_, tree = table.values()
        table["merged"] = MergedDrafter(LookupDrafter(8, longest=3, shortest=2), tree)
        return table


def shapes_for(head: DraftHead, deepest: int = DEEPEST) -> tuple[Shape, Static, Shape]:
    """A chain, a static tree and a best-first tree, no deeper or wider than the head drafts."""
    depth, width = min(deepest, head.max_depth or deepest), min(3, len(head.draft_ids))
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    static = Static(tuple(p for p in paths if len(p) <= depth and max(p) < width))
    return Shape(depth, 1, depth), static, Shape(depth, width, max(depth, min(8, width * depth)))


def written(
    target: Target,
    prompts: Sequence[Ids],
    sampler: Sampler,
    drafter: Drafter | None,
    tokens: int,
    *,
    ends: Ids = (),
    stop: Stop | None = None,
    store: type[Store] = Store,
    logits: bool = False,
) -> list[Row]:
    """Decode prompts as one batch; `logits`: keep the target's behind each token.

    `store` holds the keys and values of the run; another one than `Store` is a fault on purpose.
    """
    rows = [
        Row(list(ids), tokens, stop or stop_at(ends), logits=[] if logits else None)
        for ids in prompts
    ]
    for row in rows:
        check_prompt(target, row.ids, tokens)
    decoder = opened(target, sampler, drafter, rows, store)
    while decoder.running:
        decoder.round()
    return rows


def opened(
    target: Target,
    sampler: Sampler,
    drafter: Drafter | None,
    rows: Sequence[Row],
    store: type[Store] = Store,
) -> Decoder:
    """A decoder in which every row has its first token."""
    capacity = max(len(row.ids) + row.limit for row in rows)
    decoder = Decoder(target, sampler, drafter, batch=len(rows), capacity=capacity)
    if store is not Store:
        held = decoder.store
        decoder.store = store(target.num_layers, held.batch, held.capacity)
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    return decoder
