"""Figures of an evaluation, drawn without a window; it knows no page and no file.

Each is drawn once, in colours for paper, and comes out twice: as a PNG, and as an SVG in which the
colours have become the page's CSS variables, so that it follows the page into the dark. Its text
stays text, in the page's font. Drafters differ by marker as well as by colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from drafthead.inference.tables import drifts

Record = Mapping[str, Any]
Cell = Mapping[str, Any]
Look = dict[str, Any]
"""How matplotlib draws one drafter."""

INK, GRID, PAPER = "#1b1c1e", "#d7d8dc", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0579a", "#a87400", "#2f8fd0", "#8a6d3b")
"""Of drafters; told apart with any colour vision (after Okabe and Ito), and on grey paper."""
MARKERS = "osD^vPX"
PARTS = {
    "draft": "#e3a008",
    "verify": "#4a5f7a",
    "accept": "#7fb3a6",
    "commit": "#b08fc0",
    "other": "#a9abb0",
}
"""A round's parts, in the order in which they come."""
VARIABLES = {
    INK: "ink",
    GRID: "grid",
    PAPER: "paper",
    **{colour: f"series-{i}" for i, colour in enumerate(SERIES, start=1)},
    **{colour: f"part-{name}" for name, colour in PARTS.items()},
}
"""The page's name of each colour."""
WIDTH = 4.8
"""Inches: on a phone the text is then about as large as drawn."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names are text, dollars and all
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


class Drawing(NamedTuple):
    """A figure and what the page says about it."""

    name: str
    title: str
    caption: str
    figure: Figure


def drawings(result: Mapping[str, Any], losses: Sequence[tuple[int, float]] = ()) -> list[Drawing]:
    """Every figure that this result has something to show in."""
    narrow = smallest_batch(result["cells"])
    with mpl.rc_context(STYLE):
        found = [_speed(result), _survival(narrow), _rounds(result["cells"])]
        found += [_groups(narrow, by) for by in ("category", "language", "context")]
        found += [_drift(drifts(result)), _losses(losses)]
        drawn = [drawing for drawing in found if drawing is not None]
        for drawing in drawn:
            if result["lossy"] and drawing.name != "losses":  # it may go where no page warns
                drawing.figure.supxlabel("Lossy: not the target’s own text", fontsize=9)
    return drawn


def svg(drawing: Drawing) -> str:
    """An element to stand in a page; its colours are CSS variables, its ids its own."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context(STYLE | {"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.S)  # it would hold everywhere
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{drawing.name}-", text)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    return text


def png(drawing: Drawing) -> bytes:
    """For papers: 200 dots per inch, on white."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        drawing.figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()


def smallest_batch(cells: Sequence[Cell]) -> list[Cell]:
    """Of each temperature the cell of the smallest batch: acceptance does not depend on it."""
    least: dict[float, Cell] = {}
    for cell in cells:
        known = least.get(cell["temperature"])
        if known is None or cell["batch"] < known["batch"]:
            least[cell["temperature"]] = cell
    return list(least.values())


# Figures


def _speed(result: Mapping[str, Any]) -> Drawing | None:
    """Speed-up by batch, a panel for each temperature, with the target's costs below."""
    cells, costs = result["cells"], result.get("costs") or {}
    temperatures = list(dict.fromkeys(c["temperature"] for c in cells))
    looks = _looks(cells)
    if not looks:
        return None
    several = len({c["batch"] for c in cells}) > 1
    tall = 2.3 if several else 0.7 + 0.3 * len(looks)
    figure, panels = _panels([tall] * len(temperatures) + [2.1] * bool(costs))
    for axes, temperature in zip(panels, temperatures, strict=False):
        chosen = [c for c in cells if c["temperature"] == temperature]
        (_by_batch if several else _by_drafter)(axes, chosen, looks)
        _title(axes, temperature, len(temperatures))
    if several:
        _legend(figure, looks)
    if costs:
        _costs(panels[-1], costs)
    caption = "Tokens per second against plain decoding’s at the same temperature and batch, with"
    caption += " 95 % intervals over prompts. Below 1 drafting costs more than it gains."
    if costs:
        caption += " Below: how much longer a forward of the target takes when it verifies more"
        caption += " tokens a row; drafting pays while this stays flat."
    return Drawing("speed", "Speed-up over plain decoding", caption, figure)


def _by_batch(axes: Axes, cells: Sequence[Cell], looks: Mapping[str, Look]) -> None:
    batches = sorted({c["batch"] for c in cells})
    for i, (name, look) in enumerate(looks.items()):
        found = [(c["batch"], c["records"][name]) for c in cells if name in c["records"]]
        at = [batches.index(batch) + _shift(i, len(looks), 0.3) for batch, _ in found]
        values = [_known(r["speedup"]) for _, r in found]
        errors = _errors(values, [r.get("speedup_interval") for _, r in found])
        axes.errorbar(at, values, yerr=errors, elinewidth=1, **look)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(batches)), map(str, batches))
    axes.set_xlabel("batch")
    axes.set_ylabel("speed-up")
    axes.grid(axis="x", visible=False)


def _by_drafter(axes: Axes, cells: Sequence[Cell], looks: Mapping[str, Look]) -> None:
    records = {n: r for c in cells for n, r in c["records"].items() if n in looks}
    for at, (name, r) in enumerate(records.items()):
        value = _known(r["speedup"])
        errors = _errors([value], [r.get("speedup_interval")])
        axes.errorbar([value], [at], xerr=errors, elinewidth=1.2, **looks[name])
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(records)), [_short(name) for name in records])
    axes.set_ylim(len(records) - 0.4, -0.6)
    axes.set_xlabel("speed-up over plain decoding (dashed)")
    axes.grid(axis="y", visible=False)


def _costs(axes: Axes, costs: Mapping[str, Mapping[str, Any]]) -> None:
    for (batch, cost), marker in zip(costs.items(), cycle(MARKERS), strict=False):
        times = np.asarray(cost["seconds"]) / cost["seconds"][0]
        axes.plot(cost["tokens"], times, color=INK, marker=marker, label=f"batch {batch}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens verified a row")
    axes.set_ylabel("time, 1 token = 1")
    axes.legend(loc="upper left")


def _survival(cells: Sequence[Cell]) -> Drawing | None:
    """Survival by depth, a panel for each temperature."""
    looks = _looks(cells)
    found = [r for c in cells for r in c["records"].values() if "tau" in r]
    deepest = max((len(r["survival"]) for r in found), default=0)
    if not deepest:
        return None
    figure, panels = _panels([2.5] * len(cells))
    for axes, cell in zip(panels, cells, strict=True):
        for i, (name, look) in enumerate(looks.items()):
            r = cell["records"].get(name)
            if r is None:
                continue
            values = [1.0, *r["survival"]]
            ranges = r.get("survival_interval") or [None] * len(r["survival"])
            at = np.arange(len(values)) + _shift(i, len(looks), 0.24)
            errors = _errors(values, [None, *ranges])
            axes.errorbar(at, values, yerr=errors, elinewidth=1, **look)
        axes.set_ylim(0, 1.03)
        axes.set_xlim(-0.2, deepest + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth k")
        axes.set_ylabel("survival")
        _title(axes, cell["temperature"], len(cells))
    _legend(figure, looks)
    caption = "Share of all rounds in which the first k drafted tokens were all accepted, with 95 %"
    caption += " intervals over prompts. The points of a curve add up to tau."
    return Drawing("survival", "Survival by depth", caption, figure)


def _rounds(cells: Sequence[Cell]) -> Drawing:
    """Where a mean round's time goes, a panel for each batch of the first temperature."""
    chosen = [c for c in cells if c["temperature"] == cells[0]["temperature"]]
    drafters = max(len(c["records"]) for c in chosen)
    figure, panels = _panels([0.8 + 0.27 * drafters] * len(chosen))
    for axes, cell in zip(panels, chosen, strict=True):
        spent = {name: r["round_ms"] for name, r in cell["records"].items()}
        left = np.zeros(len(spent))
        for part, colour in PARTS.items():
            width = np.array([parts.get(part, 0.0) for parts in spent.values()])
            axes.barh(range(len(spent)), width, 0.62, left=left, color=colour)
            left += width
        axes.set_yticks(range(len(spent)), [_short(name) for name in spent])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a round")
        axes.grid(axis="y", visible=False)
        if len(chosen) > 1:
            axes.set_title(f"batch {cell['batch']}")
    handles = [Patch(color=colour) for colour in PARTS.values()]
    figure.legend(
        handles, list(PARTS), loc="outside upper left", ncols=5, columnspacing=1, handlelength=1
    )
    caption = "Mean time of a round by what it was spent on. Verify is the target’s forward; other"
    caption += " is the loop’s own bookkeeping. What a round is worth is its tau."
    return Drawing("round", "Time of a round by part", caption, figure)


def _groups(cells: Sequence[Cell], by: str) -> Drawing | None:
    """Tau of groups of prompts or rounds, a panel for each temperature; None for a single group."""
    key, looks = f"by_{by}", _looks(cells)
    found = [r.get(key) or {} for c in cells for r in c["records"].values()]
    groups = list(dict.fromkeys(group for table in found for group, g in table.items() if g))
    if len(groups) < 2:
        return None
    if by != "context":  # which has an order of its own
        groups.sort(key=lambda group: -_best_tau(found, group))
    tall = 0.75 + len(groups) * (0.16 + 0.07 * len(looks))
    figure, panels = _panels([tall] * len(cells))
    for axes, cell in zip(panels, cells, strict=True):
        for i, (name, look) in enumerate(looks.items()):
            table = cell["records"].get(name, {}).get(key) or {}
            shown = [(at, table[g]) for at, g in enumerate(groups) if table.get(g)]
            at = [a + _shift(i, len(looks), 0.66) for a, _ in shown]
            values = [g["tau"] for _, g in shown]
            errors = _errors(values, [g["tau_interval"] for _, g in shown])
            axes.errorbar(values, at, xerr=errors, elinewidth=1, **look | {"linestyle": "none"})
        axes.set_yticks(range(len(groups)), [_short(group) for group in groups])
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.set_xlabel("tau, tokens a round")
        axes.grid(axis="y", visible=False)
        _title(axes, cell["temperature"], len(cells))
    farthest = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0.97, farthest)
    _legend(figure, looks)
    of = "tokens before the round" if by == "context" else "prompts"
    caption = f"Tokens a round of the target, by {by} ({of}), with 95 % intervals over prompts."
    return Drawing(by, f"Tau by {by}", caption, figure)


def _best_tau(tables: Sequence[Mapping[str, Any]], group: str) -> float:
    return max((table[group]["tau"] for table in tables if table.get(group)), default=0.0)


def _drift(found: Mapping[str, Mapping[str, Any]]) -> Drawing | None:
    """Survival on the own target and on another, a panel for each head."""
    if not found:
        return None
    figure, panels = _panels([2.5] * len(found))
    for axes, (head, drift) in zip(panels, found.items(), strict=True):
        sides = {"own target": drift["tau"], _short(drift["against"]): drift["other"]}
        for (name, side), colour, marker in zip(sides.items(), SERIES, MARKERS, strict=False):
            values = [1.0, *side["survival"]]
            look: Look = {"color": colour, "marker": marker, "markeredgecolor": PAPER}
            axes.plot(range(len(values)), values, label=name, **look)
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth k")
        axes.set_ylabel("survival")
        axes.set_title(_short(head))
        axes.legend()
    caption = "Share of rounds in which the first k drafted tokens were all accepted, by the same"
    caption += " head with the same prompts on both targets."
    return Drawing("drift", "Drift: survival on another target", caption, figure)


def _losses(losses: Sequence[tuple[int, float]]) -> Drawing | None:
    if not losses:
        return None
    figure, (axes,) = _panels([2.3])
    marker = "o" if len(losses) < 30 else None
    axes.plot(*zip(*losses, strict=True), marker=marker, color=SERIES[0])
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss")
    return Drawing("losses", "Training loss", "Loss of the head’s training by step.", figure)


# Parts of figures


def _panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Axes one below another, of these heights in inches, and room for a legend."""
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)
    return figure, list(axes[:, 0])


def _looks(cells: Sequence[Cell]) -> dict[str, Look]:
    """How each drafter is drawn, the same in every figure; plain is no drafter."""
    names = dict.fromkeys(n for c in cells for n, r in c["records"].items() if "tau" in r)
    looks: dict[str, Look] = {}
    for i, name in enumerate(names):
        marker = MARKERS[(i + i // len(SERIES)) % len(MARKERS)]  # no pair comes twice in 49
        colour = SERIES[i % len(SERIES)]
        looks[name] = {"color": colour, "marker": marker, "markeredgecolor": PAPER}
    return looks


def _legend(figure: Figure, looks: Mapping[str, Look]) -> None:
    handles = [Line2D([], [], **look) for look in looks.values()]
    names = [_short(name) for name in looks]
    longest = max(map(len, names))
    columns = max(1, min(len(names), 48 // (longest + 5)))
    figure.legend(handles, names, loc="outside upper left", ncols=columns, columnspacing=1.2)


def _title(axes: Axes, temperature: float, several: int) -> None:
    if several > 1:
        axes.set_title(f"temperature {temperature:g}")


def _shift(i: int, count: int, width: float) -> float:
    """So far the i-th of `count` stands beside its place, that intervals do not hide each other."""
    return (i - (count - 1) / 2) * width / max(1, count)


def _errors(
    values: Sequence[float], intervals: Sequence[Sequence[Any] | None]
) -> NDArray[np.float64]:
    """(2, n): how far each interval reaches below and above its value; 0 where there is none."""
    known = [
        (v, v) if i is None or None in i else i for v, i in zip(values, intervals, strict=True)
    ]
    pairs = [(low, high) for low, high in known]
    ends = np.array(pairs, dtype=float).reshape(-1, 2).T
    middle = np.array(values, dtype=float)
    reach: NDArray[np.float64] = np.stack([middle - ends[0], ends[1] - middle]).clip(0)
    return reach


def _known(value: float | None) -> float:
    """A figure to draw; NaN, which is not drawn, where there is none."""
    return float("nan") if value is None else value


def _short(name: str) -> str:
    """A label that leaves room for the figure; matplotlib hides those that begin with `_`."""
    name = " ".join(name.split())
    name = name if len(name) <= 24 else f"{name[:23]}…"
    return f" {name}" if name.startswith("_") else name
