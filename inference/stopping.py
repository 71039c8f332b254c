"""What chances say of a draft: where a chain ends, and how sure a tree is of siblings.

A chain ends where it is no longer likely that all of it is accepted.

A head's confidence in a token depends on the tokens before it, so a chain may end before it
is drawn. A token's own draft probability depends on its value, so a chain ends after that token,
which is submitted: ratio rules stay exact (arXiv 2607.05147). To leave a token out because of its
own value would bias them.

Shapes: B rows, m nodes, w siblings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Stop:
    """The chance that each row's chain is accepted so far, and how deep that lets it go."""

    def __init__(self, least: float, limits: Sequence[int]) -> None:
        """least: the chance below which a row stops; limits: the depth it may have anyway."""
        self.least = least
        self.limits = list(limits)
        self.chances = [1.0] * len(limits)

    def before(self, level: int, confidence: Tensor) -> list[int]:
        """Take the (B,) chances of tokens not yet drawn, `level` tokens deep; the limits now."""
        return self._take(level, confidence)

    def after(self, level: int, shares: Tensor) -> list[int]:
        """Take the (B,) draft probabilities of tokens drawn there; the limits now."""
        return self._take(level + 1, shares)

    def _take(self, depth: int, factors: Tensor) -> list[int]:
        for row, factor in enumerate(factors.tolist()):
            self.chances[row] *= factor
            if not self.chances[row] >= self.least:  # NaN, too, is no chance
                self.limits[row] = min(self.limits[row], depth)
        return self.limits


def by_confidence(logs: Tensor, confidence: Tensor) -> Tensor:
    """Log chances of siblings: logs (B, m, w) draft log-probabilities, falling; confidence (B, m).

    The best one has the confidence's; the others share what that leaves, as the draft would divide
    it, and none of them has more than the best.
    """
    sure = confidence.to(logs.dtype)[..., None]
    rest = -torch.expm1(logs[..., :1]).clamp(max=-torch.finfo(logs.dtype).eps)
    others = (1 - sure).log() + logs - rest.log()
    return torch.cat((sure.log(), torch.minimum(others[..., 1:], sure.log())), dim=-1)
