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
    same = [i for _, r in records if (i := r.get("identical")) and i["of"]]
    unlike = [short(n) for n, r in records if (i := r.get("identical")) and not explained(i)]
    if broken or unlike:
        told = [f"the certificate’s check “{name}”" for name in broken]
        if unlike:
            what = "which differs where the target’s two best tokens are no tie within rounding"
            told.append(f"the text of {_each(unlike)} against plain decoding’s, {what}")
        reason = f"Failed: {listed(told)}. “drafthead certify” looks closer."
        return Verdict("failed", "A check of losslessness failed", reason)
    told = []
    if same:
        most, dtype = max((found["of"], found["dtype"]) for found in same)
        told.append(
            f"every drafter gave plain decoding’s ids on {counted(most, 'prompt')} in {dtype}"
            + _ties([found for found in same if found.get("tied")])
        )
    if certificate and certificate["passed"]:
        several = len(result["heads"]) > 1
        whose = f" of {listed(certified(result, certificate))}" if several else ""
        told.append(f"all {len(checks)} checks of the certificate{whose} passed")
    drawn = rule != "coupled" and any(cell["temperature"] > 0 for cell in result["cells"])
    own = "the text follows the target’s own law" if drawn else "the text is the target’s own"
    if told:
        reason = f"By its rule ({rule}), and checked: {'; '.join(told)}."
        return Verdict("checked", f"Lossless: {own}", reason)
    reason = f"By its rule ({rule}), {own}; nothing was compared in float32 here."
    return Verdict("unchecked", "Lossless by its rule, not checked in this run", reason)


def certified(result: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """Names of the heads that a certificate is about, by their weights and the target's; all of
    them where it does not tell, as when it was made by hand.
    """
    own = certificate.get("head", {}).get("fingerprint")
    target = certificate.get("target", {}).get("fingerprint")
    if target not in (None, result["target"]["fingerprint"]):
        return []
    return [n for n, head in result["heads"].items() if own in (None, head.get("fingerprint", own))]


def explained(identical: Mapping[str, Any]) -> bool:
    """Whether every text is plain decoding's, or leaves it at a measured tie."""
    return int(identical["equal"]) + int(identical.get("tied") or 0) >= int(identical["of"])


def _ties(tied: Sequence[Mapping[str, Any]]) -> str:
    """What is said of texts that left plain decoding's at a tie."""
    if not tied:
        return ""
    count, gap = sum(found["tied"] for found in tied), max(found["largest_gap"] for found in tied)
    bound = max(found["tie"] for found in tied)
    where = f"a tie of the target’s two best tokens (at most {gap:.1g} apart)"
    return (
        f", but for {counted(count, 'text')} that left it at {where} within rounding ({bound:.1g})"
    )


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
    name = max(drafted, key=lambda n: float(drafted[n]["speedup"] or 0))
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
    tau = f"{r['tau']:.2f} tokens{_of(r['tau_interval'])} a round of the target"
    if r["speedup"] is None:
        return f"The clock saw no time pass {where}: no speed is known. “{best.name}” had {tau}."
    speeds = f"{r['tokens_per_s']:.1f} tokens/s"
    speeds += f" against {plain['tokens_per_s']:.1f}" if plain else ""
    times = f"{r['speedup']:.2f} times{_of(r.get('speedup_interval'), '95 % interval ')}"
    if r["speedup"] < 1:
        told = (
            f"No drafter was faster than plain decoding {where}: the best, “{best.name}”, came to"
        )
        return f"{told} {times} its speed, {speeds}, with {tau}."
    told = f"The fastest drafter {where} is “{best.name}”: {times} the speed of plain decoding,"
    interval = r.get("speedup_interval")
    if interval is None:
        doubt = " One prompt has no interval: this may be chance."
    else:
        doubt = " The interval reaches 1, so this shows no gain." if interval[0] <= 1 else ""
    return f"{told} {speeds}, with {tau}.{doubt}"


def _elsewhere(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The best of the other temperatures and batches, in one sentence."""
    found = map(fastest, cells[1:])
    others = [best for best in found if best and best.record["speedup"] is not None]
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
    found = best.record.get("by_category") or {}
    groups = {name: g for name, g in found.items() if g and g["speedup"] is not None}
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
