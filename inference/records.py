"""The figures of an evaluation, made of its tables of rounds and answers alone.

A table holds one temperature and batch, all repeats; its columns are those of `log`. Nothing here
runs a model or reads a file, so whoever has the tables can make every figure again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from drafthead.inference.answering import Answer
from drafthead.inference.decoder import PARTS
from drafthead.inference.metrics import Numbers, bootstrap, conditional, survival
from drafthead.inference.rounding import first_difference

Record = dict[str, Any]

PLAIN = "plain"
BUCKET = 256
"""Tokens of the first bucket of context lengths; each later one is as long as all before it."""

_PAIR = ["repeat", "prompt", "turn"]
_SUMS = ["emitted", "accepted", "drafted", "seconds", "cpu_seconds"]
_CLOCKS = (("speedup", "seconds"), ("cpu_speedup", "cpu_seconds"))


class Side(NamedTuple):
    """One drafter's rows."""

    rounds: pd.DataFrame
    answers: pd.DataFrame


def records(rounds: pd.DataFrame, answers: pd.DataFrame) -> dict[str, Record]:
    """Figures by drafter, plain decoding's first; none for a drafter without rounds beside its."""
    names = list(dict.fromkeys(answers["drafter"]))
    sides = {n: Side(*(t[t["drafter"] == n] for t in (rounds, answers))) for n in names}
    plain = sides.pop(PLAIN, None)
    if plain is None or plain.rounds.empty:
        return {}
    table = {PLAIN: plain_record(plain)}
    for name, side in sides.items():
        if not any(rounds.empty for rounds in paired(side, plain)):
            table[name] = record(name, side, plain)
    return table


def plain_record(plain: Side) -> Record:
    """The baseline's figures."""
    return {"name": PLAIN, **_speeds(plain), "new_tokens": int(plain.answers["new_tokens"].sum())}


def record(name: str, side: Side, plain: Side) -> Record:
    """One drafter's figures; speed-ups are on the turns that plain decoding answered, too."""
    rounds = side.rounds
    ours, theirs = paired(side, plain)
    sums = rounds[_SUMS].sum()
    accepted, drafted, emitted = (int(sums[c]) for c in ("accepted", "drafted", "emitted"))
    found = _acceptance(rounds)
    contexts = sorted({bucket(n) for n in rounds["context"]})
    groups = {
        "by_category": [(c, "category", c) for c in sorted(set(side.answers["category"]))],
        "by_language": [(n, "language", n) for n in sorted(set(side.answers["language"]))],
        "by_context": [("{}-{}".format(*ends), "context", ends) for ends in contexts],
    }
    return {
        "name": name,
        **_speeds(side),
        **(_speedups(ours, theirs) or {}),
        "speedup_spread": _spread(ours, theirs),
        "median_prompt_speedup": _median(ours, theirs),
        **found,
        "cut": (accepted + len(rounds) - emitted) / len(rounds),
        "accepted_per_drafted": accepted / drafted if drafted else 0.0,
        "accepted_per_verified": accepted / (drafted + len(rounds)),
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "emitted": emitted,
        "by_source": _by_source(rounds),
        **{
            by: {
                label: _group(*(_within(t, column, key) for t in (rounds, ours, theirs)))
                for label, column, key in parts
            }
            for by, parts in groups.items()
        },
    }


def paired(side: Side, plain: Side) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rounds of both sides on the turns that both have answered."""
    keys = [pd.MultiIndex.from_frame(s.answers[_PAIR]) for s in (side, plain)]
    shared = keys[0].intersection(keys[1])
    if len(shared) == len(keys[0]) == len(keys[1]):
        return side.rounds, plain.rounds
    ours, theirs = (
        s.rounds[pd.MultiIndex.from_frame(s.rounds[_PAIR]).isin(shared)] for s in (side, plain)
    )
    return ours, theirs


def bucket(context: int) -> tuple[int, int]:
    """First and last length of the bucket that holds a context length."""
    if context < BUCKET:
        return 0, BUCKET - 1
    first = 1 << (int(context).bit_length() - 1)
    return first, 2 * first - 1


def _within(rounds: pd.DataFrame, column: str, key: Any) -> pd.DataFrame:
    if column == "context":
        return rounds[rounds[column].between(*key)]
    return rounds[rounds[column] == key]


def _group(rounds: pd.DataFrame, ours: pd.DataFrame, theirs: pd.DataFrame) -> Record | None:
    """Figures of some of the rounds; None where none was made beside plain decoding's."""
    speeds = _speedups(ours, theirs)
    if rounds.empty or speeds is None:
        return None
    found = _acceptance(rounds)
    kept = {key: found[key] for key in ("tau", "tau_interval", "survival")}
    return {"prompts": int(rounds["prompt"].nunique()), "rounds": len(rounds), **kept, **speeds}


def _acceptance(rounds: pd.DataFrame) -> Record:
    """Tau, survival and conditional acceptance, each with its intervals."""
    made = len(rounds)
    kept = survival(rounds["accepted"], made)
    sums = _by_prompt(rounds)
    counts = sums["rounds"].to_numpy(float)[:, None]  # (P, 1)
    reached = _reached(rounds, sums.index, len(kept))
    above = np.concatenate([counts, reached], axis=1)[:, : len(kept)]
    return {
        "tau": int(rounds["emitted"].sum()) / made,
        "tau_interval": bootstrap(sums["emitted"].to_numpy(float), counts)[0],
        "survival": list(kept),
        "survival_interval": bootstrap(reached, counts) if kept else [],
        "conditional": list(conditional(kept)),
        "conditional_interval": bootstrap(reached, above) if kept else [],
    }


def _reached(rounds: pd.DataFrame, prompts: pd.Index, deepest: int) -> Numbers:
    """(P, K) rounds of each prompt whose first k drafted tokens were all accepted."""
    owners, accepted = prompts.get_indexer(rounds["prompt"]), rounds["accepted"].to_numpy()
    columns = [
        np.bincount(owners[accepted >= k], minlength=len(prompts)) for k in range(1, deepest + 1)
    ]
    return np.stack(columns, axis=1).astype(float) if columns else np.zeros((len(prompts), 0))


def _by_prompt(rounds: pd.DataFrame) -> pd.DataFrame:
    """Sums over the rounds of each prompt, its turns and repeats together."""
    found = rounds.groupby("prompt")
    return found[_SUMS].sum().assign(rounds=found.size())


def _speeds(side: Side) -> Record:
    """Tokens per second, milliseconds until the first token, and a mean round by part."""
    rounds, count = side.rounds, len(side.rounds)
    sums = rounds[_SUMS].sum()
    parts = {part: float(rounds[f"{part}_seconds"].sum()) for part in PARTS}
    parts["other"] = float(sums["seconds"]) - sum(parts.values())
    repeats = [rate(part) for _, part in rounds.groupby("repeat")]
    return {
        "tokens_per_s": rate(rounds),
        "cpu_tokens_per_s": rate(rounds, "cpu_seconds"),
        "tokens_per_s_spread": [min(repeats), max(repeats)] if len(repeats) > 1 else None,
        "round_ms": {part: 1000 * s / count for part, s in parts.items()},
        "first_token_ms": 1000 * float(side.answers["first_token_seconds"].mean()),
    }


def rate(rounds: pd.DataFrame, clock: str = "seconds") -> float:
    """Tokens per second: all tokens over all seconds; NaN where the clock saw none pass."""
    seconds = float(rounds[clock].sum())
    return float(rounds["emitted"].sum()) / seconds if seconds > 0 else math.nan


def _speedups(ours: pd.DataFrame, theirs: pd.DataFrame) -> Record | None:
    """By the wall clock and by CPU time; the interval resamples prompts, both sides together."""
    if ours.empty or theirs.empty:
        return None
    mine, base = _by_prompt(ours), _by_prompt(theirs)
    prompts = mine.index.union(base.index)
    mine, base = (sums.reindex(prompts, fill_value=0) for sums in (mine, base))
    found: Record = {}
    for key, clock in _CLOCKS:
        columns = [sums[c].to_numpy(float) for sums in (mine, base) for c in ("emitted", clock)]
        found[key] = rate(ours, clock) / rate(theirs, clock)
        found[f"{key}_interval"] = bootstrap(*columns)[0]
    return found


def _spread(ours: pd.DataFrame, theirs: pd.DataFrame) -> list[float] | None:
    """Lowest and highest speed-up of a repeat; None for one repeat."""
    repeats = sorted(set(ours["repeat"]) & set(theirs["repeat"]))
    speeds = [[rate(side[side["repeat"] == n]) for n in repeats] for side in (ours, theirs)]
    ratios = [a / b for a, b in zip(*speeds, strict=True)]
    return [min(ratios), max(ratios)] if len(ratios) > 1 else None


def _median(ours: pd.DataFrame, theirs: pd.DataFrame) -> float | None:
    """Of the speed-ups of the prompts."""
    speeds = [sums["emitted"] / sums["seconds"] for sums in map(_by_prompt, (ours, theirs))]
    ratios = speeds[0] / speeds[1]
    known = ratios[np.isfinite(ratios)]
    return float(known.median()) if len(known) else None


def _by_source(rounds: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Rounds and their tau by which drafter made the draft."""
    return {
        source or "none": {"rounds": len(part), "tau": float(part["emitted"].mean())}
        for source, part in rounds.groupby("source")
    }


# Texts


def agreement(answers: Sequence[Answer], plain: Sequence[Answer]) -> Record:
    """How many answers equal plain's, in the dtype served.

    `largest_gap` is the largest one between plain's two best logits where an answer first differs;
    None where none does or its gaps were not kept.
    """
    texts = {given.place: given for given in plain}
    pairs = [(given, texts[given.place]) for given in answers if given.place in texts]
    gaps: list[float] = []
    for ours, theirs in pairs:
        first = first_difference(ours.new_ids, theirs.new_ids)
        if first is not None and theirs.gaps is not None:
            gaps.append(theirs.gaps[first])
    equal = sum(ours.new_ids == theirs.new_ids for ours, theirs in pairs)
    return {"equal": equal, "of": len(pairs), "largest_gap": max(gaps, default=None)}


def repeated(repeats: Sequence[Sequence[Answer]]) -> dict[str, int] | None:
    """How many answers of later repeats have the ids of the first one's; None for one repeat."""
    if len(repeats) < 2:
        return None
    first = {given.place: given.new_ids for given in repeats[0]}
    later = [given for answers in repeats[1:] for given in answers if given.place in first]
    equal = sum(given.new_ids == first[given.place] for given in later)
    return {"equal": equal, "of": len(later)}


def finite(value: Any) -> Any:
    """The same with None for each number that JSON does not know."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
