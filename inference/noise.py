"""Keyed noise g(seed, stream, purpose, position, token): the randomness of lossless sampling.

The generator is counter-based (Philox 4x64, numpy's): a row of noise depends on its coordinates
only, never on what was drawn before, so plain and drafted decoding, in any batch, use the same
numbers. `token` is the target's id; `position` counts the row's real tokens; `purpose` separates
the independent streams that ratio rules need (arXiv 2211.17192) from the one that coupled sampling
shares between draft and target (arXiv 2408.07978).

A round of a ratio rule looks ahead: it draws drafts and accept numbers for positions that it may
not decide. Where it depends on them (block verification does), a later round must not see them
again, so those two purposes have one coordinate more: how much was decided when the round began.

Shapes: V the target's vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """Which of the independent streams a row of noise comes from."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


AHEAD = (Purpose.DRAFT, Purpose.ACCEPT)
"""Asked for positions that the round may not decide, and fresh in every round."""


class Noise:
    """The noise of one sequence.

    Uniforms have 53 bits. Gumbel noise is -log(-log1p(-u)): small u, the tail that decides rare
    tokens, keeps its full precision there.
    """

    def __init__(
        self, seed: int, stream: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        if seed < 0 or stream < 0:
            raise ValueError(f"seed {seed} and stream {stream} must not be negative")
        self._key = np.array([seed % 2**64, stream % 2**64], dtype=np.uint64)
        self._vocab_size = vocab_size
        self._device = device
        self._decided = 0
        self._rows: dict[tuple[int, Purpose], Tensor] = {}

    def _uniform(
        self, position: int, purpose: Purpose, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        since = self._decided if purpose in AHEAD else 0
        counter = np.array([0, position, int(purpose), since], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter)).random(count)

    def gumbel(self, position: int, purpose: Purpose = Purpose.COUPLED) -> Tensor:
        """(V,) fp32 noise of one position; kept until `forget`, since draft and target both ask."""
        key = (position, purpose)
        if key not in self._rows:
            uniform = np.maximum(self._uniform(position, purpose, self._vocab_size), 2.0**-54)
            noise = -np.log(-np.log1p(-uniform))
            self._rows[key] = torch.from_numpy(noise.astype(np.float32)).to(self._device)
        return self._rows[key]

    def uniform(self, position: int, purpose: Purpose = Purpose.ACCEPT, index: int = 0) -> float:
        """One number in [0, 1) of a position's row; siblings have an index each."""
        return float(self._uniform(position, purpose, index + 1)[index])

    def forget(self, position: int) -> None:
        """Everything before this position is decided: drop those rows, and begin a fresh round.

        Asking again for a row that no round looks ahead with makes the same one anew.
        """
        self._decided = position
        for key in [k for k in self._rows if k[0] < position or k[1] in AHEAD]:
            del self._rows[key]
