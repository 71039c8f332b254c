"""Which pieces of work a comparison of heads consists of, and the file that keeps their results.

A piece is known by its name and a hash of all that decides its result, so a changed setting makes
it anew and nothing else does. Some pieces follow from results: a head's run from its tuning, the
seeds from all evaluations. It knows no torch and starts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from drafthead.data.embedded import preset_path
from drafthead.data.files import write_atomically

Kind = Literal["extract", "tune", "run", "evaluate"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One head, or one variant of it."""

    preset: str
    """A preset below `configs/heads`."""
    overrides: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    """Candidates beside the common ones."""


@dataclass(frozen=True)
class Budget:
    """How much of everything; the same for every head."""

    base: tuple[str, ...]
    """Overrides of every training."""
    data: str
    """Name of the file of conversations."""
    positions: int
    tuning: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    """The first is every head's; the others are the best heads'."""
    best: int
    """Heads that get all seeds."""
    evaluations: int
    """Held-out evaluations during a run."""
    evaluation: Mapping[str, Any]
    """Prompts, tokens and trees of one."""


@dataclass(frozen=True)
class Piece:
    """One job."""

    name: str
    kind: Kind
    entry: str
    """The head or variant that it belongs to; empty for what is everybody's."""
    settings: Mapping[str, Any] | None
    """All that decides the result, machine's paths excluded; None while that is not known."""
    positions: int = 0
    """Of the data, as a measure of the work."""
    run: Piece | None = None
    """Whose head is evaluated."""

    @property
    def key(self) -> str:
        """Name and hash."""
        text = json.dumps(self.settings, sort_keys=True)
        return f"{self.name}@{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def folder(self) -> str:
        return self.key.replace("/", "-")


class Results:
    """One record for each finished piece, in one file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path.exists():
            self.records = json.loads(path.read_text(encoding="utf-8"))

    def of(self, piece: Piece) -> Record | None:
        """What a piece came to, if it has been made with these very settings."""
        return None if piece.settings is None else self.records.get(piece.key)

    def add(self, piece: Piece, record: Record) -> None:
        """Write a piece down, for good; a later one of its name and settings takes its place."""
        facts = {"name": piece.name, "kind": piece.kind, "entry": piece.entry}
        self.records.pop(piece.key, None)  # so that the latest are the last
        self.records[piece.key] = {**facts, "settings": piece.settings, **record}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.records, indent=1) + "\n")


def pieces(
    heads: Mapping[str, Entry],
    ablations: Mapping[str, tuple[str, Entry]],
    budget: Budget,
    results: Results,
) -> list[Piece]:
    """All pieces in the order of work: heads, then seeds of the best, then ablations.

    Evaluations of the latter two come last: what their runs say by themselves is there early.
    ablations: the head whose learning rate they take, and the variant. Entries whose preset is not
    there are left out.
    """
    known = {name: entry for name, entry in heads.items() if has_preset(entry.preset)}
    found: list[Piece] = []
    for name, entry in known.items():
        tunes = _tunes(name, entry, budget)
        rate = _best_rate(tunes, budget, results)
        full = _trained(name, name, entry, budget, rate, budget.seeds[0], drawn=True)
        found += [*tunes, *full]
    best = _best(known, found, budget, results)
    more: list[Piece] = []
    for place in range(min(budget.best, len(known))):
        for seed in budget.seeds[1:]:
            if not best:  # for the forecast
                name = f"best {place + 1}/seed{seed}"
                more += _trained(name, "", Entry(""), budget, None, seed)
                continue
            name = best[place]
            rate = _best_rate(_tunes(name, known[name], budget), budget, results)
            more += _trained(f"{name}/seed{seed}", name, known[name], budget, rate, seed)
    for name, (base, entry) in ablations.items():
        if base in known and has_preset(entry.preset):
            rate = _best_rate(_tunes(base, known[base], budget), budget, results)
            more += _trained(name, name, entry, budget, rate, budget.seeds[0])
    return found + sorted(more, key=lambda piece: piece.kind == "evaluate")


def has_preset(name: str) -> bool:
    try:
        preset_path(f"heads/{name}.yaml")
    except ValueError:
        return False
    return True


def _tunes(name: str, entry: Entry, budget: Budget) -> list[Piece]:
    return [
        Piece(
            f"{name}/tune/{rate:g}",
            "tune",
            name,
            training(entry, budget, rate, budget.tuning),
            budget.tuning,
        )
        for rate in budget.rates
    ]


def _trained(
    name: str,
    owner: str,
    entry: Entry,
    budget: Budget,
    rate: float | None,
    seed: int,
    drawn: bool = False,
) -> list[Piece]:
    """A full run and its evaluation; both wait while the learning rate is not known.

    drawn: whether it is also evaluated at temperature 1.
    """
    settings = None
    if rate is not None:
        settings = training(entry, budget, rate, budget.positions, seed, budget.evaluations)
    run = Piece(f"{name}/run", "run", owner, settings, budget.positions)
    asked = None
    if settings is not None:
        trees = [*budget.evaluation["trees"], *entry.trees]
        asked = {**budget.evaluation, "trees": trees, "drawn": drawn, "run": run.key}
    return [run, Piece(f"{name}/evaluate", "evaluate", owner, asked, run=run)]


def training(
    entry: Entry,
    budget: Budget,
    rate: float,
    positions: int,
    seed: int = 0,
    evaluations: int = 1,
) -> dict[str, Any]:
    """A preset with everything laid over it, as a training reads it; paths are added by the job."""
    over = [f"data.train={budget.data}", f"data.positions={positions}", f"training.seed={seed}"]
    over.append(f"optimiser.lr={rate:g}")
    merged = deepcopy(_merged(entry.preset, (*budget.base, *entry.overrides, *over)))
    if evaluations > 1:
        steps = positions / merged["training"]["tokens_per_batch"]
        merged["training"]["eval_every"] = max(1, round(steps / evaluations))
    return merged


@cache  # a plan is made after every piece, and YAML is slow
def _merged(preset: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    found = OmegaConf.load(preset_path(f"heads/{preset}.yaml"))
    merged: Any = OmegaConf.to_container(
        OmegaConf.merge(found, OmegaConf.from_dotlist([*overrides]))
    )
    merged.pop("out", None)
    return dict(merged)


def _best_rate(tunes: Sequence[Piece], budget: Budget, results: Results) -> float | None:
    """The learning rate of the best held-out simulated tau; None while one is missing."""
    found = [results.of(piece) for piece in tunes]
    taus = [record["simulated_tau"] for record in found if record is not None]
    if len(taus) < len(tunes):
        return None
    return budget.rates[taus.index(max(taus))]


def _best(
    heads: Mapping[str, Entry], found: Sequence[Piece], budget: Budget, results: Results
) -> list[str]:
    """The heads with the highest chain tau at temperature 0, once all have been evaluated."""
    taus = {}
    for piece in found:
        record = results.of(piece)
        if piece.kind == "evaluate" and record is not None:
            taus[piece.entry] = record["greedy"]["chain"]["tau"]
    if len(taus) < len(heads):
        return []
    return sorted(taus, key=lambda name: -taus[name])[: budget.best]
