"""Drafters whose fate is known: checks see drafts kept and refused, whatever the head does.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.inference.checks_remembered import Remembered, Text
from drafthead.inference.sampling import Sampler
from drafthead.inference.tree import Static, Tree


class _Stateless:
    """A drafter that remembers nothing."""

    name = "forced"
    layers: tuple[int, ...] = ()
    nodes = 0

    def open(self, batch: int, capacity: int) -> None:
        return None

    def start(self, row: int) -> None:
        return None

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        return None


class Scripted(_Stateless):
    """Drafts the known text with a wrong sibling before every token, and errs after `right`.

    So each round keeps some of it, never the first branch, and refuses the rest.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, right: int = 2) -> None:
        self.texts, self.vocab_size, self.right = [list(text) for text in texts], vocab_size, right
        self.nodes = 2 * (right + 1)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        return [self._draft(list(row), depth) for row, depth in zip(ids, depths, strict=True)]

    def _draft(self, ids: list[int], depth: int) -> Tree:
        text = next((text for text in self.texts if text[: len(ids)] == ids), [])
        branch = text[len(ids) : len(ids) + min(depth, self.right + 1)]
        if len(branch) > self.right:
            branch[self.right] = self._other(branch[self.right], 1)
        tokens: list[int] = []
        parents: list[int] = []
        for token in branch:
            at = len(tokens) - 1
            tokens += [self._other(token, 2), token]
            parents += [at, at]
        return Tree(tokens, parents, source=self.name)

    def _other(self, token: int, by: int) -> int:
        return (token + by) % self.vocab_size


class OwnGuess(_Stateless):
    """Draws a tree from laws that lean towards the target's best token, by a known share.

    A large share is refused often, and leaves the other tokens to be drawn; a small one is kept.
    """

    def __init__(self, known: Remembered, shape: Static, temperature: float, share: float) -> None:
        """`temperature`: that of the sampler; `share`: what the best token gets of each law."""
        self.known, self.shape, self.nodes = known, shape, shape.nodes
        self.temperature, self.share = temperature, share
        self._ids = torch.arange(known.vocab_size, device=known.device)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        rows = range(len(ids))
        return [self._draft(row, ids[row], sampler) if depths[row] else Tree() for row in rows]

    def _draft(self, row: int, ids: Sequence[int], sampler: Sampler) -> Tree:
        start = tuple(ids[len(self.known.prompt) :])
        texts: dict[Text, Text] = {(): start}
        number: dict[Text, int] = {(): -1}
        tokens: list[int] = []
        laws: list[Tensor | None] = []
        ranked: dict[Text, tuple[list[int], Tensor | None]] = {}
        for path in self.shape.paths:
            above = path[:-1]
            if above not in ranked:
                position = len(ids) + len(above)
                ranked[above] = self._ranked(row, texts[above], position, sampler)
            best, law = ranked[above]
            number[path] = len(tokens)
            tokens.append(best[path[-1]])
            laws.append(law)
            texts[path] = (*texts[above], tokens[-1])
        parents = [number[path[:-1]] for path in self.shape.paths]
        return Tree(tokens, parents, laws, self.name)

    def _ranked(
        self, row: int, text: Text, position: int, sampler: Sampler
    ) -> tuple[list[int], Tensor | None]:
        """The best tokens after a text, in order, and the law that they were drawn from."""
        p = sampler.warps(self.known.after([text])[0][0][None])[0].softmax(-1)
        best, others = int(p.argmax()), p.clone()
        others[best] = 0
        q = others * ((1 - self.share) / others.sum().clamp_min(1e-30))
        q[best] = self.share
        scores, law = sampler.draft_scores(
            row, (self.temperature * q.log())[None], self._ids, position
        )
        ranked: list[int] = self._order(q, scores[0]).topk(self.shape.width).indices.tolist()
        return ranked, None if law is None else law[0]

    def _order(self, law: Tensor, scores: Tensor) -> Tensor:
        """What the tokens are ranked by."""
        return scores
