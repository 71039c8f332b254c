"""One sequence being decoded: its tokens, where it ends, and what its rounds came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafthead.inference.history import History
from drafthead.inference.metrics import Round


@dataclass
class Row:
    """`ids` grows; its last token is the root of the next round."""

    ids: list[int]
    """The prompt, until tokens are emitted."""
    limit: int
    """Most new tokens."""
    stop: Stop
    padding: Sequence[int] = ()
    """What stands before the prompt where `generate` padded it."""
    logits: list[Tensor] | None = None
    """If a list: the target's raw logits (V,) behind each emitted token."""
    device: torch.device | str = "cpu"
    """Where processors and criteria want their ids."""
    index: int = 0
    """Its place in the batch that `generate` was given."""
    done: bool = False
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)
        capacity = self.prompt + self.limit
        self.history = History(self.ids, capacity, self.padding, self.device, self.index)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt :]

    @property
    def left(self) -> int:
        return self.limit - (len(self.ids) - self.prompt)

    def emit(self, tokens: Sequence[int]) -> int:
        """Append tokens in order up to the first stop or the limit; how many were emitted."""
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            self.history.append(token)
            if self.stop(self) or self.left <= 0:
                self.done = True
                return count
        return len(tokens)


Stop = Callable[[Row], bool]
"""Whether a row, whose last token was just emitted, ends with it."""


def stop_at(eos: Sequence[int]) -> Stop:
    """Stop at any of these ids."""
    ends = frozenset(eos)
    return lambda row: row.ids[-1] in ends
