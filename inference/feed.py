"""What was committed since a head was last asked: the tokens and states it has yet to be given.

A head may rest for many rounds, or be asked for some rows only; what it missed waits here.

Shapes: B rows, n newly committed tokens, L * D captured features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Feed:
    """Per row: committed tokens, and the features of those before them, in order."""

    def __init__(self, batch: int, reads_states: bool, device: torch.device) -> None:
        self._reads_states = reads_states
        self._device = device
        self._features: list[list[Tensor]] = [[] for _ in range(batch)]
        self._pending: list[list[int]] = [[] for _ in range(batch)]
        self._seen = [0] * batch

    def start(self, row: int) -> None:
        """Forget a row: another sequence begins there."""
        self._features[row], self._pending[row], self._seen[row] = [], [], 0

    def add(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        """Take a row's text so far, and features (n, L * D) as drafters observe them."""
        if not self._reads_states:  # tokens alone, the first one included
            self._pending[row].extend(ids[self._seen[row] :])
            self._seen[row] = len(ids)
            return
        assert features is not None
        self._features[row].append(features)
        self._pending[row].extend(ids[len(ids) - len(features) :])

    def take(self, fed: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """What these rows are owed, which is then given: features (B, n, L * D), tokens (B, n),
        padded on the right, and counts (B,).
        """
        pending = [tokens if fed[row] else [] for row, tokens in enumerate(self._pending)]
        n = max(map(len, pending))
        next_ids = torch.zeros(len(pending), n, dtype=torch.long)
        for row, tokens in enumerate(pending):
            next_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        features = self._stacked(fed, n)
        for row, given in enumerate(fed):
            if given:
                self._features[row], self._pending[row] = [], []
        counts = torch.tensor([len(tokens) for tokens in pending])
        return features, next_ids.to(self._device), counts

    def _stacked(self, fed: Sequence[bool], n: int) -> Tensor:
        """(B, n, L * D) of these rows, padded on the right; L = 0 where none are read."""
        rows = [
            torch.cat(features) if given and features else None
            for given, features in zip(fed, self._features, strict=True)
        ]
        like = next((row for row in rows if row is not None), None)
        if like is None:
            return torch.zeros(len(rows), n, 0, device=self._device)
        if len(rows) == 1:
            return like[None]
        stacked = like.new_zeros(len(rows), n, like.shape[1])
        for row, value in enumerate(rows):
            if value is not None:
                stacked[row, : len(value)] = value
        return stacked
