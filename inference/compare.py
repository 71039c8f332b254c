"""One evaluation as a whole: load target and drafters, read prompts, measure, make the files.

What the command and the demo share above `evaluate`, which measures drafters that exist already.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafthead.data.conversations import Prompt, Skips, read_prompts
from drafthead.data.embedded import data_path
from drafthead.data.files import write_atomically
from drafthead.inference.bench import Bench, same_draw, versions
from drafthead.inference.comparison import Comparison, models
from drafthead.inference.evaluate import PLAIN, Answer, Measured
from drafthead.inference.language import with_languages
from drafthead.inference.lineup import check_rule, fitted, line_up, opened, template_of
from drafthead.inference.log import (
    ANSWERS,
    RESULT,
    ROUNDS,
    Cell,
    answers_table,
    check_folder,
    journal,
    rounds_table,
    write_parquet,
)
from drafthead.inference.other_target import check_other
from drafthead.inference.tree import parse_shape

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

__all__ = [
    "Comparison",
    "check_rule",
    "compare",
    "fitted",
    "line_up",
    "models",
    "opened",
    "prompts_of",
    "records_of",
    "spread",
    "template_of",
    "versions",
]

Tables = tuple["pd.DataFrame", "pd.DataFrame"]
"""Of rounds and of answers."""


def compare(
    asked: Comparison,
    *,
    out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stage: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure everything asked for; what evaluation.json holds.

    With a folder, a run that was stopped goes on from its journal there, and tables, result and
    page are written beside it. Raises ValueError where no prompt could be answered.
    """
    shapes = list(dict.fromkeys(parse_shape(tree) for tree in asked.trees))
    check_rule(asked.settings.rule, shapes, lossy=asked.settings.lossy)
    if out is not None:
        check_folder(out)
        _check_beside(out)
    if asked.against is not None:
        check_other(asked.target, asked.against)
    prompts, skipped = _prompts(asked, stage)
    bench = Bench(asked, *models(asked, asked.dtype), shapes, prompts)
    result = bench.described() | {"skipped": skipped}
    sitting = {"date": _now(), "machine": result["machine"], "versions": result["versions"]}
    with journal(out, bench.header(), sitting) as kept:
        measured = bench.measured(kept, progress)
        result |= {"failed": _failed(measured)} | bench.beside(measured, kept, stage)
        answers = {cell: found.answers for cell, found in measured.items()}
        tables = rounds_table(answers), answers_table(answers, bench.texts)
        identical = bench.identical(kept, stage)  # it gives the target up
        drifts = bench.drifts(measured, kept, stage)
        result |= {"sittings": len(kept.sittings), "drift": drifts}
    result["cells"] = _cells(asked, answers, tables, identical)
    return _written(out, result, tables)


def _cells(
    asked: Comparison,
    answers: Mapping[Cell, Mapping[str, Sequence[Answer]]],
    tables: Tables,
    identical: Mapping[tuple[float, int], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Records by temperature and batch. ValueError where nothing at all was timed."""
    places = list(dict.fromkeys((cell.temperature, cell.batch) for cell in answers))
    cells = []
    for temperature, batch in places:
        repeats = [
            a for c, a in answers.items() if (c.temperature, c.batch) == (temperature, batch)
        ]
        rounds, given = (
            t[(t["temperature"] == temperature) & (t["batch"] == batch)] for t in tables
        )
        found = records_of(
            repeats,
            identical.get((temperature, batch), {}),
            same_draw=same_draw(asked, temperature),
            lossy=asked.settings.lossy,
            tables=(rounds, given),
        )
        cells.append({"temperature": temperature, "batch": batch, "records": found})
    if not any(cell["records"] for cell in cells):
        raise ValueError("nothing to time: every answer ended with its first token")
    return cells


def records_of(
    repeats: Sequence[Mapping[str, Sequence[Answer]]],
    same: Mapping[str, Mapping[str, Any]],
    *,
    same_draw: bool = True,
    lossy: bool = False,
    tables: Tables | None = None,
) -> dict[str, Any]:
    """Records by drafter name, plain first, of one temperature and batch; none without a round.

    repeats: the answers of each; same: what `identity` found. Without `same_draw` no text is held
    against plain's. `lossy` marks all but plain: their texts are not the target's own. `tables`
    of these answers, where they are made already.
    """
    from drafthead.inference.records import agreement, records, repeated

    if tables is None:
        cells = {Cell(n, 0.0, 1): answers for n, answers in enumerate(repeats, start=1)}
        tables = rounds_table(cells), answers_table(cells, lambda given: "")
    table = records(*tables)
    plain = repeats[0][PLAIN]
    for name, record in table.items():
        record["repeated"] = repeated([answers[name] for answers in repeats])
        if name != PLAIN:
            record["lossy"] = lossy
            record["identical"] = same.get(name)
            record["agreement"] = agreement(repeats[0][name], plain) if same_draw else None
    return table


def _failed(measured: Mapping[Cell, Measured]) -> list[dict[str, Any]]:
    """What was not answered and why, once for all repeats."""
    rows = [
        {
            "prompt": failure.prompt,
            "turn": failure.turn,
            "temperature": cell.temperature,
            "batch": cell.batch,
            "drafter": failure.drafter,
            "reason": failure.reason,
        }
        for cell, found in measured.items()
        for failure in found.failed
    ]
    return [row for index, row in enumerate(rows) if row not in rows[:index]]


def _written(out: Path | None, result: dict[str, Any], tables: Tables) -> dict[str, Any]:
    """The result as JSON has it; with a folder, its files are written first."""
    from drafthead.inference.records import finite

    result = json.loads(json.dumps(finite(result), default=str))
    if out is None:
        return result
    from drafthead.inference.report import write_evaluation

    for name, table in zip((ROUNDS, ANSWERS), tables, strict=True):
        write_parquet(out / name, table)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    # A file's name may hold what is no text; as an escape JSON has it.
    write_atomically(out / RESULT, text.encode("utf-8", "backslashreplace"))
    write_evaluation(out, result)
    return result


def _check_beside(out: Path) -> None:
    """Read what the page will show, too: a damaged file would fail it when all is done."""
    from drafthead.inference.report import beside

    beside(out)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# Prompts


def _prompts(
    asked: Comparison, stage: Callable[[str], None]
) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts to answer, with languages and names of their own, and rows that were none."""
    skipped: Counter[str] = Counter()

    def counted(name: str, skips: Skips) -> None:
        skipped.update(skips.counts)
        stage(f"{name}: {skips.summary()}")

    found = _read(asked.prompts, counted)
    prompts = with_languages(_distinct(spread(found, asked.limit or len(found))))
    if len(prompts) < max(asked.batches):
        raise ValueError(
            f"batch {max(asked.batches)}: there are {len(prompts)} prompts, which leave slots "
            "empty; give more prompts, or a smaller batch"
        )
    return prompts, dict(skipped)


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, an id that is there already with a number: figures are by prompt."""
    taken = {prompt.id for prompt in prompts}
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        name = prompt.id
        seen[name] += 1
        if seen[name] > 1:
            others = (f"{prompt.id}#{number}" for number in itertools.count(seen[name]))
            name = next(other for other in others if other not in taken)
            taken.add(name)
        found.append(prompt if name == prompt.id else replace(prompt, id=name))
    return found


def prompts_of(names: Sequence[str], stage: Callable[[str], None]) -> list[Prompt]:
    """Prompts of all files, `samples/NAME` being an embedded one; skipped rows are told."""
    return _read(names, lambda name, skips: stage(f"{name}: {skips.summary()}"))


def _read(names: Sequence[str], skipping: Callable[[str, Skips], None]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for name in names:
        found, skips = read_prompts(data_path(name))
        prompts += found
        if skips.total:
            skipping(name, skips)
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, taken from the categories in turn, in the order given."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    ranks = max(map(len, by_category.values()))
    turns = [c[i] for i in range(ranks) for c in by_category.values() if i < len(c)]
    return turns[:count]
