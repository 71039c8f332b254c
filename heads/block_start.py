"""A closed-form start for the block head's tensors: ridge regression towards the target's states.

The target's last state at t + 1 + i, from which it predicts token t + 2 + i, is regressed on what a
block after slot t knows: the captured states at t, and the token before the predicted one. The
token's part of the map becomes the Markov correction. The states' part goes through the first
layer's attention, which is made to look at the latest state: context and the block's own inputs
have opposite keys, and the product of a query and a key, constant but for their rotary turns, fades
with distance. Half of the key/value heads serve all inputs with the map of the later depths; the
others look so for the anchor alone, and add what the first depth has beside it. No tensor is added,
and everything is trained on afterwards.

Shapes: P = L * D normed states of a slot, D width, Hkv key/value heads, H query heads, d head
width, r rank of the correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block_layer import NormedAttention
from drafthead.heads.warm_start import RIDGE, low_rank, normed

REACHES = (4.0, 32.0, 256.0)
"""Tokens in which the product of query and key falls by a factor e, for a third of it each: the
first tells neighbours apart, the others keep far states from coming back as its turns repeat.
"""
SHARPNESS = 4.0
"""First weight of the queries' norm: how much the nearest state is preferred."""
STREAM = 4.0
"""Size of what attention writes: beside it the embedding in the stream counts little."""


@dataclass(frozen=True)
class Moments:
    """Second moments, means over positions: of states s at t, and at the first and the second
    depth of the token before e and of the goal y.
    """

    states: Tensor
    """(P, P) s s'."""
    mean: Tensor
    """(P,) s."""
    token_mean: Tensor
    """(D,) e at the first depth."""
    tokens: tuple[Tensor, ...]
    """(D, D) e e'."""
    mixed: tuple[Tensor, ...]
    """(P, D) s e'."""
    goals: tuple[Tensor, ...]
    """(P, D) s y'."""
    token_goals: tuple[Tensor, ...]
    """(D, D) e y'."""

    @classmethod
    def of(
        cls, batches: Iterable[TeacherBatch], embedding: Tensor, parts: int, eps: float
    ) -> Moments:
        """Those of all slots that have a label; parts: into how many the states are cut to be
        normed, 0 = they are taken as they are.
        """
        sums: dict[str, Tensor] = {}
        counts = [0, 0]
        for batch in batches:
            for depth in range(2):
                rows, slots = batch.supervised(2 + depth).nonzero(as_tuple=True)
                s = batch.features[rows, slots].float()
                if parts:
                    s = torch.cat([normed(part, eps) for part in s.chunk(parts, -1)], -1)
                e = normed(F.embedding(batch.ids[rows, slots + 1 + depth], embedding), eps)
                y = batch.last_hidden[rows, slots + 1 + depth].float()
                found = {"tokens": e.T @ e, "mixed": s.T @ e, "goals": s.T @ y}
                found["token_goals"] = e.T @ y
                found = {f"{name}{depth}": value for name, value in found.items()}
                if not depth:
                    found |= {"states": s.T @ s, "mean": s.sum(0), "token_mean": e.sum(0)}
                sums |= {name: value + sums.get(name, 0) for name, value in found.items()}
                counts[depth] += len(rows)
        if not counts[0]:
            raise ValueError("head.warm_start: no supervised position in its batches")
        sums = {n: s.double() / max(1, counts[n.endswith("1")]) for n, s in sums.items()}
        names = ("tokens", "mixed", "goals", "token_goals")
        return cls(
            sums["states"],
            sums["mean"],
            sums["token_mean"],
            *((sums[f"{name}0"], sums[f"{name}1"]) for name in names),
        )

    def maps(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of states to goals, (P, D), at the first and the second depth, beside a token's map of
        this rank, as (D, r) and (r, D).
        """
        if not rank:
            none = self.token_goals[0]
            first, later = (_ridge(self.states, y) for y in self.goals)
            return first, later, none[:, :0], none[:0]
        above = torch.cat([self.states, self.mixed[0]], 1)
        square = torch.cat([above, torch.cat([self.mixed[0].T, self.tokens[0]], 1)])
        both = _ridge(square, torch.cat([self.goals[0], self.token_goals[0]]))
        states, token = both.split([len(self.states), len(self.tokens[0])])
        before, after = low_rank(token, self.tokens[0], rank)
        later = _ridge(self.states, self.goals[1] - self.mixed[1] @ before @ after)
        return states, later, before, after


@dataclass(frozen=True)
class Start:
    """What the closed form comes to. Maps are (inputs, outputs)."""

    fuse: Tensor
    """(P, D) from states to context."""
    values: Tensor
    """(D, Hkv * d)."""
    back: Tensor
    """(Hkv * d, D)."""
    keys: Tensor
    """(D,) positive on context, negative on the block's own inputs."""
    anchors: Tensor
    """(D,) positive on known tokens, negative on masks."""
    inputs: Tensor
    """(D,) positive on both."""
    before: Tensor
    """(D, r) of the normed embedding of the token before."""
    correction: Tensor
    """(r, D)."""
    size: float
    """Root mean square of the states' part of a prediction."""
    own: int
    """Key/value heads, the last ones, that serve the anchor alone."""

    @torch.no_grad()
    def write(self, attention: NormedAttention, look: Tensor, heads: int, kv_heads: int) -> None:
        """Put the maps into the first layer's attention; look: (d,) from `fading`."""
        groups = heads // kv_heads
        wide = [self.inputs] * (kv_heads - self.own) + [self.anchors] * self.own
        queries = [torch.outer(look, w.to(look)) for w in wide for _ in range(groups)]
        attention.q_proj.weight.copy_(torch.cat(queries))
        attention.k_proj.weight.copy_(torch.outer(look, self.keys.to(look)).repeat(kv_heads, 1))
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(1)
        attention.v_proj.weight.copy_(self.values.T)
        # The query heads of one value head share its part of the map.
        back = self.back.T.unflatten(1, (kv_heads, -1)) * (STREAM / self.size / groups)
        attention.o_proj.weight.copy_(back.repeat_interleave(groups, 1).flatten(1))


def fit(moments: Moments, mask: Tensor, head_dim: int, kv_heads: int, own: int, rank: int) -> Start:
    """mask: (D,) normed; own: key/value heads that serve the anchor alone."""
    first, later, before, correction = moments.maps(rank)
    width = len(mask)
    # The D directions of the states that matter most to both maps, of like size.
    fuse, _ = low_rank(torch.cat([first, later], -1), moments.states, width)
    fuse = fuse / (fuse * (moments.states @ fuse)).sum(0).mean().sqrt()
    context = fuse.T @ moments.states @ fuse
    seen = (moments.states @ fuse).T
    on_first, on_later = (_solved(context, seen @ goal) for goal in (first, later))
    shared = (kv_heads - own) * head_dim
    values, back = low_rank(on_later if own else on_first, context, shared)
    mask = mask.double()
    directions = _directions(moments, context, moments.mean @ fuse, mask)
    if own:
        rest, rest_back = low_rank(on_first - values @ back, context, own * head_dim)
        # A mask, which looks at itself there, gets nothing.
        rest = rest - torch.outer(mask, mask @ rest) / mask.square().sum()
        values, back = torch.cat([values, rest], 1), torch.cat([back, rest_back])
    size = float((first * (moments.states @ first)).sum(0).mean().sqrt())
    return Start(fuse, values, back, *directions, before, correction, size, own)


def _directions(
    moments: Moments, context: Tensor, mean: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(D,) each: `keys`, `anchors` and `inputs` of a `Start`, regressed on 1 and -1."""
    inputs = moments.tokens[0] + torch.outer(mask, mask)
    token = moments.token_mean
    return (
        _solved(context + inputs, mean - token - mask),
        _solved(inputs, token - mask),
        _solved(inputs, token + mask),
    )


def rare_direction(moments: Moments) -> Tensor:
    """(D,) of length sqrt(D): what tokens' embeddings have least of, for a mask to be told by."""
    axes: Tensor = torch.linalg.eigh(moments.tokens[0])[1]
    return axes[:, 0] * math.sqrt(len(axes))


def fading(frequencies: Tensor) -> Tensor:
    """(d,) query and key at once, whose product falls with the distance t that one is turned by.

    It is close to the mean of exp(-t / reach) over `REACHES`: their cosine transforms, on the
    (d / 2,) rotary frequencies, which are evenly spaced by logarithm.
    """
    reach = torch.tensor(REACHES)[:, None] * frequencies
    weights = reach / (1 + reach.square())
    half = (weights / weights.sum(1, keepdim=True)).mean(0).sqrt()
    return torch.cat([half, torch.zeros_like(half)])


def _ridge(square: Tensor, cross: Tensor) -> Tensor:
    """(P, D) map of least penalised error."""
    penalty = RIDGE * square.diagonal().mean() * torch.eye(len(square)).to(square)
    solution: Tensor = torch.linalg.solve(square + penalty, cross)
    return solution


def _solved(square: Tensor, cross: Tensor) -> Tensor:
    """The same, with no more penalty than keeps it regular."""
    tiny = 1e-4 * square.diagonal().mean() * torch.eye(len(square)).to(square)
    solution: Tensor = torch.linalg.solve(square + tiny, cross)
    return solution
