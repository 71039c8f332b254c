"""Acceptance rules: pure functions of a drafted tree, the target's laws and chance; no model.

Each says which drafted nodes are kept, and which token the target adds after them. They ask for the
target's law only at the nodes they reach (through callables), so warps and noise are computed
nowhere else, and a branch that is not kept cannot influence anything, NaN or not. All that is
random goes through `Chance`, told as probabilities, so that a test can follow every outcome of the
very code that decodes.

When exact. The exact rules emit the target's law whatever the drafts are, if a drafter keeps two
promises. Nodes with a law were drawn from it, siblings one after another without replacement, and
whether a drawn node is submitted depends on neither its own value nor later draws: stop *after* an
unlikely token, never drop it. A fixed guess may depend on the text, on its ancestors and on the
siblings before it, so a guess that an earlier sibling already made may be left out. Coupled
sampling asks for neither: any tree will do.

Shapes: N nodes, K length of a chain, V vocabulary. Laws are probabilities after all warps
(temperature, top-k, top-p): a removed token has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from drafthead.inference.tree import Tree


@dataclass(frozen=True)
class Rule:
    """What a rule needs, and what it promises above temperature 0.

    At temperature 0 every exact rule is the greedy walk, of any tree.
    """

    exact: bool
    """Whether the text has the target's own law."""
    chains_only: bool = False
    needs_proposals: bool = False
    """Whether drafts must be draws, and carry the law they were drawn from."""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "coupled": Rule(exact=True),
        "rejection": Rule(exact=True, needs_proposals=True),
        "block": Rule(exact=True, chains_only=True, needs_proposals=True),
        "typical": Rule(exact=False),
    }
)

EPSILON, DELTA = 0.09, 0.3
"""Of typical acceptance, as Medusa's decoding passes them."""

Path = Sequence[int]
"""Nodes from a child of the root downwards; empty for the root."""
LawAfter = Callable[[Path], Tensor]
"""(V,) the law of the target's token after these nodes."""
ChoiceAfter = Callable[[Path], int]
"""The token that the target emits after these nodes, whatever was drafted."""


class Chance(Protocol):
    """All that is random in a ratio rule; every decision is independent of the others.

    `depth` counts the drafted tokens before the token in question, `sibling` the siblings before.
    """

    def accept(self, probability: float, depth: int, sibling: int = 0) -> bool: ...

    def draw(self, law: Tensor, depth: int) -> int:
        """A token from a law (V,), which need not be normalised."""
        ...


# Greedy and coupled: the target's token is settled before drafts are looked at


def choose(logits: Tensor, noise: Tensor | None) -> int:
    """The target's token: argmax of logits (V,) + Gumbel noise (V,), the lowest id on ties.

    With noise this is a draw from softmax(logits) (the Gumbel-max identity); without, the greedy
    token.
    """
    scores = logits if noise is None else logits + noise
    return int(scores.max(-1).indices)  # argmax has the same ties, and is slow in bfloat16


def walk(
    tokens: Sequence[int], parents: Sequence[int], choice_after: ChoiceAfter
) -> tuple[list[int], int]:
    """Follow the target's choices down the tree: the nodes kept, in order, and the token after the
    last.

    A node is kept only if it is that very token, so the output is what plain decoding emits
    (arXiv 2408.07978, 2506.05632); without noise this is greedy verification.
    """
    path: list[int] = []
    at, token = -1, choice_after(path)
    for node, parent in enumerate(parents):  # parents come first, so one pass sees the whole way
        if parent == at and tokens[node] == token:
            path.append(node)
            at, token = node, choice_after(path)
    return path, token


# Ratio rules: drafts are draws, and kept in proportion to what the target gives them


def accept_probability(p: Tensor, q: Tensor, token: int) -> float:
    """min(1, p(x) / q(x)), p and q (V,) probabilities (arXiv 2211.17192, 2302.01318)."""
    return min(1.0, _ratio(p, q, token))


def _ratio(p: Tensor, q: Tensor, token: int) -> float:
    ours, drafts = torch.stack([p[token], q[token]]).tolist()
    if not drafts > 0:  # NaN, too, must not pass for certainty
        raise ValueError(
            f"token {token} was proposed with probability {drafts}: "
            "q is not the law it was drawn from"
        )
    return float(ours / drafts)


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """norm(max(weight * p - q, 0)), (V,): what the target still has to give after a rejection."""
    left = (weight * p - q).clamp_min(0)
    mass = left.sum()
    # So small a mass means a rejection that had probability zero up to rounding.
    return p if mass < 1e-12 else left / mass


def without(law: Tensor, drawn: Sequence[int]) -> Tensor | None:
    """The law (V,) of the next draw after these tokens; None if they were all it had."""
    if not drawn:
        return law
    left = law.index_fill(0, torch.tensor(drawn, device=law.device), 0)
    mass = left.sum()
    return left / mass if mass > 0 else None


def reject(tree: Tree, law_after: LawAfter, chance: Chance) -> tuple[list[int], int]:
    """Recursive rejection without replacement: the nodes kept, and the token added.

    Siblings are tested in turn, each by the ratio of what the target still has to give there to the
    law that the sibling was drawn from, which is its group's law without the earlier draws of the
    group (RSD, arXiv 2402.14160; Sequoia, arXiv 2402.12374). A fixed guess has all its law's mass.
    Where every node has one child this is token-level rejection (arXiv 2211.17192).
    """
    path: list[int] = []
    at, left, refused = -1, law_after(path), _Refused()
    for node, parent in enumerate(tree.parents):
        if parent != at:
            continue
        token, law = tree.tokens[node], _proposal(tree, node)
        q = _certain(left, token) if law is None else without(law, refused.of(law))
        if q is None:  # nothing was left to draw from: no draw, so no test
            continue
        if chance.accept(accept_probability(left, q, token), len(path), refused.count):
            path.append(node)
            at, left, refused = node, law_after(path), _Refused()
        else:
            left = residual(left, q)
            refused.add(token, law)
    return path, chance.draw(left, len(path))


class _Refused:
    """The refused children of one node, by the law they were drawn from."""

    def __init__(self) -> None:
        self.count = 0
        self._drawn: dict[int, list[int]] = {}

    def of(self, law: Tensor) -> list[int]:
        return self._drawn.get(id(law), [])  # siblings share the very tensor

    def add(self, token: int, law: Tensor | None) -> None:
        self.count += 1
        if law is not None:
            self._drawn.setdefault(id(law), []).append(token)


def block(tree: Tree, law_after: LawAfter, chance: Chance) -> tuple[list[int], int]:
    """Block verification of a chain: the longest prefix that passes a joint test
    (arXiv 2403.10444), never shorter on average than token by token.

    `depth` of an accept decision is that of the last token it would keep. All K tokens are looked
    at, so the draws behind the refused ones are spent: a next round must not use them again.
    """
    path = range(len(tree))
    weights, laws = [1.0], []
    for k, token in enumerate(tree.tokens):
        p, law = law_after(path[:k]), _proposal(tree, k)
        q = _certain(p, token) if law is None else law
        laws.append((p, q))
        weights.append(min(1.0, weights[-1] * _ratio(p, q, token)))
        if not weights[-1] > 0:  # nothing from here on can be kept
            break
    for kept in range(len(weights) - 1, 0, -1):
        whole = kept == len(tree)
        passes = weights[kept] if whole else _prefix_probability(weights[kept], laws, kept)
        if chance.accept(passes, kept - 1):
            break
    else:
        kept = 0
    if kept == len(tree):
        return list(path), chance.draw(law_after(path), kept)
    p, q = laws[kept]
    return list(path[:kept]), chance.draw(residual(p, q, weights[kept]), kept)


def _prefix_probability(weight: float, laws: Sequence[tuple[Tensor, Tensor]], kept: int) -> float:
    """Of keeping exactly `kept` tokens once no longer prefix has passed."""
    if not weight > 0:
        return 0.0
    p, q = laws[kept]
    left = float((weight * p - q).clamp_min(0).sum())
    rest = left + 1 - weight
    return left / rest if rest > 0 else 1.0  # p == q there: a longer prefix passes for certain


def drawn(law: Tensor, uniform: float) -> int:
    """The token at which the cumulative law (V,) passes a 53-bit number in [0, 1): a draw from it.

    The law need not be normalised; a token without probability is never drawn.
    """
    ends = law.double().cumsum(0)
    total = float(ends[-1])
    if not (total > 0 and math.isfinite(total)):
        raise ValueError(f"a law of mass {total} has no token to draw")
    # 53 bits below 1 keep the product below the total, however it is rounded.
    return int((ends > uniform * total).max(-1).indices)


def _proposal(tree: Tree, node: int) -> Tensor | None:
    """The law (V,) that a node was drawn from; None for a fixed guess."""
    return tree.proposals[node] if tree.proposals else None


def _certain(like: Tensor, token: int) -> Tensor:
    """The law (V,) of a token that is proposed whatever happens."""
    law = like.new_zeros(like.shape)
    law[token] = 1
    return law


# Not exact


def typical(tree: Tree, law_after: LawAfter, choice_after: ChoiceAfter) -> tuple[list[int], int]:
    """Typical acceptance (Medusa, arXiv 2401.10774): keep what the target finds likely enough.

    A token stays if p(x) > min(EPSILON, DELTA exp(-H(p))). The longest such path wins, the likelier
    of equal ones; the target's own token follows. The text does not have the target's law.
    """
    paths: dict[int, list[int]] = {-1: []}
    likelihoods = {-1: 0.0}
    laws: dict[int, tuple[Tensor, float]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in paths:
            continue
        if parent not in laws:
            p = law_after(paths[parent])
            laws[parent] = p, typical_threshold(p)
        p, threshold = laws[parent]
        probability = float(p[token])
        if probability > threshold:
            paths[node] = [*paths[parent], node]
            likelihoods[node] = likelihoods[parent] + math.log(probability)
    best = max(paths, key=lambda node: (len(paths[node]), likelihoods[node]))
    return paths[best], choice_after(paths[best])


def typical_threshold(p: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """min(epsilon, delta exp(-H)) of a law (V,); H is its entropy in nats."""
    entropy = -float(torch.special.xlogy(p, p).sum())
    return min(epsilon, delta * math.exp(-entropy))
