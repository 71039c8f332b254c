"""Teacher features by micro-batch: from the online target, or kept in memory after the first pass.

Rows are put into micro-batches of similar length once; an epoch changes their order, never their
members. So a micro-batch's features are the same numbers whenever and wherever they are computed,
and neither the source nor an interruption changes a run. States are held in bf16 by every source.
It knows no head and no loss, only which layers to capture.

Shapes: B batch, T positions, D hidden width, L captured layers, V vocabulary.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from drafthead.data.chat import Row
from drafthead.heads.base import TeacherBatch
from drafthead.inference.target import Target

logger = logging.getLogger(__name__)

DTYPE = torch.bfloat16
"""What states are stored and handed out in."""
CHUNK_LOGITS = 1 << 24
"""Most elements of full-vocabulary logits that exist at once (64 MiB in fp32)."""
MOST_DROPPED = 0.25
"""Share of rows with states that are not finite above which a run stops."""


class FeatureError(ValueError):
    """The target's states cannot be trained on."""


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


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` micro-batches in one epoch: a function of seed and epoch only."""
    order = list(range(count))
    random.Random(f"epoch/{seed}/{epoch}").shuffle(order)
    return order


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


class Features(Protocol):
    """A source of teacher batches, addressed by the number of the micro-batch."""

    @property
    def dropped(self) -> dict[str, None]:
        """Ids of the rows left out because their states are not finite."""
        ...

    def batch(self, index: int) -> TeacherBatch: ...

    def names(self, index: int) -> list[str]:
        """Ids of the rows of a micro-batch, for messages."""
        ...

    def positions(self, index: int) -> int:
        """Token positions of a micro-batch, padding excluded."""
        ...


@dataclass
class OnlineFeatures:
    """Runs the frozen target for every batch that is asked for."""

    target: Target
    rows: Sequence[Row]
    batches: Sequence[tuple[int, ...]]
    layers: tuple[int, ...]
    _dropped: dict[str, None] = field(default_factory=dict)

    @property
    def dropped(self) -> dict[str, None]:
        return self._dropped

    def names(self, index: int) -> list[str]:
        return [self.rows[row].id for row in self.batches[index]]

    def positions(self, index: int) -> int:
        return sum(len(self.rows[row].ids) for row in self.batches[index])

    @torch.no_grad()
    def batch(self, index: int) -> TeacherBatch:
        rows = [self.rows[row] for row in self.batches[index]]
        ids, mask, real = (tensor.to(self.target.device) for tensor in collate(rows))
        features, last_hidden = self.target.states(ids, self.layers)
        mask = mask & self._finite(features, last_hidden, real, rows)[:, None]
        top = self._top(last_hidden, mask)
        # Zeros at padding and in dropped rows: a NaN there would reach the loss as 0 * NaN.
        keep = (real & mask.any(dim=1, keepdim=True))[..., None]
        return TeacherBatch(
            ids=ids,
            mask=mask,
            features=features.to(DTYPE).masked_fill_(~keep, 0.0),
            last_hidden=last_hidden.to(DTYPE).masked_fill_(~keep, 0.0),
            top=top,
        )

    def _finite(
        self, features: Tensor, last_hidden: Tensor, real: Tensor, rows: Sequence[Row]
    ) -> Tensor:
        """(B,) bool: rows with finite states; others are counted, too many end the run (F18)."""
        fine = features.isfinite().all(dim=-1) & last_hidden.isfinite().all(dim=-1)
        finite = (fine | ~real).all(dim=1)
        for row, good in zip(rows, finite.tolist(), strict=True):
            if not good and row.id not in self._dropped:
                self._dropped[row.id] = None
                logger.warning("row %s: the target's states are not finite; dropped", row.id)
        if len(self._dropped) > MOST_DROPPED * len(self.rows):
            raise FeatureError(
                f"target.dtype: states in {self.target.dtype} are not finite in "
                f"{len(self._dropped)} of {len(self.rows)} rows; try target.dtype=float32"
            )
        return finite

    def _top(self, last_hidden: Tensor, mask: Tensor) -> Tensor:
        """(B, T) the target's most likely next token where the next token is supervised, else 0."""
        B, T, D = last_hidden.shape
        needed = supervised(mask).flatten().nonzero()[:, 0]
        top = torch.zeros(B * T, dtype=torch.int64, device=last_hidden.device)
        flat = last_hidden.reshape(B * T, D)
        for chunk in torch.split(needed, max(1, CHUNK_LOGITS // self.target.vocab_size)):
            top[chunk] = self.target.unembed(flat[chunk]).argmax(dim=-1)
        return top.view(B, T)


@dataclass
class FeatureMemory:
    """Keeps what another source gave, on the CPU; asks it once for each micro-batch."""

    source: OnlineFeatures
    kept: dict[int, TeacherBatch] = field(default_factory=dict)

    @property
    def dropped(self) -> dict[str, None]:
        return self.source.dropped

    @property
    def bytes(self) -> int:
        """Bytes of everything kept so far."""
        return sum(
            getattr(batch, part.name).nbytes
            for batch in self.kept.values()
            for part in fields(batch)
        )

    def names(self, index: int) -> list[str]:
        return self.source.names(index)

    def positions(self, index: int) -> int:
        return self.source.positions(index)

    def batch(self, index: int) -> TeacherBatch:
        if index not in self.kept:
            self.kept[index] = moved(self.source.batch(index), torch.device("cpu"))
        return moved(self.kept[index], self.source.target.device)


def forecast(
    lengths: Sequence[int], batches: Sequence[tuple[int, ...]], layers: int, width: int
) -> int:
    """Bytes that FeatureMemory will hold after one pass, exactly: known before anything runs."""
    positions = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    states = (layers + 1) * width * DTYPE.itemsize
    return positions * (states + 8 + 8 + 1)  # ids and top int64, mask bool


def choose_features(
    source: OnlineFeatures, mode: Literal["auto", "memory", "online"], budget: int
) -> Features:
    """Keep states in memory if they fit into `budget` bytes, else run the target each time.

    `memory` that does not fit is refused; `auto` falls back and says so.
    """
    lengths = [len(row.ids) for row in source.rows]
    size = forecast(lengths, source.batches, len(source.layers), source.target.config.hidden_size)
    logger.info("teacher features: %.1f MB if kept in memory", size / 1e6)
    if mode == "online":
        return source
    if size <= budget:
        return FeatureMemory(source)
    if mode == "memory":
        raise ValueError(
            f"training.features: memory needs {size:,} bytes, training.feature_bytes allows "
            f"{budget:,}; raise it, lower data.positions, or use training.features=online"
        )
    logger.info("over training.feature_bytes=%d: the target runs online", budget)
    return source


def supervised(mask: Tensor) -> Tensor:
    """(B, T) loss mask → (B, T) bool: positions whose *next* token is supervised."""
    following = torch.zeros_like(mask)
    following[:, :-1] = mask[:, 1:]
    return following


def moved(batch: TeacherBatch, device: torch.device) -> TeacherBatch:
    """The batch on another device; the same object when it is there already."""
    if batch.ids.device == device:
        return batch
    return TeacherBatch(
        **{part.name: getattr(batch, part.name).to(device) for part in fields(batch)}
    )


def blank(batch: TeacherBatch) -> TeacherBatch:
    """The batch with nothing supervised: for a rank that has none left, so that no other waits."""
    return replace(batch, mask=torch.zeros_like(batch.mask))
