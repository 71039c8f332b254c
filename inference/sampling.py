"""How tokens are drawn: warps, rule and keyed noise, the same for plain and drafted decoding.

It applies the rules of `verify` to the rows a verify pass gives, and tells drafters how to rank
their candidates. It knows neither model nor head.

Shapes: n rows of a verify pass, m draft nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.tree import Tree
from drafthead.inference.verify import RULES, choose, reject_chain, walk

HISTORY_FREE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
"""Processors that look at the scores only, so every node of a tree may use them as they are."""


class UnsupportedSamplingError(ValueError):
    """A sampling setting cannot be honoured while drafting; the message names it."""


class Warps:
    """The logits processors of a run, in order; applied to target and draft alike."""

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self._processors = list(processors)
        for processor in self._processors:
            # Exact types: a subclass may look at the history.
            if type(processor) not in HISTORY_FREE:
                raise UnsupportedSamplingError(
                    f"{type(processor).__name__} cannot be honoured while drafting yet: leave it "
                    "out, or generate without custom_generate"
                )

    @classmethod
    def of(cls, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Warps:
        """The usual three, in transformers' order; 0 and 1.0 switch the truncations off."""
        made: list[LogitsProcessor] = []
        if temperature != 1.0:
            made.append(TemperatureLogitsWarper(temperature))
        if top_k > 0:
            made.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            made.append(TopPLogitsWarper(top_p))
        return cls(made)

    def __call__(self, logits: Tensor) -> Tensor:
        """(m, V) raw logits → (m, V) warped, in at least fp32."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self._processors:
            scores = processor(None, scores)
        return scores


class Sampler:
    """Rule, warps and the noise of each row; greedy where `noise` is None.

    `position` is always the index of the token being decided, counting the row's real tokens.
    """

    def __init__(
        self,
        warps: Warps | None = None,
        noise: Sequence[Noise] | None = None,
        rule: str = "coupled",
    ) -> None:
        if rule not in RULES:
            raise UnsupportedSamplingError(f"rule {rule!r}: choose one of {', '.join(RULES)}")
        self.warps = warps or Warps()
        self.noise = None if noise is None else list(noise)
        self.rule = rule

    @property
    def greedy(self) -> bool:
        return self.noise is None

    @property
    def needs_proposals(self) -> bool:
        """Whether drafts must carry the law they were drawn from (ratio rules)."""
        return self.rule == "rejection" and not self.greedy

    def accept(self, row: int, tree: Tree, logits: Tensor, position: int) -> tuple[list[int], int]:
        """Nodes kept and the token added, from a row's verify logits (n, V).

        `position` is that of the token after the root.
        """
        if self.needs_proposals:
            return self._accept_by_ratio(row, tree, logits, position)

        def choice_after(node: int, depth: int) -> int:
            scores = self.warps(_finite(logits[node + 1])[None])[0]
            noise = None if self.noise is None else self.noise[row].gumbel(position + depth)
            return choose(scores, noise)

        return walk(tree.tokens, tree.parents, choice_after)

    def _accept_by_ratio(
        self, row: int, tree: Tree, logits: Tensor, position: int
    ) -> tuple[list[int], int]:
        assert self.noise is not None
        if not tree.is_chain:
            raise UnsupportedSamplingError(
                f"rule {self.rule!r} verifies chains only: use a chain or rule='coupled'"
            )
        noise = self.noise[row]
        kept, token = reject_chain(
            tree.tokens,
            tree.proposals,
            lambda k: self.warps(_finite(logits[k])[None])[0].softmax(-1),
            lambda k: noise.uniform(position + k),
            lambda k: noise.gumbel(position + k, Purpose.RECOVER),
        )
        return list(range(kept)), token

    def draft_scores(
        self, row: int, logits: Tensor, draft_ids: Tensor, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Rank candidates for one position: scores (m, Vd), and the laws q (m, Vd) if needed.

        Scores are log q up to a constant (greedy), plus the noise that the target will use
        (coupled), or plus noise of the draft's own stream (ratio rules), where the best-scored
        candidate is then a draw from q.
        """
        if self.noise is None:
            return logits.float(), None
        if self.needs_proposals:  # a head whose logits are not finite has no law to draw from
            logits = logits.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)
        scores = self.warps(logits)
        purpose = Purpose.DRAFT if self.needs_proposals else Purpose.COUPLED
        noisy = scores + self.noise[row].gumbel(position, purpose)[draft_ids]
        return noisy, scores.softmax(-1) if self.needs_proposals else None

    def forget(self, row: int, position: int) -> None:
        """Drop noise of positions that are decided."""
        if self.noise is not None:
            self.noise[row].forget(position)


def _finite(logits: Tensor) -> Tensor:
    """Pass on the row that decides a committed token; not finite is an error, never token 0."""
    if not logits.amax().isfinite():  # NaN spreads through amax
        raise FloatingPointError(
            "the target's logits are not finite at a committed token: "
            "load it in bfloat16 or float32"
        )
    return logits
