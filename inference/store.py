"""The target's key/value store: preallocated, one write offset per row, ragged commit.

Row b holds its committed tokens in slots 0 .. lengths[b] - 1, without holes, whatever its
neighbours accepted; there, slot and position are one. A verify pass writes its tree behind them;
`commit` moves the accepted branch to the front of that region and drops the rest by not counting
it. So after every round the valid slots equal those of a fresh prefill. Layers with a sliding
window are held in full: rolling back past a window's edge needs what left it. It knows nothing of
trees beyond the slots to keep.

Shapes: B batch, H key/value heads, C capacity in slots, n tokens of one forward, d head width,
S slots in view: those of the longest row, the n included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from drafthead.heads.blocks import Slots, row_slots, write_slots


class StoreFullError(ValueError):
    """A forward would write past the capacity of the store."""


class _Layer(CacheLayerMixin):
    """One attention layer's keys and values: (B, H, C, d), made at the first write."""

    is_sliding = False
    is_croppable = True

    def __init__(self, store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a masked slot that holds NaN would still poison the softmax.
        shape = (self.store.batch, key_states.shape[1], self.store.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys and values, nothing before the first write (a layer may borrow another's)."""
        if not self.is_initialized:
            return ()
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.store.spoilt is not None:
            key_states, value_states = self.store.mended(key_states, value_states)
        keys, values = (buffer[self.store.rows] for buffer in self.buffers)
        return self.store.write(keys, key_states), self.store.write(values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.store.offsets) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.store.offsets)

    def get_max_length(self) -> int:
        return self.store.capacity


class Store(Cache):
    """Keys and values of `batch` rows, each of at most `capacity` tokens and draft nodes.

    lengths: committed slots of each row. drafted: slots behind them, the same number in each row,
    that earlier forwards of this round have filled; whoever runs several forwards before a commit
    counts them here. rows: those that the next forward is about.
    """

    def __init__(self, num_layers: int, batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.lengths = [0] * batch
        self.drafted = 0
        self.rows = slice(0, batch)
        self.spoilt: Tensor | None = None
        """While mending: (B, n) bool, tokens whose keys or values were not finite."""
        self.kept = [_Layer(self) for _ in range(num_layers)]
        self._written: tuple[list[int], int, dict[torch.device, Slots]] = ([], 0, {})
        self._positions: Tensor | None = None
        super().__init__(layers=list(self.kept))

    @property
    def offsets(self) -> list[int]:
        """Write offsets of the rows that the next forward is about."""
        return [length + self.drafted for length in self.lengths[self.rows]]

    def check_room(self, tokens: int) -> None:
        """Raise StoreFullError before a forward of `tokens` tokens per row that would not fit."""
        need = max(self.offsets) + tokens
        if need > self.capacity:
            raise StoreFullError(
                f"the key/value store holds {self.capacity} slots but {need} are needed: "
                "shorten the prompt, or lower max_new_tokens or the tree's nodes"
            )

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write (B, H, n, d) at the rows' offsets; gives the slots in view, (B, H, S, d)."""
        offsets, n = self.offsets, new.shape[2]
        first, last = min(offsets), max(offsets)
        if first == last:
            buffer[:, :, first : first + n] = new
        else:
            if self._written[:2] != (offsets, n):  # the index is the same for all layers
                self._written = (offsets, n, {})
            held = self._written[2]
            if buffer.device not in held:
                held[buffer.device] = row_slots(offsets, n, buffer.device)
            write_slots(buffer, new, held[buffer.device])
        return buffer[:, :, : last + n]

    def place(self, positions: Tensor) -> Tensor:
        """Note the positions (B, n) of the next forward's tokens; those of all slots, (B, S)."""
        offsets, n = self.offsets, positions.shape[1]
        device = positions.device
        if self._positions is None:
            self._positions = positions.new_zeros(self.batch, self.capacity)
        held = self._positions[self.rows]
        rows, slots, _ = row_slots(offsets, n, device)
        held[rows, slots] = positions
        index = torch.arange(max(offsets) + n, device=device)
        committed = index < torch.tensor(self.lengths[self.rows], device=device)[:, None]
        return torch.where(committed, index, held[:, : len(index)])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's tokens with these indices since the last commit (0 is the root)."""
        moves = []
        for row, path in zip(range(self.batch)[self.rows], paths, strict=True):
            start = self.lengths[row]
            moves += [(row, start + i, start + j) for j, i in enumerate(path) if i != j]
            self.lengths[row] += len(path)
        self.drafted = 0
        if moves:
            self._move(torch.tensor(moves).unbind(1))

    def _move(self, at: tuple[Tensor, ...]) -> None:
        """Copy slots within rows, all read before any is written; at: rows, from, to."""
        held: dict[torch.device, list[Tensor]] = {}
        for layer in self.kept:
            for buffer in layer.buffers:
                if buffer.device not in held:
                    held[buffer.device] = [index.to(buffer.device) for index in at]
                rows, source, destination = held[buffer.device]
                slots = buffer.transpose(1, 2)
                slots[rows, destination] = slots[rows, source]

    def clear(self, row: int) -> None:
        """Forget a row, so that another sequence can be prefilled into it."""
        self.lengths[row] = 0

    # Drafts that are not finite

    @contextmanager
    def mending(self, tokens: Tensor) -> Iterator[Tensor]:
        """Repeat a forward of (B, n) tokens so that a draft gone NaN harms no one but itself.

        A masked slot that holds NaN still makes NaN of all who do not see it (0 · NaN). So such
        slots are zeroed, old ones and new, and the new ones are marked in what is given: (B, n).
        """
        for row, length in enumerate(self.lengths):
            for layer in self.kept:
                for buffer in layer.buffers:
                    buffer[row, :, length:].nan_to_num_(0.0, 0.0, 0.0)
        self.spoilt = torch.zeros_like(tokens, dtype=torch.bool)
        try:
            yield self.spoilt
        finally:
            self.spoilt = None

    def mended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, n, d) with zeros where not finite, whose tokens are marked."""
        assert self.spoilt is not None
        for states in (keys, values):
            self.spoilt |= ~states.isfinite().all(dim=3).all(dim=1).to(self.spoilt.device)
        return keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
