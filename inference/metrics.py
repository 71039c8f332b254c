"""Acceptance, defined once: what training, evaluation, decoding and the model card all report.

A *round* is one verifying target forward (a prefill is none; a round without a draft counts).

- survival s_k: share of rounds in which the first k drafted tokens (of the accepted branch) were
  all accepted;
- conditional a_k = s_k / s_{k-1}, with s_0 = 1;
- tau: tokens emitted per round, the target's own included: tau = 1 + sum_k s_k - cut, where
  cut is what stop tokens and limits removed, per round;
- all are means over rounds (micro), with a bootstrap interval over prompts, none for one prompt;
- speed is tokens of the rounds per second of the rounds, all over all, and a speed-up the ratio of
  two speeds on the same prompts, which its interval resamples together.

Figures on given text, without decoding, are *simulated* and carry that word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from drafthead.inference.tree import Tree

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Interval = tuple[float, float]

RESAMPLES = 1000


@dataclass(frozen=True)
class Round:
    """What one verifying forward came to, for one row."""

    drafted: int
    """Nodes verified beside the root."""
    accepted: int
    """Nodes kept, which is also how deep the accepted branch is."""
    emitted: int
    """Tokens added to the text: accepted + 1, less what a stop or limit cut."""
    source: str = ""
    """Which drafter made the draft; empty where nothing was drafted."""
    depth: int = 0
    """Of the deepest node."""

    @classmethod
    def of(cls, tree: Tree, accepted: int, emitted: int) -> Round:
        source, depth = (tree.source, max(tree.depths)) if len(tree) else ("", 0)
        return cls(len(tree), accepted, emitted, source, depth)


@dataclass(frozen=True)
class Acceptance:
    """The figures of a set of rounds."""

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    tau: float
    tau_interval: Interval | None
    """95 % bootstrap interval over prompts; None for one prompt."""
    cut: float
    """Tokens per round removed by stop tokens and limits."""
    survival: tuple[float, ...]
    conditional: tuple[float, ...]

    @property
    def accepted_share(self) -> float:
        """Accepted per drafted (verified) token."""
        return self.accepted / self.drafted if self.drafted else 0.0


def survival(accepted: Sequence[int], rounds: int) -> tuple[float, ...]:
    """s_1, s_2, … up to the deepest accepted token."""
    depth = np.asarray(accepted, dtype=int)
    deepest = int(depth.max(initial=0))
    return tuple(float((depth >= k).sum()) / rounds for k in range(1, deepest + 1))


def conditional(survivals: Sequence[float]) -> tuple[float, ...]:
    """a_k = s_k / s_{k-1}; their running product is the survival again."""
    before = (1.0, *survivals)[: len(survivals)]
    return tuple(s / b if b else 0.0 for s, b in zip(survivals, before, strict=True))


def acceptance(
    prompts: Sequence[Sequence[Round]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Acceptance:
    """Figures of the rounds of each prompt. Raises ValueError where no round was made."""
    rounds = [r for prompt in prompts for r in prompt]
    if not rounds:
        raise ValueError("no round was decoded: ask for at least 2 new tokens per prompt")
    s = survival([r.accepted for r in rounds], len(rounds))
    emitted, accepted = sum(r.emitted for r in rounds), sum(r.accepted for r in rounds)
    by_prompt = np.array([sum(r.emitted for r in p) for p in prompts if p], dtype=float)
    made = np.array([len(p) for p in prompts if p], dtype=float)
    return Acceptance(
        rounds=len(rounds),
        drafted=sum(r.drafted for r in rounds),
        accepted=accepted,
        emitted=emitted,
        tau=emitted / len(rounds),
        tau_interval=bootstrap(by_prompt, made, resamples=resamples, seed=seed)[0],
        cut=(accepted + len(rounds) - emitted) / len(rounds),
        survival=s,
        conditional=conditional(s),
    )


def bootstrap(
    top: Numbers,
    bottom: Numbers,
    base_top: Numbers | None = None,
    base_bottom: Numbers | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Interval | None]:
    """95 % intervals of ratios of sums over prompts, which are resampled; one for each column.

    All (P,) or (P, F): of sum(top) / sum(bottom), or, where the base is given, of that over
    sum(base_top) / sum(base_bottom) of the same resampled prompts. Resamples in which a ratio has
    nothing below its line are left out of its interval. None where fewer than two prompts have
    something there: every resample is then the same, which says nothing of other prompts.
    """
    prompts = len(top)
    picks = _picks(prompts, resamples, seed)

    def ratio(above: Numbers, below: Numbers) -> Numbers:
        sums = [picks @ part.reshape(prompts, -1) for part in (above, below)]  # (R, F) each
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Numbers = sums[0] / sums[1]
        return found

    below = [bottom] if base_bottom is None else [bottom, base_bottom]
    known = np.any([part.reshape(prompts, -1) > 0 for part in below], axis=0).sum(axis=0)
    ratios = ratio(top, bottom)  # (R, F)
    if base_top is not None and base_bottom is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = ratios / ratio(base_top, base_bottom)
    intervals: list[Interval | None] = []
    for column, several in zip(ratios.T, np.broadcast_to(known > 1, ratios.shape[1]), strict=True):
        drawn = column[np.isfinite(column)]
        if not several or not len(drawn):
            intervals.append(None)
            continue
        low, high = np.quantile(drawn, [0.025, 0.975])
        intervals.append((float(low), float(high)))
    return intervals


@lru_cache(maxsize=8)
def _picks(prompts: int, resamples: int, seed: int) -> Numbers:
    """(R, P) how often each prompt is in each resample."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return drawn.astype(float)


def walk_rounds(
    matches: np.ndarray[tuple[int, int], np.dtype[np.bool_]], start: int, tokens: int
) -> list[int]:
    """Simulate the chain rounds of one text: accepted depths, round by round.

    matches (S, K): whether the draft begun in round slot s agrees with the text at depth k; `start`
    is the first round's slot and `tokens` how many tokens of text the rounds emit in all. A round
    that accepts a tokens emits a + 1 and the next begins a + 1 slots on; the last is cut at the
    text's end.
    """
    accepted: list[int] = []
    slot, end = start, start + tokens
    while slot < end:
        run = matches[slot]
        depth = int(run.argmin()) if not run.all() else len(run)
        accepted.append(min(depth, end - slot - 1))
        slot += depth + 1
    return accepted
