"""Teacher features by micro-batch: what every source of them gives, and those that need no disk.

A micro-batch's members never change (see `data.batches`), so its features are the same numbers
whenever and wherever they are computed, and neither the source nor an interruption changes a run.
States are held in bf16 by every source, unless a store was made in another dtype (`train.stored`).
It knows no head and no loss, only which layers to capture.

Shapes: B batch, T positions, D hidden width, L captured layers, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from drafthead.data.batches import collate
from drafthead.data.chat import Row
from drafthead.heads.base import TeacherBatch
from drafthead.inference.target import Target

logger = logging.getLogger(__name__)

DTYPE = torch.bfloat16
"""What states are stored and handed out in."""
CHUNK_LOGITS = 1 << 23
"""Most elements of full-vocabulary logits that exist at once (32 MiB in fp32; a third faster on a
CPU than twice as many)."""
MOST_DROPPED = 0.25
"""Share of rows with states that are not finite above which a run stops."""


class FeatureError(ValueError):
    """The target's states cannot be trained on."""


class Features(Protocol):
    """A source of teacher batches, addressed by the number of the micro-batch."""

    @property
    def dropped(self) -> dict[str, None]:
        """Ids of the rows left out because their states are not finite."""
        ...

    def batch(self, index: int) -> TeacherBatch: ...

    def expect(self, indices: Sequence[int]) -> None:
        """Hear which micro-batches come next, to read them from a disk meanwhile."""
        ...

    def names(self, index: int) -> list[str]:
        """Ids of the rows of a micro-batch, for messages."""
        ...

    def positions(self, index: int) -> int:
        """Token positions of a micro-batch, padding excluded."""
        ...


@dataclass
class Dropped:
    """Rows left out because their states are not finite; too many of them end the run (F18)."""

    rows: int
    """Rows there are in all."""
    ids: dict[str, None] = field(default_factory=dict)

    def add(self, row: str, advice: str) -> None:
        """Count a row, once; FeatureError with the advice when it is one too many."""
        if row in self.ids:
            return
        self.ids[row] = None
        logger.warning("row %s: the target's states are not finite; dropped", row)
        if len(self.ids) > MOST_DROPPED * self.rows:
            raise FeatureError(
                f"{advice} ({len(self.ids)} of {self.rows} rows have states that are not finite)"
            )


class Planned:
    """Rows in their micro-batches: what sources of features for them have in common."""

    rows: Sequence[Row]
    batches: Sequence[tuple[int, ...]]
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        self.rejected = Dropped(len(self.rows))

    @property
    def dropped(self) -> dict[str, None]:
        return self.rejected.ids

    def expect(self, indices: Sequence[int]) -> None:
        """Nothing is read ahead: the target runs when its states are asked for."""

    def members(self, index: int) -> list[Row]:
        return [self.rows[row] for row in self.batches[index]]

    def names(self, index: int) -> list[str]:
        return [row.id for row in self.members(index)]

    def positions(self, index: int) -> int:
        return sum(len(row.ids) for row in self.members(index))


@dataclass(frozen=True)
class Taught:
    """A micro-batch with all that a store keeps of it."""

    batch: TeacherBatch
    real: Tensor
    """(B, T) bool: no padding."""
    finite: list[bool]
    """By row: its states can be used."""
    log_norm: Tensor | None
    """(B, T) fp32 log-sum-exp of the logits where the next token is supervised, else 0."""


@dataclass
class OnlineFeatures(Planned):
    """Runs the frozen target for every batch that is asked for."""

    target: Target
    rows: Sequence[Row]
    batches: Sequence[tuple[int, ...]]
    layers: tuple[int, ...]
    dtype: torch.dtype = DTYPE
    """What states are handed out in."""

    def batch(self, index: int) -> TeacherBatch:
        return self.taught(index, normalise=False).batch

    @torch.no_grad()
    def taught(self, index: int, normalise: bool) -> Taught:
        """Run the target; `normalise` also gives `log_norm`, which training does not need."""
        rows = self.members(index)
        ids, mask, real = (tensor.to(self.target.device) for tensor in collate(rows))
        features, last_hidden = self.target.states(ids, self.layers)
        top, log_norm = self._choices(last_hidden, mask, normalise)
        features, last_hidden = features.to(self.dtype), last_hidden.to(self.dtype)
        finite = finite_rows(features, last_hidden, real).tolist()
        for row, good in zip(rows, finite, strict=True):
            if not good:
                self.rejected.add(row.id, self._advice())
        batch = TeacherBatch(ids, mask, features, last_hidden, top)
        return Taught(usable(batch, finite, real), real, finite, log_norm)

    def _advice(self) -> str:
        held, computed = (str(d).removeprefix("torch.") for d in (self.dtype, self.target.dtype))
        if held == "float16" != computed:
            return "data.states_dtype: float16 holds no more than 65,504; try bfloat16"
        return f"target.dtype: states overflow in {computed}; try target.dtype=float32"

    def _choices(
        self, last_hidden: Tensor, mask: Tensor, normalise: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) the target's likeliest next token where that is supervised, else 0; log-norms."""
        B, T, D = last_hidden.shape
        needed = supervised(mask).flatten().nonzero()[:, 0]
        top = torch.zeros(B * T, dtype=torch.int64, device=last_hidden.device)
        norms = torch.zeros(B * T, device=last_hidden.device) if normalise else None
        flat = last_hidden.reshape(B * T, D)
        for chunk in torch.split(needed, max(1, CHUNK_LOGITS // self.target.vocab_size)):
            logits = self.target.unembed(flat[chunk])
            most = logits.max(dim=-1)  # on a CPU a quarter of argmax's time in bf16
            top[chunk] = most.indices
            if norms is not None:
                # Half the time of logsumexp, which looks for the maximum again.
                above = logits.float().sub_(most.values.float()[:, None]).exp_().sum(dim=-1)
                norms[chunk] = above.log_() + most.values.float()
        return top.view(B, T), None if norms is None else norms.view(B, T)


def finite_rows(features: Tensor, last_hidden: Tensor, real: Tensor) -> Tensor:
    """(B,) bool: all states of the row's real positions are finite."""
    fine = features.isfinite().all(dim=-1) & last_hidden.isfinite().all(dim=-1)
    return (fine | ~real).all(dim=1)


def usable(batch: TeacherBatch, finite: Sequence[bool], real: Tensor) -> TeacherBatch:
    """The batch with nothing supervised and zeros in rows that are not finite, zeros at padding.

    A NaN that stayed would reach the loss as 0 * NaN. The states are changed in place.
    """
    keep = real & torch.tensor(finite, device=real.device)[:, None]
    return replace(
        batch,
        mask=batch.mask & keep,
        features=batch.features.masked_fill_(~keep[..., None], 0.0),
        last_hidden=batch.last_hidden.masked_fill_(~keep[..., None], 0.0),
    )


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
        return sum(part.nbytes for batch in self.kept.values() for part in tensors(batch).values())

    def names(self, index: int) -> list[str]:
        return self.source.names(index)

    def positions(self, index: int) -> int:
        return self.source.positions(index)

    def expect(self, indices: Sequence[int]) -> None:
        self.source.expect(indices)

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


def tensors(batch: TeacherBatch) -> dict[str, Tensor]:
    """The batch's tensors by field; one that it has not is left out."""
    parts = {part.name: getattr(batch, part.name) for part in fields(batch)}
    return {name: part for name, part in parts.items() if part is not None}


def moved(batch: TeacherBatch, device: torch.device) -> TeacherBatch:
    """The batch on another device; the same object when it is there already."""
    if batch.ids.device == device:
        return batch
    return replace(batch, **{name: part.to(device) for name, part in tensors(batch).items()})


def blank(batch: TeacherBatch) -> TeacherBatch:
    """The batch with nothing supervised: for a rank that has none left, so that no other waits."""
    return replace(batch, mask=torch.zeros_like(batch.mask))
