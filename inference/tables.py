"""Cells of an evaluation's tables, as the terminal and the page show them. It knows no layout.

A cell is text; on the page, a pair is a figure with a smaller remark below it, mostly its interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]
Cell = str | tuple[str, str]

HEADER = ("drafter", "tau", "95 %", "tokens/s", "speed-up", "CPU speed-up", "identical")
UNKNOWN = "–"
"""Where there is nothing to show: a group without a round, plain decoding's speed-up."""


class Table(NamedTuple):
    """Header and rows; the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def short(text: str, most: int = 80) -> str:
    """A name in one line, cut where it would fill a page."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def span(interval: Sequence[float | None] | None) -> str:
    """An interval in words; empty where there is none, or no number at an end of it."""
    if interval is None:
        return ""
    low, high = interval
    return "" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def shown_name(name: str, record: Record) -> str:
    """A drafter's name, marked where its text is not the target's own."""
    return f"{name} (lossy)" if record.get("lossy") else name


def table_rows(records: Mapping[str, Record]) -> list[list[str]]:
    """Cells of the comparison under `HEADER`; plain is the first row."""
    rows = []
    for name, r in records.items():
        if "tau" not in r:
            rows.append([name, "1.00", "", _number(r["tokens_per_s"], 1), "1.00", "1.00", ""])
            continue
        wall, cpu = _joined(*_speedup(r, "speedup")), _joined(*_speedup(r, "cpu_speedup"))
        tokens = _number(r["tokens_per_s"], 1)
        tau, interval = f"{r['tau']:.2f}", span(r["tau_interval"])
        rows.append([shown_name(name, r), tau, interval, tokens, wall, cpu, _identical(r)])
    return rows


def profile_rows(records: Mapping[str, Record]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a mean round by part: milliseconds, and their share of the round."""
    parts = list(next(iter(records.values()))["round_ms"])
    rows = []
    for name, record in records.items():
        spent = record["round_ms"]
        whole = sum(spent.values())
        cells = [f"{spent[p]:.2f} ({100 * spent[p] / max(whole, 1e-9):.0f} %)" for p in parts]
        rows.append([name, f"{whole:.2f}", *cells])
    return ["ms of a round", "all", *parts], rows


def comparison(records: Mapping[str, Record]) -> Table:
    """All drafters of one temperature and batch, with everything that is known of their speed."""
    header = ["drafter", "speed-up", "tokens/s", "tau", "accepted per drafted", "per verified"]
    header += ["drafted per round", "median prompt", "CPU speed-up", "first token, ms"]
    several = any(r.get("speedup_spread") for r in records.values())
    header += ["over repeats"] if several else []
    rows: list[list[Cell]] = []
    for name, r in records.items():
        first = _number(r.get("first_token_ms"), 1)
        tokens = _number(r["tokens_per_s"], 1)
        if "tau" not in r:
            row: list[Cell] = [name, "1.00", tokens, "1.00", *[UNKNOWN] * 3, "1.00", "1.00", first]
            rows.append([*row, *[UNKNOWN] * several])
            continue
        row = [
            shown_name(name, r),
            _speedup(r, "speedup"),
            tokens,
            (f"{r['tau']:.2f}", span(r["tau_interval"])),
            f"{r['accepted_per_drafted']:.2f}",
            _number(r.get("accepted_per_verified"), 2),
            _number(r["drafted"] / r["rounds"] if "drafted" in r else None, 1),
            _number(r.get("median_prompt_speedup"), 2),
            _speedup(r, "cpu_speedup"),
            first,
        ]
        rows.append([*row, *[span(r.get("speedup_spread")) or UNKNOWN] * several])
    return Table(header, rows)


def same_text(cells: Sequence[Mapping[str, Any]], dtype: str) -> Table | None:
    """What was compared with plain decoding's text; None where nothing was."""
    rows: list[list[Cell]] = []
    found = [(c, n, r) for c in cells for n, r in c["records"].items() if "tau" in r]
    repeated = any(r.get("repeated") for _, _, r in found)
    for cell, name, r in found:
        if not (r["identical"] or r["agreement"]):
            continue
        served = r["agreement"] or {"largest_gap": None}
        row: list[Cell] = [shown_name(name, r), f"{cell['temperature']:g}", str(cell["batch"])]
        same = r["identical"] or {}
        gap, tie = same.get("largest_gap"), same.get("tie")
        apart = "" if gap is None or tie is None else f"gap {gap:.1g}, tie up to {tie:.1g}"
        row += [(_identical(r), apart), _of(r["agreement"]), _number(served["largest_gap"], 3)]
        rows.append([*row, *[_of(r.get("repeated"))] * repeated])
    header = ["drafter", "temperature", "batch", "identical in float32", f"equal in {dtype}"]
    header += ["largest gap", *["equal over repeats"] * repeated]
    return Table(header, rows) if rows else None


def depths(records: Mapping[str, Record]) -> Table:
    """Survival and conditional acceptance by depth, a row for each drafter."""
    drafted = {name: r for name, r in records.items() if "tau" in r}
    deepest = max((len(r["survival"]) for r in drafted.values()), default=0)
    rows: list[list[Cell]] = []
    for name, r in drafted.items():
        for key, label in (("survival", "survival"), ("conditional", "conditional")):
            ranges = r.get(f"{key}_interval") or [None] * len(r[key])
            cells = zip(r[key], ranges, strict=True)
            row: list[Cell] = [(f"{value:.3f}", span(interval)) for value, interval in cells]
            blank = [UNKNOWN] * (deepest - len(row))
            rows.append([f"{shown_name(name, r)}: {label}", *row, *blank])
    return Table(["depth", *map(str, range(1, deepest + 1))], rows)


def groups(records: Mapping[str, Record], by: str) -> Table:
    """Tau and speed-up of each drafter by group; `by` is a record's key, as `by_category`."""
    drafted = {name: r for name, r in records.items() if r.get(by)}
    names = list(dict.fromkeys(group for r in drafted.values() for group in r[by]))
    header = [by.removeprefix("by_"), "prompts"]
    for name, r in drafted.items():
        header += [f"{shown_name(name, r)}: tau", "speed-up"]
    rows: list[list[Cell]] = []
    for group in names:
        found = [r[by].get(group) for r in drafted.values()]
        prompts = max((g["prompts"] for g in found if g), default=0)
        row: list[Cell] = [group, str(prompts)]
        for g in found:
            tau = (f"{g['tau']:.2f}", span(g["tau_interval"])) if g else UNKNOWN
            row += [tau, _speedup(g, "speedup") if g else UNKNOWN]
        rows.append(row)
    return Table(header, rows)


def sources(records: Mapping[str, Record]) -> Table | None:
    """Which drafter made the drafts of a merged one; None where no drafter has two sources."""
    rows: list[list[Cell]] = []
    for name, r in records.items():
        found = r.get("by_source") or {}
        if len(found.keys() - {"none"}) < 2:
            continue
        for source, g in found.items():
            share = f"{100 * g['rounds'] / max(1, r['rounds']):.0f} %"
            rows.append(
                [f"{shown_name(name, r)}: {source}", str(g["rounds"]), share, f"{g['tau']:.2f}"]
            )
    return Table(["drafts made by", "rounds", "share", "tau"], rows) if rows else None


def simulated(told: Mapping[str, Mapping[str, Any]]) -> Table:
    """Simulated beside decoded tau of each chain."""
    rows: list[list[Cell]] = []
    for name, s in told.items():
        simulated_tau: Cell = (f"{s['tau']:.2f}", span(s["interval"]))
        verdict = "yes" if s["agrees"] else "no"
        rows.append([name, simulated_tau, f"{s['decoded_tau']:.2f}", verdict])
    return Table(["drafter", "simulated tau", "decoded tau", "agree"], rows)


def tuned(tuning: Mapping[str, Any]) -> Table:
    """The shape chosen for each batch, and what was measured for it."""
    rows: list[list[Cell]] = []
    for batch, shape in tuning["shapes"].items():
        speeds = tuning.get("measured", {}).get(batch, {})
        told = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
        rows.append([batch, shape, told or UNKNOWN])
    return Table(["batch", "shape", "measured, tokens/s"], rows)


def drifts(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What each head loses on another target, by name; a single head's stands alone there."""
    found = result.get("drift")
    if not found:
        return {}
    return {next(iter(result["heads"])): found} if "advice" in found else dict(found)


def drifted(drift: Mapping[str, Any]) -> Table:
    """Tau of one head on both targets and what it loses, on all prompts and by category."""
    header = ["prompts", "number", "tau, own target", f"tau, {short(drift['against'], 40)}", "lost"]
    whole = {**drift, "tau": drift["tau"]["tau"], "other": drift["other"]["tau"]}
    rows: list[list[Cell]] = []
    for name, group in {"all": whole, **drift["by_category"]}.items():
        lost = f"{group['lost']:.2f}", span(group["lost_interval"])
        taus = [f"{group[key]:.2f}" for key in ("tau", "other")]
        rows.append([name, str(group["prompts"]), *taus, lost])
    return Table(header, rows)


def _speedup(record: Record, key: str) -> tuple[str, str]:
    return _number(record[key], 2), span(record.get(f"{key}_interval"))


def _joined(value: str, interval: str) -> str:
    return f"{value} ({interval})" if interval else value


def _identical(record: Record) -> str:
    found = record["identical"]
    tied = found.get("tied") if found else 0
    return _of(found, "not checked") + (f", {tied} tied" if tied else "")


def _of(counts: Mapping[str, Any] | None, nothing: str = UNKNOWN) -> str:
    return f"{counts['equal']} of {counts['of']}" if counts else nothing


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
