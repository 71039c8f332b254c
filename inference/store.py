"""The target's key/value store: preallocated, one write offset per row, ragged commit.

Row b holds its committed tokens in slots 0 .. lengths[b] - 1, without holes, whatever its
neighbours accepted. A verify pass writes its tree behind them; `commit` moves the accepted branch
to the front of that region and drops the rest by not counting it. So after every round the valid
slots equal those of a fresh prefill. It knows nothing of trees beyond the slots to keep.

Shapes: B batch, H key/value heads, C capacity in slots, n tokens of one forward, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from drafthead.heads.blocks import write_rows


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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows, offsets = self.store.rows, self.store.offsets
        keys, values = self.keys[rows], self.values[rows]
        write_rows(keys, key_states, offsets)
        write_rows(values, value_states, offsets)
        end = max(offsets) + key_states.shape[2]
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.store.offsets) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.store.offsets)

    def get_max_length(self) -> int:
        return self.store.capacity


class Store(Cache):
    """Keys and values of `batch` rows, each of at most `capacity` tokens and draft nodes."""

    def __init__(self, num_layers: int, batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.lengths = [0] * batch
        self.rows = slice(0, batch)
        self.kept = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.kept))

    @property
    def offsets(self) -> list[int]:
        """Write offsets of the rows that the next forward is about."""
        return self.lengths[self.rows]

    def check_room(self, tokens: int) -> None:
        """Raise StoreFullError before a forward of `tokens` tokens per row that would not fit."""
        need = max(self.offsets) + tokens
        if need > self.capacity:
            raise StoreFullError(
                f"the key/value store holds {self.capacity} slots but {need} are needed: "
                "shorten the prompt, or lower max_new_tokens or the tree's nodes"
            )

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's tokens with these indices of the last forward (0 is the root)."""
        rows = range(self.batch)[self.rows]
        for row, path in zip(rows, paths, strict=True):
            if list(path) != list(range(len(path))):
                self._gather(row, self.lengths[row], path)
            self.lengths[row] += len(path)

    def _gather(self, row: int, start: int, path: Sequence[int]) -> None:
        end = start + len(path)
        for layer in self.kept:
            for buffer in (layer.keys, layer.values):
                assert buffer is not None
                source = torch.tensor([start + i for i in path], device=buffer.device)
                buffer[row, :, start:end] = buffer[row].index_select(1, source)

    def clear(self, row: int) -> None:
        """Forget a row, so that another sequence can be prefilled into it."""
        self.lengths[row] = 0
