"""The page of an evaluation: one file that needs no network, no script and no other file.

It reads the result, and beside it in the folder the certificate; also a tuning, where the result
tells of none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from drafthead.data.files import write_atomically
from drafthead.inference import tables
from drafthead.inference.plots import drawings, png, smallest_batch, svg
from drafthead.inference.summary import certified, large, sentences, verdict

log = logging.getLogger(__name__)

FIGURES = (
    "speed", "survival", "round", "category", "language", "context", "drift", "losses"
)  # fmt: skip
DEEPEST = 6
"""Of the heat map's colours; what was accepted deeper has the last one."""


def write_evaluation(
    folder: Path, result: Mapping[str, Any], losses: Sequence[tuple[int, float]] = ()
) -> Path:
    """Write `report.html` and `figures/*.png` into `folder` and give the page's path.

    `losses` are (step, loss) pairs of the head's training. Raises ValueError where a
    `certificate.json` or `tuning.json` in the folder is not one.
    """
    result = {**result, "cells": [c for c in result["cells"] if c["records"]]}
    certificate, tuning = beside(folder)
    if certificate and not certified(result, certificate):
        log.warning(
            "%s: a certificate of another head or target, not shown", folder / "certificate.json"
        )
        certificate = None
    drawn = drawings(result, losses)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name in FIGURES:  # one of an earlier run would pass for this run's
        (folder / "figures" / f"{name}.png").unlink(missing_ok=True)
    for drawing in drawn:
        write_atomically(folder / "figures" / f"{drawing.name}.png", png(drawing))
    figures = [(d.name, d.title, d.caption, Markup(svg(d))) for d in drawn]
    text = page(result, figures, certificate, tuning)
    write_atomically(folder / "report.html", text.encode("utf-8", "replace"))
    return folder / "report.html"


def page(
    result: Mapping[str, Any],
    figures: Sequence[tuple[str, str, str, Markup]],
    certificate: Mapping[str, Any] | None,
    tuning: Mapping[str, Any] | None,
) -> str:
    """The page as text; `figures` are name, title, caption and SVG of each."""
    words = verdict(result, certificate)
    narrow, samples = smallest_batch(result["cells"]), _samples(result.get("samples") or [])
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["short"] = tables.short
    template = (files("drafthead.inference") / "page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        result=result,
        verdict=words,
        first=sentences(result, words),
        cells=[(_place(c), tables.comparison(c["records"])) for c in result["cells"]],
        figures=figures,
        certificate=certificate,
        same=tables.same_text(result["cells"], result["target"]["dtype"]),
        simulated=tables.simulated(result["simulated"]) if result["simulated"] else None,
        behind=_behind(narrow),
        samples=samples,
        shades=sorted({t["shade"] for s in samples for x in s["texts"] for t in x["tokens"]} - {0}),
        deepest=DEEPEST,
        drifts=[(n, d, tables.drifted(d)) for n, d in tables.drifts(result).items()],
        tunings=_tunings(result, tuning),
        heads=_heads(result["heads"]),
        setup=_setup(result),
        contracts=json.dumps(
            {name: head.get("contract") for name, head in result["heads"].items()},
            indent=2,
            ensure_ascii=False,
            default=str,
        ),
        sample=result.get("sample"),
    )


def facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as rows of a dotted name and a text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += facts(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            rows.append((f"{prefix}{key}", f"{value:.4g}"))
        elif isinstance(value, list | tuple):
            rows.append((f"{prefix}{key}", ", ".join(map(str, value)) or "none"))
        else:
            rows.append((f"{prefix}{key}", "none" if value in (None, {}) else str(value)))
    return rows


def beside(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The certificate and the tuning in a folder; ValueError where a file of that name is none."""
    certificate = _beside(folder / "certificate.json", "checks")
    return certificate, _beside(folder / "tuning.json", "shapes")


def _beside(path: Path, key: str) -> dict[str, Any] | None:
    """A JSON object that has this key; None where the file is not there."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); make it again, or move it away") from None
    if not isinstance(found, dict) or key not in found:
        raise ValueError(f"{path}: has no {key!r}; make it again, or move it away")
    return found


def _place(cell: Mapping[str, Any]) -> str:
    return f"Temperature {cell['temperature']:g}, batch {cell['batch']}"


def _behind(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, tables.Table]]:
    """Title and table of the figures behind the drawings."""
    found = []
    for cell in cells:
        records, place = cell["records"], f"temperature {cell['temperature']:g}"
        found.append(
            (f"Survival and conditional acceptance by depth, {place}", tables.depths(records))
        )
        for by in ("category", "language", "context"):
            table = tables.groups(records, f"by_{by}")
            if table.rows:
                found.append((f"By {by}, {place}", table))
        drafted = tables.sources(records)
        if drafted is not None:
            found.append((f"By which drafter made the draft, {place}", drafted))
    return [(title, table) for title, table in found if table.rows]


def _samples(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt's texts, a drafter each, with the shade of every token."""
    prompts: dict[str, dict[str, Any]] = {}
    for sample in samples:
        entry = {"prompt": sample["prompt"], "category": sample["category"], "texts": []}
        tokens = [
            {
                "text": token["text"],
                "shade": min(token["depth"], DEEPEST),
                "fell": token["fell"],
                "said": _said(token["depth"], token["fell"]),
            }
            for token in sample["tokens"]
        ]
        drafted = sum(token["depth"] > 0 for token in sample["tokens"])
        text = {"drafter": sample["drafter"], "tokens": tokens, "drafted": drafted}
        prompts.setdefault(sample["prompt"], entry)["texts"].append(text)
    return list(prompts.values())


def _said(depth: int, fell: bool) -> str:
    own = "the target’s own, where a draft fell" if fell else "the target’s own"
    return f"accepted at depth {depth}" if depth else own


def _tunings(
    result: Mapping[str, Any], other: Mapping[str, Any] | None
) -> list[tuple[str, str, tables.Table]]:
    """Name, remark and table of each tuning: those of the heads, else the other one."""
    found = dict(result.get("tuning") or {}) or ({"tuning.json": other} if other else {})
    return [(name, _measured(t), tables.tuned(t)) for name, t in found.items()]


def _measured(tuning: Mapping[str, Any]) -> str:
    """When and with what a tuning was made, as far as it tells."""
    parts = [
        f"in {tuning['dtype']}" if tuning.get("dtype") else "",
        f"on {tuning['prompts']} prompts" if tuning.get("prompts") else "",
        f"at temperature {tuning['temperature']:g}" if "temperature" in tuning else "",
        f"({tuning['date'][:10]})" if tuning.get("date") else "",
    ]
    told = " ".join(filter(None, parts))
    return f"Measured {told}: {tuning['file']}" if tuning.get("file") else ""


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> tables.Table:
    rows = [
        [name, h["type"], large(h["parameters"]), str(h["folder"])] for name, h in heads.items()
    ]
    return tables.Table(["drafter", "type", "parameters", "folder"], rows)


def _setup(result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Title and rows of everything that decides the figures."""
    run = ["prompts", "turns", "files", "trees", "new_tokens", "repeats", "sittings"]
    run += ["skipped", "training", "seconds"]
    shown = {key: result[key] for key in run if result.get(key) is not None}
    return [
        ("Target", facts(result["target"])),
        ("Run", facts(shown)),
        ("Settings", facts(result["settings"])),
        ("Machine", facts(result["machine"])),
        ("Versions", facts(result["versions"])),
    ]
