"""Teacher features out of a store, and a store that is filled while the target still runs.

Rows are found by the content of their ids and mask, so a store serves any choice and order of them,
and a micro-batch has the same members as one that the target would be run on. Rows that were
dropped when the store was written, or whose stored states are not finite, are left out and counted.

Shapes: B batch, T positions, D hidden width, L captured layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from drafthead.data.batches import collate
from drafthead.data.chat import Row
from drafthead.data.shards import Seal, States, digest_of
from drafthead.data.states import ShardWriter, StateStore, free_number
from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import LAST, inner_layers
from drafthead.train.teacher import OnlineFeatures, Planned, Taught, finite_rows, moved, usable

ADVICE = "data.states: extract them again with target.dtype=float32"


class Sequences(Protocol):
    """Where stored states are read from, by digest."""

    seal: Seal

    def __contains__(self, digest: bytes) -> bool: ...

    def read(self, digest: bytes, layers: Sequence[int]) -> States | None: ...


@dataclass
class StoredFeatures(Planned):
    """Reads every batch from a store; no target is needed."""

    store: Sequences
    rows: Sequence[Row]
    batches: Sequence[tuple[int, ...]]
    layers: tuple[int, ...]
    device: torch.device

    def __post_init__(self) -> None:
        super().__post_init__()
        self.digests = [digest_of(row.ids, row.mask) for row in self.rows]
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")
        self._ahead: dict[int, Future[tuple[TeacherBatch, Tensor, list[bool]]]] = {}

    def has(self, index: int) -> bool:
        """Whether all rows of the micro-batch are in the store."""
        return all(self.digests[row] in self.store for row in self.batches[index])

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to read the micro-batches that are asked for next, in the background."""
        self._ahead = {n: reading for n, reading in self._ahead.items() if n in indices}
        for index in indices:
            if index not in self._ahead and self.has(index):
                self._ahead[index] = self._pool.submit(self._read, index)

    def batch(self, index: int) -> TeacherBatch:
        ahead = self._ahead.pop(index, None)
        batch, real, finite = self._read(index) if ahead is None else ahead.result()
        batch, real = moved(batch, self.device), real.to(self.device)
        fine = finite_rows(batch.features, batch.last_hidden, real).tolist()
        good = [a and b for a, b in zip(finite, fine, strict=True)]
        for row, row_is_good in zip(self.members(index), good, strict=True):
            if not row_is_good:
                self.rejected.add(row.id, ADVICE)
        return usable(batch, good, real)

    def _read(self, index: int) -> tuple[TeacherBatch, Tensor, list[bool]]:
        """The micro-batch on the CPU, its real positions, and which rows were not dropped."""
        ids, mask, real = collate(self.members(index))
        (B, T), D = ids.shape, self.store.seal.width
        features = torch.zeros(B, T, len(self.layers) * D, dtype=self.store.seal.dtype)
        last_hidden = torch.zeros(B, T, D, dtype=self.store.seal.dtype)
        top = torch.zeros(B, T, dtype=torch.int64)
        finite = []
        for place, row in enumerate(self.batches[index]):
            states = self.store.read(self.digests[row], inner_layers(self.layers))
            finite.append(states is not None)
            if states is not None:
                n = len(states.ids)
                for number, layer in enumerate(self.layers):
                    captured = states.last_hidden if layer == LAST else states.layers[layer]
                    features[place, :n, number * D : (number + 1) * D] = captured
                last_hidden[place, :n] = states.last_hidden
                top[place, :n] = states.top
        return TeacherBatch(ids, mask, features, last_hidden, top), real, finite


class Filling:
    """A store that grows: sequences wait in memory until they make a shard."""

    def __init__(self, store: StateStore, size: int, rank: int, world: int) -> None:
        """`size`: bytes to collect before a shard is written, in the background."""
        self.store, self.seal = store, store.seal
        self._size, self._rank, self._world = size, rank, world
        self._writer = ShardWriter(store)
        self._waiting: dict[bytes, States | None] = {}
        self._written: dict[bytes, States | None] = {}
        """The last shard handed to the writer: perhaps not on the disk yet."""
        self._bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._waiting or digest in self._written or digest in self.store

    def read(self, digest: bytes, layers: Sequence[int]) -> States | None:
        for held in (self._waiting, self._written):
            if digest in held:
                return held[digest]
        return self.store.read(digest, layers)

    def add(self, sequences: Mapping[bytes, States | None]) -> None:
        """Take in what is not there yet."""
        for digest, states in sequences.items():
            if digest not in self:
                self._waiting[digest] = states
                self._bytes += 0 if states is None else states.nbytes
        if self._bytes >= self._size:
            self._write()

    def settle(self) -> None:
        """Write what waits, be it little, and let it be on the disk."""
        if self._waiting:
            self._write()
        self._writer.wait()
        self._written = {}
        self.store.refresh()  # what other ranks wrote

    def _write(self) -> None:
        self._writer.wait()
        number = free_number(self.store.folder, 0, self._rank, self._world)
        self._writer.write(number, self._waiting)
        self._written, self._waiting, self._bytes = self._waiting, {}, 0

    def close(self) -> None:
        self._writer.close()


@dataclass
class FillFeatures(Planned):
    """Reads what is stored; runs the target for the rest, and stores it."""

    source: OnlineFeatures
    """Runs the target on all layers of the store, in the store's dtype."""
    stored: StoredFeatures
    filling: Filling

    def __post_init__(self) -> None:
        self.rows, self.batches = self.stored.rows, self.stored.batches
        self.layers = self.stored.layers

    @property
    def dropped(self) -> dict[str, None]:
        return self.source.dropped | self.stored.dropped

    def expect(self, indices: Sequence[int]) -> None:
        self.stored.expect(indices)

    def batch(self, index: int) -> TeacherBatch:
        if self.stored.has(index):
            return self.stored.batch(index)
        taught = self.source.taught(index, normalise=True)
        found = sequences_of(taught, self.members(index), self.source.layers)
        names = (self.stored.digests[row] for row in self.batches[index])
        self.filling.add(dict(zip(names, found, strict=True)))
        return narrowed(taught.batch, self.source.layers, self.layers)


def sequences_of(
    taught: Taught, rows: Sequence[Row], layers: Sequence[int]
) -> Iterator[States | None]:
    """A micro-batch row by row, on the CPU and without padding; None for a row to be dropped."""
    batch = moved(taught.batch, torch.device("cpu"))
    assert taught.log_norm is not None, "a store keeps the log-norms"
    norms = taught.log_norm.cpu()
    by_layer = dict(zip(layers, batch.features.chunk(max(1, len(layers)), dim=-1), strict=False))
    for place, (row, good) in enumerate(zip(rows, taught.finite, strict=True)):
        n = len(row.ids)
        yield (
            None
            if not good
            else States(
                ids=batch.ids[place, :n].to(torch.int32),
                mask=batch.mask[place, :n],
                layers={layer: states[place, :n] for layer, states in by_layer.items()},
                last_hidden=batch.last_hidden[place, :n],
                top=batch.top[place, :n].to(torch.int32),
                log_norm=norms[place, :n],
            )
        )


def narrowed(batch: TeacherBatch, have: tuple[int, ...], want: tuple[int, ...]) -> TeacherBatch:
    """The batch with the captured layers `want` only, of those that it has; perhaps none."""
    if have == want:
        return batch
    width = batch.last_hidden.shape[-1]
    parts = [batch.features[..., :0]]
    for layer in want:
        if layer == LAST:
            parts.append(batch.last_hidden)
            continue
        start = have.index(layer) * width
        parts.append(batch.features[..., start : start + width])
    return replace(batch, features=torch.cat(parts, dim=-1))
