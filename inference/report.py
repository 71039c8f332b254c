"""A self-contained HTML page of one run: table, curves, settings; no network, no script."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
.scroll { overflow-x: auto } table { border-collapse: collapse } img { max-width: 100% }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ccc;
  white-space: nowrap }
th:first-child, td:first-child { text-align: left }
pre { overflow-x: auto; background: #f4f4f4; padding: 1rem }
</style></head><body>
<h1>{{ title }}</h1><p>{{ summary }}</p>
<div class="scroll"><table><tr>{% for h in header %}<th>{{ h }}</th>{% endfor %}</tr>
{% for row in table %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
<p>tau is tokens emitted per verifying forward of the target, its own token included, with a 95 %
bootstrap interval over prompts. Speed leaves out the prefill on every side; plain is the same loop
without a draft. Identical compares ids with plain decoding in fp32.</p> {% for figure in figures
%}<h2>{{ figure.title }}</h2> <img alt="{{ figure.title }}" src="data:image/svg+xml;base64,{{
figure.data }}">{% endfor %} <h2>Settings and versions</h2><pre>{{ details }}</pre> </body></html>
"""

HEADER = ("drafter", "tau", "95 %", "tokens/s", "speed-up", "CPU speed-up", "identical")


def table_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Cells of the comparison, as the terminal and the page show them; plain is the first row."""
    rows = []
    for name, r in records.items():
        if "tau" not in r:
            rows.append([name, "1.00", "", f"{r['tokens_per_s']:.1f}", "1.00", "1.00", ""])
            continue
        same = r["identical"]
        rows.append(
            [
                f"{name} (lossy)" if r.get("lossy") else name,
                f"{r['tau']:.2f}",
                "{:.2f}–{:.2f}".format(*r["tau_interval"]),
                f"{r['tokens_per_s']:.1f}",
                f"{r['speedup']:.2f}",
                f"{r['cpu_speedup']:.2f}",
                f"{same['equal']} of {same['of']}" if same else "not checked",
            ]
        )
    return rows


def profile_rows(records: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a mean round by part: milliseconds, and their share of the round."""
    parts = list(next(iter(records.values()))["round_ms"])
    rows = []
    for name, record in records.items():
        spent = record["round_ms"]
        whole = sum(spent.values())
        cells = [f"{spent[part]:.2f} ({100 * spent[part] / whole:.0f} %)" for part in parts]
        rows.append([name, f"{whole:.2f}", *cells])
    return ["ms of a round", "all", *parts], rows


def write_report(
    path: Path,
    *,
    title: str,
    summary: str,
    records: Mapping[str, Mapping[str, Any]],
    losses: Sequence[tuple[int, float]],
    details: Mapping[str, Any],
) -> None:
    """Write the page; `losses` are (step, loss) pairs of the training, empty if there was none."""
    drafted = {name: r for name, r in records.items() if "tau" in r}
    figures = [
        (
            "Survival by depth: share of rounds whose first k drafted tokens were accepted",
            _survival(drafted),
        ),
        ("Tokens per second", _speeds(records)),
    ]
    if losses:
        figures.insert(0, ("Training loss by step", _losses(losses)))
    page = (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=title,
            summary=summary,
            header=HEADER,
            table=table_rows(records),
            figures=[{"title": name, "data": data} for name, data in figures],
            details=json.dumps(details, indent=2, default=str),
        )
    )
    path.write_text(page, encoding="utf-8")


def _survival(records: Mapping[str, Mapping[str, Any]]) -> str:
    figure, axes = _axes("depth k", "survival")
    for name, r in records.items():
        depths = range(1, len(r["survival"]) + 1)
        axes.plot(depths, r["survival"], marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return _svg(figure)


def _speeds(records: Mapping[str, Mapping[str, Any]]) -> str:
    figure, axes = _axes("", "tokens/s")
    names = list(records)
    bars = axes.bar(names, [records[name]["tokens_per_s"] for name in names])
    axes.bar_label(bars, fmt="%.1f")
    return _svg(figure)


def _losses(losses: Sequence[tuple[int, float]]) -> str:
    figure, axes = _axes("optimiser step", "loss")
    axes.plot(*zip(*losses, strict=True), marker="o" if len(losses) < 30 else None)
    return _svg(figure)


def _axes(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # imported here: it costs a second that other verbs save

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()
