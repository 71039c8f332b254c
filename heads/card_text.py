"""The sentences of a card: what a head is, was made of, costs, promises and cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafthead.heads.base import DraftHead
from drafthead.heads.card_measured import Certificate, Same, Tuned, clean
from drafthead.heads.card_origin import KNOWN, UNKNOWN, Licence, Method
from drafthead.heads.card_run import Result, RunFacts, Source, machine, shown_name
from drafthead.heads.card_tables import Measured, Table, called, counted, large, listed, number
from drafthead.heads.card_tables import slower as slow_places
from drafthead.heads.contract import LAST

FEW = 20
"""Prompts below which a card says that they are few."""


def about(head: DraftHead, method: Method, title: str, target: str, trained: bool) -> str:
    weights = sum(p.numel() for p in head.parameters())
    does = (
        "The text that comes out is the target's own"
        if not head.settings.adapts
        else "The text that comes out is that of the target **as adapted by this head**, in memory"
    )
    return (
        f"**{title}** is a draft head for {target}: {method.name}, {method.what}. From what the "
        "target computes anyway it guesses the next few tokens; the target checks all guesses in "
        f"one pass and keeps those that it would have written itself. {does}, in fewer passes. "
        f"By itself the head writes nothing. It has {large(weights)} weights in "
        f"{dtype_of(head)}{' and was trained with drafthead' if trained else ''}."
    )


def dtype_of(head: DraftHead) -> str:
    return str(head.dtype).removeprefix("torch.")


def contract(head: DraftHead) -> Table:
    """What the head was made for and what it reads; `drafthead` checks it before it decodes."""
    found, values = head.contract, head.settings.model_dump()
    size, whole = len(head.draft_ids), found.vocab_size
    offset = f" (+ {found.norm_offset:g})" if found.norm_offset else ""
    rows = "its own" if values.get("own_rows") else f"the target's `{found.output}`, not stored"
    depth = "any depth" if head.max_depth is None else f"at most {head.max_depth} tokens deep"
    facts = {
        "target": f"`{clean(found.target)}`",
        "revision": found.revision or "not recorded",
        "weights of the target": _code(found.fingerprint),
        "shape of the target": f"{found.model_type}, {found.num_layers} layers, width "
        f"{found.hidden_size:,}, vocabulary {found.vocab_size:,}",
        "states read": _layers(found.layers),
        "final norm": f"`{found.norm}`{offset}" if found.norm else "none",
        "input embedding": f"the target's `{found.embedding}`, not stored",
        "output rows": rows,
        "tokenizer": _code(found.tokenizer),
        "chat template": _code(found.template),
        "template arguments": str(found.template_kwargs) if found.template_kwargs else "none",
        "dtype of the target": found.dtype,
        "draft vocabulary": f"{size:,} of {whole:,} tokens" if size < whole else f"all {whole:,}",
        "drafts": depth,
        "weights of the head": f"{sum(p.numel() for p in head.parameters()):,} in {dtype_of(head)}",
    }
    if found.transform.scale != 1.0 or found.transform.softcap is not None:
        facts["logits"] = f"scaled by {found.logit_scale:g}, soft cap {found.logit_softcap}"
    return Table(["contract", ""], [[name, value] for name, value in facts.items()])


def _code(digest: str | None) -> str:
    return f"`sha256:{digest}`" if digest else "not recorded"


def _layers(layers: Sequence[int]) -> str:
    inner = [str(layer) for layer in layers if layer != LAST]
    told = ["what leaves the final norm"] if LAST in layers else []
    told += [f"the streams that enter layers {listed(inner)}, counted from 0"] if inner else []
    return "; ".join(told)


def data(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["No training run was given: the data are not known to this card."]
    found = run.used.data
    lines = [f"- {_source(source)}" for source in run.sources]
    used = f"At most {found.max_length:,} tokens of a row are used"
    if found.positions:
        used += f", {found.positions:,} positions in all"
    held = [f"`{clean(shown_name(name))}`" for name in found.heldout]
    return [*lines, f"\n{used}{f'; held out: {listed(held)}' if held else ''}."]


def _source(source: Source) -> str:
    name = f"`{clean(source.name)}`"
    if source.name.startswith("samples/"):
        return (
            f"{name}: conversations that come with drafthead, prompts written for it and answered "
            "by SmolLM2-135M-Instruct"
        )
    if source.dataset:
        name = f"[{source.dataset}](https://huggingface.co/datasets/{source.dataset})"
    if source.made is None:
        return f"{name}: how its answers were made is not recorded"
    made = source.made
    keys = ("temperature", "top_p", "top_k", "seed", "dtype")
    told = [f"{key.replace('_', ' ')} {clean(made[key])}" for key in keys
            if made.get(key) is not None]  # fmt: skip
    return f"{name}: answered by {clean(made['target'])} ({', '.join(told)})"


def training(run: RunFacts | None) -> str:
    if run is None:
        return "Not known to this card: give the folder of the run."
    used = run.used
    return (
        f"{_cost(run, run.result)} {used.head.unroll_steps} draft depths trained together, loss "
        f"`{clean(used.training.loss)}`; AdamW, learning rate {used.optimiser.lr:g}, "
        f"{clean(used.schedule.kind)}."
    )


def _cost(run: RunFacts, result: Result | None) -> str:
    if result is None:
        return "The run left no result.json: what it cost is not known."
    spent = result.seconds / 60
    took = f"{spent / 60:.1f} hours" if spent >= 90 else f"{spent:.1f} minutes"
    told = f"{result.steps:,} steps over {result.positions:,} token positions, {took}"
    told += f" on {run.hardware}." if run.hardware else "; the run has not recorded its hardware."
    if result.simulated_tau is not None:
        told += f" Held-out simulated tau {number(result.simulated_tau, 3)}"
        told += f" at step {result.best_step:,}." if result.best_step else "."
    served = result.agreement or {}
    if served.get("decoded_tau") is not None:
        agrees = "they agree" if served.get("agrees") else f"**they differ**: {served.get('cause')}"
        told += (
            f" As served: decoded tau {number(served['decoded_tau'], 3)}, simulated "
            f"{number(served['simulated_tau'], 3)} on the same texts; {agrees}."
        )
    return told


def measured(found: Measured) -> list[str]:
    """How it was measured."""
    seen, drawn = found.evaluation, found.evaluation.settings
    turns = f" ({counted(seen.turns, 'turn')})" if seen.turns != seen.prompts else ""
    rule = [f"rule `{drawn.rule}`"]
    rule += [f"top-k {drawn.top_k}"] if drawn.top_k else []
    rule += [f"top-p {drawn.top_p:g}"] if drawn.top_p < 1 else []
    shapes = f"; the head drafted {_coded(seen.trees)}" if seen.trees else ""
    again = f", measured {seen.repeats} times over" if seen.repeats > 1 else ""
    lines = [
        f"{counted(seen.prompts, 'prompt')}{turns} of {_coded(seen.files)}, at most "
        f"{seen.new_tokens} new tokens a turn; {', '.join(rule)}{shapes}. Target in "
        f"{seen.target.dtype} on {machine(seen.machine)}{again}.{_versions(seen.versions)}"
    ]
    if seen.lossy:
        lines.append("**These figures are of a lossy rule: the text is not the target's own.**")
    if seen.prompts < FEW:
        lines.append("These are few prompts: take the intervals, not the figures.")
    for place, _, record in found.places():
        if not record.survival:
            lines.append(f"At temperature {place.temperature:g} no draft was accepted.")
    if seen.failed:
        lines.append(f"{counted(len(seen.failed), 'turn')} failed and count nowhere.")
    if skipped := sum(seen.skipped.values()):
        lines.append(f"{counted(skipped, 'row')} of the files could not be used as prompts.")
    if chain := seen.simulated.get(found.name):
        agrees = "they agree" if chain.agrees else "**they differ**"
        lines.append(
            f"Simulated on the decoded texts, tau is {number(chain.tau)}, decoded it was "
            f"{number(chain.decoded_tau)}: {agrees}."
        )
    return lines


LEGEND = (
    "*tau*: tokens written in a pass of the target, its own included. *Speed-up*: against plain "
    "decoding by the same loop on the same prompts, prefill left out on both sides. *95 %*: "
    "bootstrap over prompts. *Survival* at a depth: the share of rounds in which all tokens "
    "drafted down to there were accepted; *conditional*: of those rounds that came down to it."
)


def _coded(names: Sequence[str]) -> str:
    return listed([f"`{clean(name)}`" for name in names])


def _versions(found: dict[str, str]) -> str:
    names = [f"{name} {found[name]}" for name in ("drafthead", "torch", "transformers")
             if name in found]  # fmt: skip
    return f" Versions: {', '.join(names)}." if names else ""


def headline(found: Measured) -> str | None:
    """The gain at the first place, in one sentence."""
    first = next(found.places(), None)
    if first is None:
        return None
    place, name, r = first
    told = f", drafting as `{called(found, name)}`" if len(found.own(place)) > 1 else ""
    return (
        f"Measured: {number(r.tau)} tokens a pass and {number(r.speedup)} times the speed of plain "
        f"decoding, over {counted(found.evaluation.prompts, 'prompt')} at temperature "
        f"{place.temperature:g}, batch {place.batch}, on {machine(found.evaluation.machine)}"
        f"{told}. Intervals and all other figures are below."
    )


def lossless(
    head: DraftHead, certificate: Certificate | None, found: Measured | None, command: str
) -> list[str]:
    adapted = head.settings.adapts
    whose = "the target's as this head adapts it" if adapted else "the target's own"
    lines = [
        f"Decoded by drafthead with an exact rule (`coupled`, `rejection`, `block`) the text is "
        f"{whose}: greedily the same tokens, sampled the same law. That is promised in float32; in "
        "half precision a pass over several tokens rounds differently from a pass over one, so a "
        "near tie may fall the other way."
    ]
    if certificate is None:
        lines.append(f"No certificate was given; `{command}` makes one.")
    else:
        lines.append(_certified(certificate))
    return lines if found is None else [*lines, *_alike(found)]


def _alike(found: Measured) -> list[str]:
    """What the evaluation compared with plain decoding's texts."""
    dtype, lines = found.evaluation.target.dtype, []
    for place, name, record in found.places():
        where = f"temperature {place.temperature:g}, batch {place.batch}, {called(found, name)}"
        told = [_equal(record.identical, "float32"), _equal(record.agreement, dtype)]
        if any(told):
            same = listed([*filter(None, told)])
            lines.append(f"Texts that equal plain decoding's ({where}): {same}.")
    return lines


def _equal(same: Same | None, dtype: str) -> str:
    if same is None:
        return ""
    gap = same.largest_gap
    near = f", where the target's two best logits lie at most {gap:.3g} apart" if gap else ""
    parted = f" (the others come to differ{near})" if same.equal < same.of else ""
    return f"{same.equal} of {same.of} in {same.dtype or dtype}{parted}"


def _certified(certificate: Certificate) -> str:
    checks = certificate.checks
    dtypes = f"{certificate.dtypes.exact} and {certificate.dtypes.serving}"
    asked = f"rules {listed(certificate.rules)}; {dtypes}"
    if certificate.passed:
        return (
            f"**Certificate: passed**, all {len(checks)} checks ({asked}), controls with planted "
            f"faults among them.{_versions(certificate.versions)}"
        )
    broken = [check.name for check in checks if not check.passed]
    return (
        f"**Certificate: NOT passed**: {len(broken)} of {len(checks)} checks failed "
        f"({'; '.join(broken)}). Do not rely on the text being the target's own."
    )


def checks(certificate: Certificate) -> Table:
    rows = [[c.name, "passed" if c.passed else "FAILED", str(c.figure)] for c in certificate.checks]
    return Table(["check", "outcome", "figure"], rows)


def limitations(head: DraftHead, run: RunFacts | None, found: Measured | None) -> list[str]:
    made, size = head.contract, len(head.draft_ids)
    lines = [
        f"It is for {clean(made.target)} with these weights, tokenizer and template alone: "
        "drafthead refuses another one, and with a fine-tuned or quantised copy fewer drafts are "
        "accepted (the text stays that model's own; `drafthead evaluate --against` measures it)."
    ]
    if size < made.vocab_size:
        lines.append(
            f"It proposes {size:,} of {made.vocab_size:,} tokens; text in scripts or languages "
            "that its training data lack gains less."
        )
    if run is not None:
        lines.append(
            f"It was trained on rows of at most {run.used.data.max_length:,} tokens; "
            "deep in longer contexts expect less."
        )
    if head.settings.adapts:
        lines.append(
            "It changes the target in memory (a low-rank adapter): what is lossless is relative to "
            "the adapted target, whose answers may differ from the published one's."
        )
    if found is not None:
        lines += [f"Measured here, {told}." for told in slow_places(found)]
    lines.append(
        "Gains depend on hardware, batch size and text; measure yours (`drafthead tune`, "
        "`drafthead evaluate`). What the target gets wrong it still gets wrong: see its own card."
    )
    return lines


def licence(found: Licence, repo_has_base: bool) -> str:
    if found.source == UNKNOWN:
        where = "its card" if repo_has_base else "where it was published"
        return (
            "Not known. The head was made from the target's outputs, so the target's terms apply "
            f"to it: look them up at {where} before you use or share this head."
        )
    name = f" ({found.name})" if found.name else ""
    link = f": {found.link}" if found.link else ""
    return f"`{found.id}`{name}, {found.source}{link}."


def citation(method: Method, run: RunFacts | None) -> str:
    """Papers of the method, and of what else the run used."""
    papers = list(method.papers)
    if run is not None and run.used.training.loss == "lk":
        papers.append("2602.23881")
    if run is not None and run.used.training.position_weights == "dpace":
        papers.append("2605.18810")
    links = [f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers]
    return f"{method.name}: {listed(links)}." if links else "No paper is known to this card."


def target_lines(head: DraftHead, base: str | None) -> list[str]:
    found = head.contract
    if found.fingerprint in KNOWN:
        origin = KNOWN[found.fingerprint]
        return [f"[{origin.hub}](https://huggingface.co/{origin.hub}). {origin.note}"]
    if base is None:
        return [
            f"`{clean(found.target)}`. The contract knows it by a folder's name alone, so this "
            "card names no base model on the Hub."
        ]
    return [f"[{base}](https://huggingface.co/{base})."]


def tuned(found: Tuned | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = [[batch, shape] for batch, shape in found.shapes.items()]
    table = Table(["batch", "shape"], rows)
    return {"machine": machine(found.machine), "dtype": found.dtype, "table": table}
