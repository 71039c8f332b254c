"""What an evaluation says of one head, in tables. All figures are the evaluation's, rounded once.

A figure's interval has a column of its own, so that whoever reads a card by program finds numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from drafthead.heads.card_measured import Ends, Evaluation, Group, Place, Record, clean

PLAIN, LOOKUP, MERGED = "plain", "lookup", "merged"
UNKNOWN = "–"
"""Where there is nothing to show."""
NINETY_FIVE = "95 %"


class Table(NamedTuple):
    """Header and rows; the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measured:
    """What an evaluation says of one head."""

    evaluation: Evaluation
    name: str
    """What it calls the head."""

    @property
    def names(self) -> set[str]:
        """Its records' names: its own, with each shape behind it where several were drafted."""
        return {self.name, *(f"{self.name} {tree}" for tree in self.evaluation.trees)}

    @property
    def merged(self) -> set[str]:
        """What it is called together with lookup."""
        first = next(iter(self.evaluation.heads)) == self.name
        return {f"{MERGED} {self.name}", *([MERGED] if first else [])}

    def shown(self, place: Place) -> dict[str, Record]:
        """The records of a place that concern this head, plain decoding's first."""
        wanted = {PLAIN, LOOKUP} | self.names | self.merged
        return {name: record for name, record in place.records.items() if name in wanted}

    def own(self, place: Place) -> dict[str, Record]:
        """The head's own records, one for each shape that it drafted."""
        return {n: r for n, r in place.records.items() if n in self.names and r.tau is not None}

    def best(self, place: Place) -> tuple[str, Record] | None:
        """The head's fastest record there; None where it drafted nothing."""
        found = self.own(place)
        return max(found.items(), key=lambda item: item[1].speedup) if found else None

    def places(self) -> Iterator[tuple[Place, str, Record]]:
        """One place for each temperature, of the smallest batch, with the head's fastest record."""
        smallest: dict[float, Place] = {}
        for place in self.evaluation.cells:
            if self.own(place):
                known = smallest.setdefault(place.temperature, place)
                if place.batch < known.batch:
                    smallest[place.temperature] = place
        for place in smallest.values():
            best = self.best(place)
            assert best is not None
            yield place, *best

    def called(self, name: str) -> str:
        """A drafter as readers of a card know it: this one is `head`, with its shape if several."""
        if name in self.merged:
            return "head and lookup merged"
        if name in self.names:
            return f"head{name.removeprefix(self.name)}"
        return "prompt lookup alone" if name == LOOKUP else clean(name)

    @property
    def languages(self) -> list[str]:
        """ISO 639-1 codes of what it was measured on: those of at least a tenth of the prompts."""
        record = next((record for _, _, record in self.places()), None)
        found = {} if record is None else {n: g.prompts for n, g in record.by_language.items() if g}
        least = max(1, sum(found.values()) / 10)
        return [n for n, count in found.items() if count >= least and re.fullmatch("[a-z]{2}", n)]


def speeds(measured: Measured) -> Table:
    """Every temperature and batch, a row for each drafter."""
    header = ["temperature", "batch", "drafter", "tau", NINETY_FIVE, "speed-up", NINETY_FIVE]
    header += ["by CPU time", "tokens/s"]
    rows = []
    for place in measured.evaluation.cells:
        for name, r in measured.shown(place).items():
            row = [f"{place.temperature:g}", str(place.batch), measured.called(name)]
            drafted = r.tau is not None
            row += [number(r.tau) if drafted else "1.00", span(r.tau_interval)]
            row += [number(r.speedup), span(r.speedup_interval), number(r.cpu_speedup)]
            rows.append([*row, number(r.tokens_per_s, 1)])
    return Table(header, rows)


def depths(record: Record) -> Table:
    """Survival and conditional acceptance by depth."""
    header = ["depth", "survival", NINETY_FIVE, "conditional", NINETY_FIVE]
    columns = (
        [number(share, 3) for share in record.survival],
        [span(ends) for ends in record.survival_interval or ()],
        [number(share, 3) for share in record.conditional],
        [span(ends) for ends in record.conditional_interval or ()],
    )
    rows = zip_longest(range(1, len(record.survival) + 1), *columns, fillvalue=UNKNOWN)
    return Table(header, [list(map(str, row)) for row in rows])


def groups(found: Mapping[str, Group | None], by: str) -> Table:
    """Tau and speed-up of each category or language."""
    header = [by, "prompts", "tau", NINETY_FIVE, "speed-up", NINETY_FIVE]
    rows = []
    for name, group in found.items():
        if group is None:
            rows.append([clean(name), "0", *[UNKNOWN] * 4])
            continue
        alone = group.prompts < 2  # an interval over prompts is none
        tau, speedup = (None if alone else e for e in (group.tau_interval, group.speedup_interval))
        row = [clean(name), str(group.prompts), number(group.tau), span(tau)]
        rows.append([*row, number(group.speedup), span(speedup)])
    return Table(header, rows)


def details(measured: Measured) -> list[tuple[str, Table]]:
    """Title and table of everything behind the speeds: depths, categories, languages."""
    found = []
    for place, name, record in measured.places():
        where = str(place)
        if len(measured.own(place)) > 1:
            where += f", {measured.called(name)}"
        found.append((f"By category ({where})", groups(record.by_category, "category")))
        if len(record.by_language) > 1:
            found.append((f"By language ({where})", groups(record.by_language, "language")))
        found.append((f"By depth ({where})", depths(record)))
    return [(title, table) for title, table in found if table.rows]


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def span(ends: Ends) -> str:
    if ends is None or None in ends:
        return UNKNOWN
    return f"{number(ends[0])}–{number(ends[1])}"


def large(count: float) -> str:
    """A count in thousands, millions or billions, as models are sized."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def counted(count: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
