"""Keyed Gumbel noise g(seed, stream, position, token): the randomness of lossless sampling.

The generator is counter-based (Philox 4x64, numpy's): a row of noise depends on its four
coordinates only, never on what was drawn before, so plain and drafted decoding, in any batch, use
the same numbers. `token` is the target's id; `position` counts the row's real tokens; `purpose`
separates the independent streams that ratio rules need (arXiv 2211.17192) from the one that
coupled sampling shares between draft and target (arXiv 2408.07978).

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
        self._rows: dict[tuple[int, Purpose], Tensor] = {}

    def _uniform(
        self, position: int, purpose: Purpose, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        counter = np.array([0, position, int(purpose), 0], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter)).random(count)

    def gumbel(self, position: int, purpose: Purpose = Purpose.COUPLED) -> Tensor:
        """(V,) fp32 noise of one position; kept until `forget`, since draft and target both ask."""
        key = (position, purpose)
        if key not in self._rows:
            uniform = np.maximum(self._uniform(position, purpose, self._vocab_size), 2.0**-54)
            noise = -np.log(-np.log1p(-uniform))
            self._rows[key] = torch.from_numpy(noise.astype(np.float32)).to(self._device)
        return self._rows[key]

    def uniform(self, position: int) -> float:
        """The accept decision's number in [0, 1) at one position."""
        return float(self._uniform(position, Purpose.ACCEPT, 1)[0])

    def forget(self, position: int) -> None:
        """Drop the rows of earlier positions; asking again makes the same ones anew."""
        for key in [key for key in self._rows if key[0] < position]:
            del self._rows[key]
