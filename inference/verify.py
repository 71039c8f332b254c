"""Acceptance rules: pure functions of logits, tree and noise; no model, no global randomness.

Each says which drafted nodes are kept and which token the target adds. They ask for the target's
law only at the nodes they reach (through callables), so warps and noise are computed nowhere
else, and a branch that is not kept cannot influence anything, NaN or not. Greedy and coupled
decoding are one rule: greedy is coupled decoding without noise.

Shapes: N nodes, K length of a chain, V vocabulary. Logits are those after all warps
(temperature, top-k, top-p): a removed token is -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

RULES = ("coupled", "rejection")


def choose(logits: Tensor, noise: Tensor | None) -> int:
    """The target's token: argmax of logits (V,) + Gumbel noise (V,), the lowest id on ties.

    With noise this is a draw from softmax(logits) (the Gumbel-max identity); without, the greedy
    token.
    """
    scores = logits if noise is None else logits + noise
    return int(scores.argmax())


def walk(
    tokens: Sequence[int], parents: Sequence[int], choice_after: Callable[[int, int], int]
) -> tuple[list[int], int]:
    """Follow the target's choices down the tree: the nodes kept, in order, and the token after the
    last.

    `choice_after(node, depth)` is the token that the target emits after that node (-1, 0: the
    root), whatever was drafted. A node is kept only if it is that very token, so the output is what
    plain decoding emits (arXiv 2408.07978, 2506.05632); without noise, greedy verification.
    """
    path: list[int] = []
    at = -1
    while True:
        token = choice_after(at, len(path))
        children = [i for i, p in enumerate(parents) if p == at and tokens[i] == token]
        if not children:
            return path, token
        at = children[0]
        path.append(at)


def accept_probability(p: Tensor, q: Tensor, token: int) -> float:
    """min(1, p(x) / q(x)), p and q (V,) probabilities (arXiv 2211.17192, 2302.01318)."""
    if not q[token] > 0:  # NaN, too, must not pass for certainty
        raise ValueError(
            f"token {token} was proposed with probability {float(q[token])}: "
            "q is not the law it was drawn from"
        )
    return min(1.0, float(p[token]) / float(q[token]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), (V,): the law of the token emitted after a rejection."""
    left = (p - q).clamp_min(0)
    mass = left.sum()
    # So small a mass means a rejection that had probability zero up to rounding.
    return p if mass < 1e-12 else left / mass


def reject_chain(
    tokens: Sequence[int],
    proposals: Tensor | None,
    probs_after: Callable[[int], Tensor],
    uniform: Callable[[int], float],
    gumbel: Callable[[int], Tensor],
) -> tuple[int, int]:
    """Token-level rejection sampling of a chain (arXiv 2211.17192): how many tokens are kept, and
    the one added.

    tokens: K drafted; proposals: (K, V) the law each was drawn from, None if they are a fixed guess
    (a law with all its mass there); probs_after(k): (V,) the target's law after k drafted tokens;
    uniform(k) in [0, 1) and gumbel(k) (V,): accept number and recovery noise of depth k = 0 .. K,
    in streams independent of each other and of the draft's.
    """
    for k, token in enumerate(tokens):
        p = probs_after(k)
        q = _certain(p, token) if proposals is None else proposals[k]
        if not uniform(k) < accept_probability(p, q, token):
            return k, choose(residual(p, q).log(), gumbel(k))
    k = len(tokens)
    return k, choose(probs_after(k).log(), gumbel(k))


def _certain(like: Tensor, token: int) -> Tensor:
    """The law (V,) of a token that is proposed whatever happens."""
    law = like.new_zeros(like.shape)
    law[token] = 1
    return law
