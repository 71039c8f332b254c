"""Tables and a plot of a comparison of heads, from its records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Row = list[str]


def tables(records: Sequence[Record]) -> str:
    """Markdown; of pieces made more than once with other settings the latest is shown."""
    found = {record["name"]: record for record in records}
    parts = {
        "Training": _training(found),
        "Held-out simulated tau by learning rate": _tuning(found),
        "Decoding": _decoding(found),
        "Survival of a chain by depth, greedy": _survival(found),
        "Seeds: mean and standard deviation": _seeds(found),
    }
    shown = [f"### {title}\n\n{_markdown(rows)}" for title, rows in parts.items() if len(rows) > 1]
    return "\n\n".join(shown) or "nothing finished yet"


def _markdown(rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def _runs(found: Mapping[str, Record], kind: str) -> dict[str, Record]:
    """Records of one kind by head or variant, seeds left out."""
    ending = f"/{kind}"
    names = {n.removesuffix(ending): r for n, r in found.items() if n.endswith(ending)}
    return {name: record for name, record in names.items() if "/" not in name}


def _training(found: Mapping[str, Record]) -> list[Row]:
    rows = [
        [
            "head",
            "weights trained",
            "lr",
            "positions",
            "TFLOP",
            "CPU minutes",
            "simulated tau",
            "draft, chain of 4",
            "weights read",
            "steps",
        ]
    ]
    for name, run in _runs(found, "run").items():
        chain = run["drafting"]["chain"]
        small = f" ({chain['small_steps']} small)" if chain["small_steps"] else ""
        rows.append(
            [
                name,
                f"{run['trained_weights'] / 1e6:.2f} M",
                f"{run['settings']['optimiser']['lr']:g}",
                f"{run['positions']:,}",
                f"{1000 * petaflop(run):.1f}",
                f"{run['training_cpu_seconds'] / 60:.1f}",
                f"{run['simulated_tau']:.3f}",
                f"{chain['macs'] / 1e6:.1f} M MAC",
                f"{chain['bytes'] / 1e6:.1f} MB",
                f"{chain['steps']}{small}",
            ]
        )
    return rows


def petaflop(run: Record, positions: float | None = None) -> float:
    """Operations of a head's training, forward and back; the target's are not in them."""
    flops = run["flops_per_position"]
    count = run["positions"] if positions is None else positions
    return float((flops["forward_flops"] + flops["backward_flops"]) * count / 1e15)


def _tuning(found: Mapping[str, Record]) -> list[Row]:
    taus: dict[str, dict[float, float]] = {}
    for record in found.values():
        if record["kind"] == "tune":
            rate = record["settings"]["optimiser"]["lr"]
            taus.setdefault(record["entry"], {})[rate] = record["simulated_tau"]
    rates = sorted({rate for by_rate in taus.values() for rate in by_rate})
    rows = [["head", *(f"{rate:g}" for rate in rates)]]
    for name, by_rate in taus.items():
        shown = [f"{by_rate[rate]:.3f}" if rate in by_rate else "–" for rate in rates]
        rows.append([name, *shown])
    return rows


def _decoding(found: Mapping[str, Record]) -> list[Row]:
    rows = [
        [
            "head",
            "shape",
            "T = 0: tau",
            "speed",
            "CPU",
            "T = 1: tau",
            "speed",
            "CPU",
            "tau / PFLOP",
            "tau / draft GMAC",
            "equal",
        ]
    ]
    runs = _runs(found, "run")
    for name, record in _runs(found, "evaluate").items():
        for role in ("chain", "tree"):
            greedy, drawn = record["greedy"][role], record.get("drawn", {}).get(role)
            same = greedy["agreement"]
            run = runs.get(name)
            per = ["–", "–"]
            if run is not None:
                # A draft that stops early, or is cut, costs less than its widest, counted here.
                chain = record[f"{role}_shape"].startswith(("chain:", "stop:"))
                macs = run["drafting"]["chain" if chain else "tree"]["macs"] / 1e9
                per = [f"{greedy['tau'] / petaflop(run):.1f}", f"{greedy['tau'] / macs:.1f}"]
            rows.append(
                [
                    name,
                    record[f"{role}_shape"],
                    _interval(greedy),
                    *_speeds(greedy),
                    *([_interval(drawn), *_speeds(drawn)] if drawn else ["–"] * 3),
                    *per,
                    f"{same['equal']} of {same['of']}",
                ]
            )
    return rows


def _interval(record: Record) -> str:
    low, high = record["tau_interval"]
    return f"{record['tau']:.2f} ({low:.2f}–{high:.2f})"


def _speeds(record: Record) -> list[str]:
    return [f"{record['speedup']:.2f}", f"{record['cpu_speedup']:.2f}"]


def _survival(found: Mapping[str, Record]) -> list[Row]:
    chains = {n: r["greedy"]["chain"]["survival"] for n, r in _runs(found, "evaluate").items()}
    depth = max(map(len, chains.values()), default=0)
    rows = [["head", *(str(k) for k in range(1, depth + 1))]]
    for name, values in chains.items():
        shown = [f"{value:.3f}" for value in values]
        rows.append([name, *shown, *["0"] * (depth - len(shown))])
    return rows


def _seeds(found: Mapping[str, Record]) -> list[Row]:
    """Of heads that were trained more than once; decoded where all of its seeds were."""
    rows = [["head", "seeds", "simulated tau", "decoded tau, chain, greedy"]]
    seeds: dict[str, list[str]] = {}
    for run, record in found.items():
        if record["kind"] == "run":
            name, *rest = run.split("/")
            if rest == ["run"] or rest[0].startswith("seed"):
                seeds.setdefault(name, []).append(run)
    for name, runs in seeds.items():
        if len(runs) > 1:
            decoded = [found.get(f"{run.removesuffix('run')}evaluate") for run in runs]
            taus = [record["greedy"]["chain"]["tau"] for record in decoded if record is not None]
            simulated = _mean_and_deviation([found[run]["simulated_tau"] for run in runs])
            shown = _mean_and_deviation(taus) if len(taus) == len(runs) else "–"
            rows.append([name, str(len(runs)), simulated, shown])
    return rows


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:.3f} ± {deviation:.3f}"


def plot(records: Sequence[Record], path: Path) -> Path:
    """Held-out simulated tau of each full run against what was spent on it, as one PNG."""
    from matplotlib import colormaps  # imported here: it costs a second
    from matplotlib.figure import Figure

    spent: dict[str, Callable[[Record, Record], float]] = {
        "thousand positions": lambda run, point: point["positions"] / 1000,
        "TFLOP of training": lambda run, point: 1000 * petaflop(run, point["positions"]),
        "CPU minutes of training": lambda run, point: point["training_cpu_seconds"] / 60,
    }
    runs = _runs({record["name"]: record for record in records}, "run")
    colours = dict(zip(runs, colormaps["tab20"].colors, strict=False))
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    for axes, (title, of) in zip(figure.subplots(1, len(spent)), spent.items(), strict=True):
        for name, run in runs.items():
            taus = [point["simulated_tau"] for point in run["curve"]]
            dashes = "--" if "-" in name else "-"  # a variant
            style = {"color": colours.get(name), "ls": dashes, "marker": "o", "ms": 3}
            axes.plot([of(run, p) for p in run["curve"]], taus, label=name, **style)
        axes.set_xlabel(title)
        axes.set_ylabel("held-out simulated tau, 4 drafts")
        axes.grid(alpha=0.3)
    if runs:
        figure.legend(*axes.get_legend_handles_labels(), fontsize="small", loc="outside right")
    figure.savefig(path, dpi=120)
    return path
