"""What an evaluation came to, in words: sentences that can stand without the page around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafthead.inference.tables import short, span

Record = Mapping[str, Any]


class Verdict(NamedTuple):
    """Whether the text is the target's own."""

    kind: str
    """`lossy`, `failed`, `checked` or `unchecked`."""
    headline: str
    reason: str


class Best(NamedTuple):
    """The fastest drafter of one temperature and batch."""

    name: str
    record: Record
    cell: Mapping[str, Any]


def verdict(result: Mapping[str, Any], certificate: Mapping[str, Any] | None) -> Verdict:
    """Lossy by its rule, caught by a check, confirmed by one, or not checked here."""
    rule = result["settings"]["rule"]
    if result["lossy"]:
        reason = f"Rule {rule!r} accepts tokens that the target might not have written."
        return Verdict("lossy", "Lossy: the text is not the target’s own", reason)
    checks = certificate["checks"] if certificate else []
    broken = [check["name"] for check in checks if not check["passed"]]
    records = [pair for cell in result["cells"] for pair in cell["records"].items()]
    same = {name: r["identical"] for name, r in records if r.get("identical")}
    unlike = [short(n) for n, r in records if (i := r.get("identical")) and i["equal"] < i["of"]]
    if broken or unlike:
        told = [f"the certificate’s check “{name}”" for name in broken]
        told += [f"the text of {_each(unlike)} against plain decoding’s"] if unlike else []
        reason = f"Failed: {listed(told)}. “drafthead certify” tells a tie from a fault."
        return Verdict("failed", "A check of losslessness failed", reason)
    told = []
    if same:
        most, dtype = max((found["of"], found["dtype"]) for found in same.values())
        told.append(
            f"every drafter gave plain decoding’s ids on {counted(most, 'prompt')} in {dtype}"
        )
    if certificate and certificate["passed"]:
        told.append(f"all {len(checks)} checks of the certificate passed")
    drawn = rule != "coupled" and any(cell["temperature"] > 0 for cell in result["cells"])
    own = "the text follows the target’s own law" if drawn else "the text is the target’s own"
    if told:
        reason = f"By its rule ({rule}), and checked: {'; '.join(told)}."
        return Verdict("checked", f"Lossless: {own}", reason)
    reason = f"By its rule ({rule}), {own}; nothing was compared in float32 here."
    return Verdict("unchecked", "Lossless by its rule, not checked in this run", reason)


def sentences(result: Mapping[str, Any], words: Verdict) -> list[tuple[str, bool]]:
    """What was measured and what it means, each whole in itself, and whether it is the result."""
    best = fastest(result["cells"][0])
    if best is None:
        gain, rest = "Nothing drafted: only plain decoding was measured.", []
    else:
        gain = _gain(best)
        rest = [_text(result, words, best), *_worst(best), *_elsewhere(result["cells"])]
    rest += _missing(result)
    return [(_measured(result), False), (gain, True), *((told, False) for told in rest)]


def fastest(cell: Mapping[str, Any]) -> Best | None:
    """None where nothing drafted."""
    drafted = {name: r for name, r in cell["records"].items() if "tau" in r}
    if not drafted:
        return None
    name = max(drafted, key=lambda n: float(drafted[n]["speedup"]))
    return Best(short(name), drafted[name], cell)


def _measured(result: Mapping[str, Any]) -> str:
    target, cells = result["target"], result["cells"]
    temperatures = _each([f"{c['temperature']:g}" for c in cells])
    batches = _each([str(c["batch"]) for c in cells])
    files = [short(name) for name in result["files"]]
    where = listed(files) if len(files) < 3 else f"{len(files)} files"
    turns = f" ({counted(result['turns'], 'turn')})" if result["turns"] != result["prompts"] else ""
    repeats = f", {result['repeats']} times over" if result["repeats"] > 1 else ""
    names = [f"{short(name)} ({head['type']})" for name, head in result["heads"].items()]
    heads = f"once plainly and once with {listed(names)}" if names else "plainly and by lookup"
    shape = f" drafting {listed(result['trees'])}" if names and result.get("trees") else ""
    return (
        f"{short(target['name'])} ({large(target['parameters'])} parameters, {target['dtype']}) "
        f"answered {counted(result['prompts'], 'prompt')}{turns} of {where}, at most "
        f"{counted(result['new_tokens'], 'new token')} a turn, "
        f"at temperature {temperatures} and batch {batches}{repeats}, on {machine(result)}: "
        f"{heads}{shape}."
    )


def _gain(best: Best) -> str:
    r, cell = best.record, best.cell
    plain = cell["records"].get("plain")
    where = f"at temperature {cell['temperature']:g} and batch {cell['batch']}"
    speeds = f"{r['tokens_per_s']:.1f} tokens/s"
    speeds += f" against {plain['tokens_per_s']:.1f}" if plain else ""
    tau = f"{r['tau']:.2f} tokens{_of(r['tau_interval'])} a round of the target"
    times = f"{r['speedup']:.2f} times{_of(r.get('speedup_interval'), '95 % interval ')}"
    if r["speedup"] < 1:
        told = (
            f"No drafter was faster than plain decoding {where}: the best, “{best.name}”, came to"
        )
        return f"{told} {times} its speed, {speeds}, with {tau}."
    told = f"The fastest drafter {where} is “{best.name}”: {times} the speed of plain decoding,"
    unsure = (r.get("speedup_interval") or [2, 2])[0] <= 1
    doubt = " The interval reaches 1, so this shows no gain." if unsure else ""
    return f"{told} {speeds}, with {tau}.{doubt}"


def _elsewhere(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The best of the other temperatures and batches, in one sentence."""
    others = [found for found in map(fastest, cells[1:]) if found]
    if not others:
        return []
    told = [
        f"{b.record['speedup']:.2f} (“{b.name}”) at temperature {b.cell['temperature']:g}, "
        f"batch {b.cell['batch']}"
        for b in others
    ]
    if len(told) > 4:
        speeds = sorted(b.record["speedup"] for b in others)
        told = [f"between {speeds[0]:.2f} and {speeds[-1]:.2f} at the other {len(told)} settings"]
    return [f"The best elsewhere: {'; '.join(told)}."]


def _text(result: Mapping[str, Any], words: Verdict, best: Best) -> str:
    served = best.record.get("agreement")
    if words.kind == "lossy":
        return "The text is not the target’s own: this is a lossy run."
    own = {
        "failed": "A check of whether the text is the target’s own failed.",
        "checked": "The text is the target’s own.",
        "unchecked": "The text is the target’s own by the rule; this run did not check it.",
    }[words.kind]
    if not served or served["equal"] == served["of"]:
        return own
    told = (
        f"{own} In {result['target']['dtype']} itself {served['equal']} of {served['of']} answers"
    )
    told += (
        f" of “{best.name}” equal plain decoding’s, as rounding differs with the number of tokens"
    )
    if served["largest_gap"] is None:
        return f"{told}."
    reach = f"the target’s two best logits are at most {served['largest_gap']:.2g} apart"
    return f"{told}; where they first differ, {reach}."


def _worst(best: Best) -> list[str]:
    groups = {name: g for name, g in (best.record.get("by_category") or {}).items() if g}
    if len(groups) < 2:
        return []
    worst = min(groups, key=lambda name: float(groups[name]["speedup"]))
    top = max(groups, key=lambda name: float(groups[name]["speedup"]))
    g, t = groups[worst], groups[top]
    return [
        f"“{best.name}” gains least on {short(worst)}: {g['speedup']:.2f} times"
        f"{_of(g.get('speedup_interval'))}, tau {g['tau']:.2f} ({counted(g['prompts'], 'prompt')});"
        f" most on {short(top)}: {t['speedup']:.2f} times, tau {t['tau']:.2f}."
    ]


def _missing(result: Mapping[str, Any]) -> list[str]:
    told = []
    failed, skipped = result.get("failed") or [], result.get("skipped") or {}
    apart = [name for name, s in result["simulated"].items() if not s["agrees"]]
    if apart:
        what = "training and decoding do not compute the same thing"
        told.append(f"Simulated and decoded tau of {listed(apart)} disagree: {what}.")
    if failed:
        reasons = _each([short(str(f["reason"])) for f in failed])
        verb = "counts" if len(failed) == 1 else "count"
        told.append(f"{counted(len(failed), 'turn')} failed and {verb} nowhere ({reasons}).")
    if skipped:
        rows = "; ".join(f"{short(reason)}: {count}" for reason, count in skipped.items())
        total = sum(skipped.values())
        what = "was no prompt" if total == 1 else "were no prompts"
        told.append(f"{counted(total, 'row')} of the prompt files {what} ({rows}).")
    return told if failed or skipped else [*told, "Nothing failed and nothing was skipped."]


def machine(result: Mapping[str, Any]) -> str:
    """The machine in words."""
    found = dict(result["machine"])
    device = str(found.pop("device", "a machine")).replace("CPU", "a CPU")
    words = {"cores": "core", "threads": "thread"}
    parts = [counted(v, words[k]) if k in words else str(v) for k, v in found.items() if v]
    return f"{device} ({', '.join(parts)})" if parts else device


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def counted(count: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def large(count: float) -> str:
    """A count in thousands, millions or billions, as models are sized."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _each(values: Sequence[str]) -> str:
    return listed(list(dict.fromkeys(values)))


def _of(interval: Sequence[float] | None, name: str = "") -> str:
    return f" ({name}{span(interval)})" if interval else ""
