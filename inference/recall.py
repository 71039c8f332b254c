"""A target that remembers one row from one decode to the next: what a chat adds is all it runs.

The prompt of a later turn mostly begins with the ids of the turn before, answer included. Their
keys and values, and the states that a drafter reads, are the same whether they are computed again
or kept, since no token sees a later one; so only the ids behind the common beginning are run, as a
verify pass runs a draft. Rounding differs as it does there (see `decoder`). A drafter starts anew
and is given the states of the whole prompt, so its drafts do not depend on what was kept.

Shapes: T tokens of the row, n tokens of one forward, L * D captured features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.inference.store import Store
from drafthead.inference.target import Output, Target
from drafthead.inference.tree import Tree, chain

AT_ONCE = 128
"""Tokens of one forward over what is new: it makes logits of them all."""


class RecallingTarget(Target):
    """The same target; decoders of one row that follow each other share its keys and values."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.model, target.tokenizer)
        self._store: _KeptStore | None = None
        self.forget()

    def forget(self) -> None:
        """Run the next prompt whole."""
        self._ids: list[int] = []  # whose keys and values the store's first slots hold
        self._captured: tuple[int, ...] = ()
        self._states: list[Tensor] = []  # (n, L * D) each, T in all where layers are captured

    def open(self, batch: int, capacity: int) -> Store:
        """The store of the decode before, grown where needed; several rows get one of their own."""
        if batch != 1:
            return super().open(batch, capacity)
        if self._store is None or self._store.capacity < capacity:
            ids, self._ids = self._ids, []  # nothing is remembered should this be interrupted
            grown = _KeptStore(self, capacity)
            if self._store is not None:
                grown.take_over(self._store)
            self._store, self._ids = grown, ids
        self._store.drafted, self._store.ran = 0, None
        return self._store

    def prefill(
        self, store: Store, row: int, ids: Sequence[int], layers: Sequence[int] = ()
    ) -> Output:
        """See the base class; only the ids behind what is remembered are run."""
        if not isinstance(store, _KeptStore):
            return super().prefill(store, row, ids, layers)
        kept = self._common(ids) if self._captured == tuple(layers) else 0
        if not kept:
            self.forget()
            out = super().prefill(store, row, ids, layers)
            self._states = [] if out.features is None else [out.features[0]]
            self._captured = tuple(layers)
            self._ids = list(ids)  # last: what is remembered holds also after a Ctrl-C
            return out
        store.lengths[row] = kept
        self._ids = list(ids[:kept])
        self._states = [torch.cat(self._states)[:kept]] if layers else []
        for start in range(kept, len(ids), AT_ONCE):
            root, *rest = ids[start : start + AT_ONCE]
            out = self.verify(store, [root], [chain(rest)], layers)
            store.commit([range(1 + len(rest))])
        features = torch.cat(self._states)[None] if layers else None
        return Output(out.logits[:, -1:], features)

    def verify(
        self, store: Store, roots: Sequence[int], trees: Sequence[Tree], layers: Sequence[int] = ()
    ) -> Output:
        out = super().verify(store, roots, trees, layers)
        if isinstance(store, _KeptStore):
            store.ran = [roots[0], *trees[0].tokens], out.features
        return out

    def _common(self, ids: Sequence[int]) -> int:
        """How many first ids are remembered; the last one is always run, for its logits."""
        most = min(len(self._ids), len(ids) - 1)
        pairs = zip(self._ids[:most], ids, strict=False)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), most)

    def note(self, ids: Sequence[int], features: Tensor | None) -> None:
        """Remember what the store has committed; features: (n, L * D)."""
        if features is not None:
            self._states.append(features)
        self._ids += ids


class _KeptStore(Store):
    """A store of one row that tells its target which tokens it commits."""

    def __init__(self, target: RecallingTarget, capacity: int) -> None:
        super().__init__(target.num_layers, 1, capacity)
        self._target = target
        self.ran: tuple[list[int], Tensor | None] | None = None
        """Tokens of the last verify pass and their features (1, n, L * D)."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        ran, self.ran = self.ran, None
        if ran is None or not paths[0]:
            return super().commit(paths)
        tokens, features = ran
        path = list(paths[0])
        super().commit(paths)
        self._target.note(
            [tokens[i] for i in path], None if features is None else features[0, path]
        )

    def take_over(self, other: _KeptStore) -> None:
        """Copy the committed slots of a smaller store, layer by layer, which is then empty."""
        length = other.lengths[0]
        self.lengths[0] = length
        for ours, theirs in zip(self.kept, other.kept, strict=True):
            if not theirs.buffers:
                continue
            keys, values = theirs.buffers
            ours.lazy_initialization(keys, values)
            for buffer, old in zip(ours.buffers, (keys, values), strict=True):
                buffer[:, :, :length] = old[:, :, :length]
            theirs.keys = theirs.values = None
            theirs.is_initialized = False
