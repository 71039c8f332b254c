"""What a row's logits processors and stopping criteria look at: its tokens, in one tensor.

The tensor is made once, so that asking for the text costs nothing that grows with it.

Shapes: P padding tokens, T real tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class History:
    """Padding, then the real tokens; a path of drafted ones may be laid behind them for a look."""

    def __init__(
        self,
        ids: Sequence[int],
        capacity: int,
        padding: Sequence[int] = (),
        device: torch.device | str = "cpu",
        index: int = 0,
    ) -> None:
        """`capacity`: most real tokens, those of a path included; `index`: the row's place in its
        batch, for processors that tell rows apart.
        """
        tokens = [*padding, *ids]
        self._tokens = torch.zeros(1, len(padding) + capacity, dtype=torch.long, device=device)
        self._tokens[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        self._start, self._end = len(padding), len(tokens)
        self.index = index

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    @property
    def padding(self) -> int:
        """Tokens in front of the real ones."""
        return self._start

    def __len__(self) -> int:
        """Real tokens."""
        return self._end - self._start

    def append(self, token: int) -> None:
        self._tokens[0, self._end] = token
        self._end += 1

    def text(self, path: Sequence[int] = ()) -> Tensor:
        """(1, T + len(path)) the real tokens and a path behind them; valid until the next call."""
        return self._laid(path)[:, self._start :]

    def padded(self, path: Sequence[int] = ()) -> Tensor:
        """(1, P + T + len(path)) the same with the padding that `generate` shows in front."""
        return self._laid(path)

    def _laid(self, path: Sequence[int]) -> Tensor:
        end = self._end + len(path)
        if path:
            self._tokens[0, self._end : end] = torch.tensor(list(path), dtype=torch.long)
        return self._tokens[:, :end]
