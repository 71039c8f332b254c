"""Acceptance rules, proved by exact enumeration on a vocabulary of four: no sampling error.

The enumeration goes through `accept_probability` and `residual`; `reject_chain` is shown to take
exactly those decisions. Known mistakes, put in on purpose, must be seen.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from drafthead.inference.noise import Noise
from drafthead.inference.sampling import Sampler, UnsupportedSamplingError
from drafthead.inference.tree import Tree
from drafthead.inference.verify import accept_probability, reject_chain, residual

V = 4
STEPS = 3
Prefix = tuple[int, ...]
Law = dict[Prefix, float]
Table = Callable[[Prefix], Tensor]
Draft = tuple[float, list[int], Tensor | None]
"""Its probability, its tokens, and the laws they were drawn from."""
Drafts = Callable[[Prefix, int], Iterator[Draft]]
Accept = Callable[[Tensor, Tensor, int], float]
Recover = Callable[[Tensor, Tensor], Tensor]


def table(seed: int, sharpness: float, zeros: bool = False) -> Table:
    """A law (V,) for every prefix, all different."""
    known: dict[Prefix, Tensor] = {}

    def law(prefix: Prefix) -> Tensor:
        if prefix not in known:
            key = seed + sum((t + 1) * 11 ** (i + 1) for i, t in enumerate(prefix))
            generator = torch.Generator().manual_seed(key)
            logits = sharpness * torch.randn(V, generator=generator, dtype=torch.float64)
            if zeros:  # as top-k leaves it
                logits[logits.argmin()] = -math.inf
            known[prefix] = logits.softmax(-1)
        return known[prefix]

    return law


def certain(token: int) -> Tensor:
    law = torch.zeros(V, dtype=torch.float64)
    law[token] = 1
    return law


# Drafts


def sampled(q: Table) -> Drafts:
    """Each token is drawn from q given those before it."""

    def drafts(prefix: Prefix, length: int) -> Iterator[Draft]:
        for tokens in itertools.product(range(V), repeat=length):
            laws = [q(prefix + tokens[:k]) for k in range(length)]
            chance = math.prod(float(law[t]) for law, t in zip(laws, tokens, strict=True))
            if chance > 0:
                yield chance, list(tokens), torch.stack(laws)

    return drafts


def guessed(q: Table, soft: bool) -> Drafts:
    """The most likely tokens, always; `soft` claims that they were drawn from q."""

    def drafts(prefix: Prefix, length: int) -> Iterator[Draft]:
        tokens: Prefix = ()
        laws = []
        for _ in range(length):
            laws.append(q(prefix + tokens))
            tokens += (int(laws[-1].argmax()),)
        yield 1.0, list(tokens), torch.stack(laws) if soft else None

    return drafts


def stopping(q: Table, least: float, drop: bool) -> Drafts:
    """Stop at the first token of a probability below `least`: after it, or without it (`drop`)."""

    def drafts(prefix: Prefix, length: int) -> Iterator[Draft]:
        merged: dict[Prefix, float] = defaultdict(float)
        for chance, tokens, laws in sampled(q)(prefix, length):
            assert laws is not None
            low = [k for k, t in enumerate(tokens) if laws[k, t] < least]
            end = length if not low else low[0] + (not drop)
            merged[tuple(tokens[:end])] += chance
        for kept, chance in merged.items():
            laws = torch.stack([q(prefix + kept[:k]) for k in range(len(kept))] or [certain(0)])
            yield chance, list(kept), laws[: len(kept)]

    return drafts


# One round and the joint law of three tokens


def verdicts(
    prefix: Prefix,
    tokens: Sequence[int],
    proposals: Tensor | None,
    p: Table,
    accept: Accept = accept_probability,
    recover: Recover = residual,
) -> Iterator[tuple[float, int, int]]:
    """All outcomes of a round: probability, tokens kept, token added."""
    reached = 1.0
    for k, token in enumerate(tokens):
        law = p(prefix + tuple(tokens[:k]))
        q = certain(token) if proposals is None else proposals[k]
        chance = accept(law, q, token)
        if chance < 1:
            for added, share in enumerate(recover(law, q).tolist()):
                yield reached * (1 - chance) * share, k, added
        reached *= chance
    for added, share in enumerate(p(prefix + tuple(tokens)).tolist()):
        yield reached * share, len(tokens), added


def joint(
    drafts: Drafts,
    p: Table,
    length: int,
    accept: Accept = accept_probability,
    recover: Recover = residual,
) -> Law:
    """Law of the first STEPS tokens emitted, by as many rounds as it takes."""
    laws: Law = defaultdict(float)
    laws[()] = 1.0
    for done in range(STEPS):  # every way to a prefix is known before rounds begin there
        for prefix in [x for x in laws if len(x) == done]:
            before = laws.pop(prefix)
            for share, tokens, proposals in drafts(prefix, length):
                for event, kept, added in verdicts(prefix, tokens, proposals, p, accept, recover):
                    if event > 0:
                        emitted = (*prefix, *tokens[:kept], added)
                        laws[emitted[:STEPS]] += before * share * event
    return laws


def plain(p: Table) -> Law:
    return {
        tokens: math.prod(float(p(tokens[:k])[tokens[k]]) for k in range(STEPS))
        for tokens in itertools.product(range(V), repeat=STEPS)
    }


def distance(ours: Law, theirs: Law) -> float:
    """Total variation."""
    return sum(abs(ours.get(x, 0.0) - theirs.get(x, 0.0)) for x in {*ours, *theirs}) / 2


P, Q = table(1, 1.3), table(2, 1.3)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        (P, Q),
        (table(3, 3.0), table(4, 0.3)),
        (table(5, 1.0, zeros=True), table(6, 1.0)),
        (table(7, 1.0), table(8, 1.0, zeros=True)),
        (P, P),
    ],
    ids=["unlike", "sharp and flat", "target truncated", "draft truncated", "equal"],
)
def test_f50_rejection_gives_the_targets_joint_law(p: Table, q: Table, length: int) -> None:
    law = joint(sampled(q), p, length)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, plain(p)) < 1e-10


@pytest.mark.parametrize("length", [1, 2, 3])
def test_f50_a_fixed_guess_gives_the_targets_joint_law(length: int) -> None:
    """A draft that is a function of the text: kept with p(x), and not drawn again if refused."""
    assert distance(joint(guessed(Q, soft=False), P, length), plain(P)) < 1e-10


@pytest.mark.parametrize("least", [0.2, 0.4])
def test_f50_stopping_after_an_unlikely_token_is_harmless(least: float) -> None:
    assert distance(joint(stopping(Q, least, drop=False), P, 2), plain(P)) < 1e-10


# `reject_chain` takes these decisions


@pytest.mark.parametrize("fixed", [False, True], ids=["drawn", "fixed guess"])
def test_reject_chain_takes_exactly_the_enumerated_decisions(fixed: bool) -> None:
    """Every branch is driven by the callables, both sides of each threshold and each added token.

    The threshold of the accept number is accept_probability itself (strictly below accepts); the
    added token is the argmax of log law + noise, which draws it from that law.
    """
    prefix = (2,)
    drafts = guessed(Q, soft=False) if fixed else sampled(Q)
    events: set[tuple[Prefix, int, int]] = set()
    driven: set[tuple[Prefix, int, int]] = set()
    for _, tokens, proposals in drafts(prefix, 2):
        for chance, kept, added in verdicts(prefix, tokens, proposals, P):
            if chance > 0:
                events.add((tuple(tokens), kept, added))
        laws = [certain(t) for t in tokens] if proposals is None else list(proposals)
        limits = [
            accept_probability(P(prefix + tuple(tokens[:k])), laws[k], tokens[k]) for k in (0, 1)
        ]
        for u0, u1 in itertools.product(*[(0.0, math.nextafter(a, 0), a) for a in limits]):
            kept = 0 if u0 >= limits[0] else 1 if u1 >= limits[1] else 2
            if max(u0, u1) >= 1:
                continue  # the accept number is below 1: a sure token is never refused
            for wanted in range(V):
                asked: list[int] = []

                def gumbel(k: int, wanted: int = wanted, asked: list[int] = asked) -> Tensor:
                    asked.append(k)
                    return 1e3 * certain(wanted)

                ours, token = reject_chain(
                    tokens,
                    proposals,
                    lambda k, tokens=tokens: P(prefix + tuple(tokens[:k])),  # type: ignore[misc]
                    lambda k, pair=(u0, u1): pair[k],  # type: ignore[misc]
                    gumbel,
                )
                assert ours == kept
                assert asked == [kept], "noise of the depth where the token is added, and no other"
                if (tuple(tokens), kept, wanted) in events:
                    assert token == wanted
                driven.add((tuple(tokens), ours, token))
    assert driven == events


def test_a_token_the_target_cannot_emit_is_never_kept() -> None:
    p = torch.tensor([0.0, 0.6, 0.4, 0.0])
    q = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    kept, token = reject_chain([0], q, lambda k: p, lambda k: 0.0, lambda k: torch.zeros(V))
    assert (kept, token) == (0, 1)


def test_the_ratio_rule_refuses_a_tree() -> None:
    """A tree is not a chain with more tokens: siblings would be taken for successors."""
    logits = torch.zeros(3, V)
    sampler = Sampler(noise=[Noise(0, 0, V)], rule="rejection")
    with pytest.raises(UnsupportedSamplingError, match="'rejection' verifies chains only"):
        sampler.accept(0, Tree([1, 2], [-1, -1]), logits, 4)


# Negative controls: the enumeration sees each of these


def test_control_soft_q_on_a_fixed_guess_is_seen() -> None:
    assert distance(joint(guessed(Q, soft=True), P, 2), plain(P)) > 0.05


def test_control_residual_without_renormalising_is_seen() -> None:
    law = joint(sampled(Q), P, 2, recover=lambda p, q: (p - q).clamp_min(0))
    assert distance(law, plain(P)) > 0.05


def test_control_target_law_in_place_of_the_residual_is_seen() -> None:
    assert distance(joint(sampled(Q), P, 2, recover=lambda p, q: p), plain(P)) > 0.05


def test_control_lenience_is_seen() -> None:
    law = joint(sampled(Q), P, 2, accept=lambda p, q, x: min(1, 1.5 * float(p[x] / q[x])))
    assert distance(law, plain(P)) > 0.01


def test_control_dropping_unlikely_sampled_tokens_is_seen() -> None:
    assert distance(joint(stopping(Q, 0.2, drop=True), P, 2), plain(P)) > 0.02
    assert distance(joint(stopping(Q, 0.4, drop=True), P, 2), plain(P)) > 0.05


def test_control_one_number_for_draft_and_accept_is_seen() -> None:
    """One step: x by inverse transform of u, accepted iff the same u < p(x) / q(x); u is uniform.

    The measure of each event is the length of an interval, so this too is exact.
    """
    p, q = P(()), Q(())
    ends = q.cumsum(0).tolist()
    shared, separate = torch.zeros(V, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    for x in range(V):
        start, end = ends[x] - float(q[x]), ends[x]
        limit = accept_probability(p, q, x)
        for law, kept in ((shared, max(0.0, min(end, limit) - start)), (separate, q[x] * limit)):
            law[x] += kept
            law += (float(q[x]) - kept) * residual(p, q)
    assert (separate - p).abs().sum() / 2 < 1e-12
    assert (shared - p).abs().sum() / 2 > 0.02


# Identities


@pytest.mark.parametrize("seed", range(8))
def test_acceptance_is_one_minus_total_variation(seed: int) -> None:
    """sum_x q(x) min(1, p(x)/q(x)) = sum_x min(p, q) = 1 - TV; kept and recovered make p."""
    p, q = table(seed, 2.0, zeros=seed % 2 == 0)(()), table(seed + 50, 2.0)(())
    chances = torch.tensor([accept_probability(p, q, x) for x in range(V)], dtype=torch.float64)
    rate = float((q * chances).sum())
    assert rate == pytest.approx(1 - float((p - q).abs().sum() / 2), abs=1e-12)
    whole = q * chances + (1 - rate) * residual(p, q)
    assert (whole - p).abs().max() < 1e-12


def test_equal_laws_accept_everything() -> None:
    p = P(())
    assert all(accept_probability(p, p, x) == 1 for x in range(V))
    highest = math.nextafter(1, 0)
    kept, _ = reject_chain(
        [3, 1], torch.stack([p, p]), lambda k: p, lambda k: highest, lambda k: torch.zeros(V)
    )
    assert kept == 2


def test_disjoint_laws_accept_nothing_and_emit_the_targets() -> None:
    p = torch.tensor([0.3, 0.7, 0, 0], dtype=torch.float64)
    q = torch.tensor([0, 0, 0.5, 0.5], dtype=torch.float64)
    assert [accept_probability(p, q, x) for x in (2, 3)] == [0, 0]
    assert torch.equal(residual(p, q), p)
    with pytest.raises(ValueError, match="token 0 was proposed with probability 0"):
        accept_probability(p, q, 0)


def test_residual_of_equal_laws_is_a_law() -> None:
    """It has probability zero up to rounding; NaN there would be worse than any choice."""
    p = P(())
    assert torch.equal(residual(p, p), p)
    assert residual(p, p * (1 + 1e-15)).sum() == pytest.approx(1)


@pytest.mark.parametrize("probability", [0.0, math.nan])
def test_f50_a_token_its_law_does_not_know_is_an_error(probability: float) -> None:
    law = torch.tensor([0.5, probability, 0.5])
    with pytest.raises(ValueError, match="q is not the law it was drawn from"):
        accept_probability(torch.full((3,), 1 / 3), law, 1)
