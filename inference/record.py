"""What a head would have drafted at every place of texts that the target wrote.

The target decodes plainly, round by round, and at each place the head drafts a large tree that is
not verified: what the text went on with is known afterwards. As greedy and coupled decoding write
the same text whatever is drafted, any smaller shape can be tried on the record (`plan`): it tells
what decoding with that shape comes to.

Shapes: B rows, W children of a node, m nodes that a level goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drafthead.heads.base import DraftHead
from drafthead.inference.answering import end_ids
from drafthead.inference.built import Level
from drafthead.inference.decoder import decode
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.noise import Noise
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, Tree
from drafthead.inference.warps import Warps

DEPTH, WIDTH = 8, 8
"""Levels of the recorded trees, and children of a node."""


@dataclass(frozen=True)
class Draft:
    """The candidates after one place, level by level, (m * W,) each; W children of a node together,
    the best first.
    """

    tokens: tuple[NDArray[np.int64], ...]
    parents: tuple[NDArray[np.int64], ...]
    """Of each candidate: the number of its parent among the level before's; -1 for the root."""
    values: tuple[NDArray[np.float32], ...]
    """Log chance of the path; -inf is no candidate."""


@dataclass(frozen=True)
class Text:
    """What the target wrote after a prompt, and what the head drafted there."""

    new: list[int]
    """The text's own tokens; the first comes from the prefill."""
    drafts: list[Draft]
    """After the first of them, the first two, …; no deeper than a round there could use."""


@dataclass(frozen=True)
class Record:
    """Texts with their drafts, all of one head."""

    texts: list[Text]
    width: int
    """Children of a node: W."""
    tells: bool
    """Whether the head says how sure it is, before a token is drawn."""


def record(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 8,
) -> Record:
    """Decode prompts, `batch` at a time, and write down what a bound head drafts on the way."""
    recorder = _Recorder(head)
    texts: list[Text] = []
    for first in range(0, len(prompts), batch):
        some = list(prompts[first : first + batch])
        sampler = sampler_of(target, range(first, first + len(some)), temperature, seed)
        rows, _ = decode(
            target, some, sampler, recorder, max_new_tokens=max_new_tokens, eos=end_ids(target)
        )
        texts += [Text(row.new_ids, recorder.drafts[slot]) for slot, row in enumerate(rows)]
    return Record(texts, recorder.shape.width, recorder.tells)


def sampler_of(target: Target, streams: Sequence[int], temperature: float, seed: int) -> Sampler:
    """A coupled sampler of several rows; greedy at temperature 0."""
    if temperature == 0:
        return Sampler()
    noise = [Noise(seed, stream, target.vocab_size, target.device) for stream in streams]
    return Sampler(Warps.of(temperature, 0, 1.0), noise)


class _Recorder(HeadDrafter):
    """Drafts best first, like any wide tree, and proposes nothing.

    It always goes on from the first candidate of a level as well: that is the chain, which a tree
    may leave.
    """

    shape: Shape

    def __init__(self, head: DraftHead) -> None:
        depth = min(DEPTH, head.max_depth or DEPTH)
        width = min(WIDTH, len(head.draft_ids))
        super().__init__(head, Shape(depth, width, depth))
        self.tells = False
        self.drafts: list[list[Draft]] = []

    def open(self, batch: int, capacity: int) -> None:
        super().open(batch, capacity + self.shape.depth)  # a node more a level
        self.drafts = [[] for _ in range(batch)]

    def _drafted(
        self, positions: Sequence[int], limits: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        logits = self._extend([self.head.goes_on or self._room(p) > 0 for p in positions])[:, None]
        B, width = len(positions), self.shape.width
        self.tells = self.head.confidence(self._state) is not None
        deepest = torch.tensor(limits, device=logits.device)[:, None]
        values = logits.new_zeros(B, 1, dtype=torch.float32)
        parents = torch.full((B, 1), -1, device=logits.device)
        before = 0  # nodes gone on from, up to the level before the last
        found: list[Level] = []
        for level in range(max(limits)):
            places = [p + level for p in positions]
            tokens, owners, values = self._level(logits, parents, values, width, places, sampler)
            values = values.masked_fill(deepest <= level, -torch.inf)
            found.append((tokens, owners, values))
            if level + 1 == max(limits):
                break
            others = values[:, 1:].topk(min(width, values.shape[1] - 1), dim=-1).indices + 1
            kept = torch.cat((torch.zeros_like(parents[:, :1]), others), dim=1)
            nodes = kept // width + before if level else torch.full_like(kept, -1)
            before += parents.shape[1] if level else 0
            parents, values = kept, values.gather(1, kept)
            logits = self._expand(tokens.gather(1, kept), nodes)
        for row, limit in enumerate(limits):
            if limit > 0:
                self.drafts[row].append(_draft_of([part[:limit] for part in _of(row, found)]))
        return [Tree()] * B


def _of(row: int, found: Sequence[Level]) -> list[list[NDArray[np.generic]]]:
    """Tokens, parents and values of one row by level."""
    return [[level[part][row].cpu().numpy() for level in found] for part in range(3)]


def _draft_of(parts: Sequence[list[NDArray[np.generic]]]) -> Draft:
    tokens, parents, values = parts
    return Draft(
        tuple(part.astype(np.int64) for part in tokens),
        tuple(part.astype(np.int64) for part in parents),
        tuple(part.astype(np.float32) for part in values),
    )
