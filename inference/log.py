"""What an evaluation leaves behind: a journal that a killed run goes on from, and tables of rounds.

The journal holds one line of header, all that decides the result, and then one line for each value
that was worked out: a key and the value, flushed to the disk before the work goes on. The tables
are made of it at the end, and every figure of the tables, by pandas, which is imported then.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafthead.data.files import held, sound_lines, write_atomically
from drafthead.inference.answering import Answer, Spent
from drafthead.inference.decoder import PARTS
from drafthead.inference.metrics import Round

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

log = logging.getLogger(__name__)

JOURNAL, ROUNDS, ANSWERS = "journal.jsonl", "rounds.parquet", "answers.parquet"
RESULT = "evaluation.json"
VERSION = 2
"""Raise it whenever the same header would give other values, or lines another form."""

Keep = Callable[[str, Callable[[], Any]], Any]
"""Gives the value of a key: the one that is kept, else one that is made now, and kept."""


def anew(key: str, make: Callable[[], Any]) -> Any:
    """The `Keep` that keeps nothing."""
    return make()


@dataclass
class Journal:
    """Values by key, in memory and, where there is a path, on the disk."""

    path: Path | None
    sitting: Mapping[str, Any]
    """What is said of each sitting: when and where it was."""
    sittings: list[Mapping[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    _begun: bool = False

    def keep(self, key: str, make: Callable[[], Any]) -> Any:
        """See `Keep`. A value is JSON, and the same whether it was made now or read."""
        if key not in self.values:
            value = json.loads(json.dumps(make()))
            if not self._begun:
                self._begun = True
                self.sittings.append(self.sitting)
                self._append({"sitting": self.sitting})
            self._append({"key": key, "value": value})
            self.values[key] = value
        return self.values[key]

    def below(self, prefix: str) -> Keep:
        """Keeps values whose keys begin with this."""
        return lambda key, make: self.keep(f"{prefix}/{key}", make)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def journal(
    folder: Path | None, header: Mapping[str, Any], sitting: Mapping[str, Any]
) -> Iterator[Journal]:
    """The journal of a folder, kept to this process inside the block; in memory without a folder.

    A torn last line is dropped. Raises ValueError where it was begun with another header, is
    damaged, or is written by another process.
    """
    if folder is None:
        yield Journal(None, sitting)
        return
    check_folder(folder)
    path = folder / JOURNAL
    path.touch()
    with held(path):
        yield _opened(path, json.loads(json.dumps({"version": VERSION, **header})), sitting)


def check_folder(folder: Path) -> None:
    """Make the folder of a result before the work, which a bad path would waste."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)


def _opened(path: Path, header: Mapping[str, Any], sitting: Mapping[str, Any]) -> Journal:
    found = Journal(path, sitting)
    lines, sound = sound_lines(path)
    if not lines:
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return found
    if not isinstance(lines[0], dict) or "version" not in lines[0]:
        raise ValueError(f"{path}: is no journal of an evaluation; name another --out")
    if lines[0] != header:
        raise ValueError(
            f"{path}: begun with another {_difference(lines[0], header)}; ask for the same, "
            "remove it, or name another --out"
        )
    os.truncate(path, sound)
    for number, line in enumerate(lines[1:], start=2):
        try:
            if "sitting" in line:
                found.sittings.append(line["sitting"])
            else:
                found.values[line["key"]] = line["value"]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: damaged (no value of a key); remove it") from error
    if found.values:
        log.info("%s: continuing after %d values", path, len(found.values))
    return found


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first key of the header whose value is another one."""
    if theirs["version"] != ours["version"]:
        return "version of drafthead"
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    return names[0].replace("_", " ")


# Answers as lines


def packed(given: Answer) -> dict[str, Any]:
    """An answer as JSON, without its prompt: a column for each figure of its rounds."""
    rounds, spent = given.rounds, given.spent
    return {
        "new": given.new_ids,
        "first": round(given.first_token_seconds, 9),
        "gaps": given.gaps,
        "drafted": [r.drafted for r in rounds],
        "depth": [r.depth for r in rounds],
        "accepted": [r.accepted for r in rounds],
        "emitted": [r.emitted for r in rounds],
        "source": [r.source for r in rounds],
        "seconds": [round(s.seconds, 9) for s in spent],
        "cpu": [round(s.cpu_seconds, 9) for s in spent],
        "parts": [[round(part, 9) for part in s.parts] for s in spent],
    }


def unpacked(
    line: Mapping[str, Any],
    ids: Sequence[int],
    *,
    prompt: str,
    category: str,
    language: str,
    turn: int,
) -> Answer:
    """The answer again; `ids` are those of its prompt."""
    columns = (line[name] for name in ("drafted", "accepted", "emitted", "source", "depth"))
    times = zip(line["seconds"], line["cpu"], map(tuple, line["parts"]), strict=True)
    return Answer(
        prompt=prompt,
        category=category,
        ids=[*ids, *line["new"]],
        prompt_length=len(ids),
        rounds=[Round(*row) for row in zip(*columns, strict=True)],
        spent=[Spent(*row) for row in times],
        first_token_seconds=line["first"],
        gaps=line["gaps"],
        language=language,
        turn=turn,
    )


# Tables


@dataclass(frozen=True, order=True)
class Cell:
    """What is measured at once: one run of all prompts through every drafter."""

    repeat: int
    """From 1."""
    temperature: float
    batch: int


def rounds_table(measured: Mapping[Cell, Mapping[str, Sequence[Answer]]]) -> pd.DataFrame:
    """One row for each round; see `drafthead evaluate` in the README for its columns."""
    rows: list[dict[str, Any]] = []
    for given, place in _placed(measured):
        context = given.prompt_length + 1  # the first token is the prefill's
        pairs = zip(given.rounds, given.spent, strict=True)
        for number, (made, spent) in enumerate(pairs, start=1):
            rows.append(
                {
                    **place,
                    "round": number,
                    "context": context,
                    "drafted": made.drafted,
                    "depth": made.depth,
                    "accepted": made.accepted,
                    "emitted": made.emitted,
                    "source": made.source,
                    "seconds": spent.seconds,
                    "cpu_seconds": spent.cpu_seconds,
                    **{f"{part}_seconds": s for part, s in zip(PARTS, spent.parts, strict=True)},
                }
            )
            context += made.emitted
    return _table(rows, [*PLACE, "round", *_OF_ROUNDS])


def answers_table(
    measured: Mapping[Cell, Mapping[str, Sequence[Answer]]], text_of: Callable[[Answer], str]
) -> pd.DataFrame:
    """One row for each answered turn."""
    rows = [
        {
            **place,
            "prompt_tokens": given.prompt_length,
            "new_tokens": len(given.new_ids),
            "first_token_seconds": given.first_token_seconds,
            "text": text_of(given),
        }
        for given, place in _placed(measured)
    ]
    return _table(rows, [*PLACE, *_OF_ANSWERS])


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=columns)


PLACE = ("repeat", "temperature", "batch", "drafter", "prompt", "category", "language", "turn")
_OF_ROUNDS = (
    *("context", "drafted", "depth", "accepted", "emitted", "source", "seconds", "cpu_seconds"),
    *(f"{part}_seconds" for part in PARTS),
)
_OF_ANSWERS = ("prompt_tokens", "new_tokens", "first_token_seconds", "text")


def _placed(
    measured: Mapping[Cell, Mapping[str, Sequence[Answer]]],
) -> Iterator[tuple[Answer, dict[str, Any]]]:
    """Every answer with the columns that say whose it is."""
    for cell, sides in measured.items():
        for drafter, answers in sides.items():
            for given in answers:
                whose = (given.prompt, given.category, given.language, given.turn)
                place = (cell.repeat, cell.temperature, cell.batch, drafter, *whose)
                yield given, dict(zip(PLACE, place, strict=True))


def write_parquet(path: Path, table: pd.DataFrame) -> None:
    """Write a table, whole or not at all."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_atomically(path, buffer.getvalue())
