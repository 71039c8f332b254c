"""The model card of a head, as its repository's README.md: metadata for the Hub, then the text.

    card(folder, evaluation=None, certificate=None, run=None, licence=None, repo=None,
         base_model=None, target=None, name=None) -> str
    read_evaluation(path), read_certificate(path)   # the file, or the folder that holds it
    RunFacts.read(folder), RunFacts.beside(head)    # a training run's folder; the one of a head
    licence_of(target, revision=None)               # by the card in its folder or the Hub's cache

All of them raise ValueError with one line. Every figure of a card is that of the evaluation's file,
and no path, user or host of the machine that it was made on is in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib.metadata import metadata, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from drafthead.heads import card_tables as tables
from drafthead.heads.base import DraftHead
from drafthead.heads.card_engines import engines
from drafthead.heads.card_measured import (
    Certificate,
    Evaluation,
    certificate_of,
    clean,
    evaluation_of,
    plain,
    read_certificate,
    read_evaluation,
    read_tuning,
)
from drafthead.heads.card_origin import (
    KNOWN,
    Licence,
    base_of,
    hub_id,
    licence_for,
    licence_of,
    method_of,
    papers_of,
)
from drafthead.heads.card_run import RunFacts, machine, shown_name
from drafthead.heads.card_tables import Measured
from drafthead.heads.contract import COMPARED, LAST, OPTIONAL, fingerprint
from drafthead.heads.load import load_head
from drafthead.heads.published import TUNING

__all__ = [
    "RunFacts",
    "card",
    "licence_of",
    "read_certificate",
    "read_evaluation",
]

ORDER = ["base_model", "base_model_relation", "library_name", "pipeline_tag", "tags"]
"""Of the metadata; the others follow."""
RELATION = "adapter"
"""Of the relations that the Hub knows (adapter, finetune, merge, quantized), that of weights which
are of no use without their base model."""


def card(
    folder: Path,
    *,
    evaluation: Mapping[str, Any] | None = None,
    certificate: Mapping[str, Any] | None = None,
    run: RunFacts | None = None,
    licence: str | None = None,
    repo: str | None = None,
    base_model: str | None = None,
    target: str | Path | None = None,
    name: str | None = None,
) -> str:
    """Write the card of the head in a folder; what is missing is said in it, in a line each.

    evaluation, certificate: what the files of these names hold; licence: the Hub's id of one, or
    `unknown`; by default the target's own, where its card is at hand; repo: ORG/NAME that the card
    is for; base_model: the target's id on the Hub, where the contract has but a folder's name;
    target: folder of the target, whose card tells its licence; name: what the evaluation calls this
    head, where that cannot be told. Raises ValueError, in one line, for what is no head, for a file
    that is not what it should be, and for one of another head.
    """
    head = load_head(folder)
    found = _measured(head, evaluation, name) if evaluation is not None else None
    certified = _certified(head, certificate) if certificate is not None else None
    if run is not None and run.used.head != head.settings.type:
        raise ValueError(
            f"the run trained a head of type {run.used.head!r}, {folder} holds one of type "
            f"{head.settings.type!r}: give the run that left it"
        )
    tuned = read_tuning(folder)
    if tuned is not None and tuned.head not in (None, fingerprint(head)):
        raise ValueError(
            f"{folder}: was tuned with other weights; tune it again, or delete {TUNING}"
        )
    base = base_of(head.contract, base_model)
    terms = licence_for(head.contract, base, licence, target)
    title = hub_id(repo, "repository").split("/")[1] if repo else _slug(head)
    data = _metadata(head, title, base, terms, run, found)
    facts = _facts(head, title, base) | {
        "repo": repo,
        "run": run,
        "measured": found,
        "tuned": tuned,
        "certificate": certified,
        "licence": terms,
        "papers": papers_of(head.settings, run),
    }
    return f"---\n{data.to_yaml(original_order=ORDER)}\n---\n\n{_rendered(facts)}"


# What belongs to this head


def _measured(head: DraftHead, evaluation: Mapping[str, Any], name: str | None) -> Measured:
    """The evaluation, with what it calls this head; ValueError where it is of others."""
    found = evaluation_of(evaluation)
    found = found.model_copy(update={"files": tuple(map(shown_name, found.files))})
    asked = None if name is None else plain(name)
    names = [n for n in found.heads if _is_of(head, found, n) and n == (asked or n)]
    if len(names) == 1:
        measured = Measured(found, names[0])
        if not any(measured.own(place) for place in found.cells):
            raise ValueError(f"the evaluation: head {names[0]!r} drafted nothing in it")
        return measured
    known = tables.listed([f"{clean(n)!r} ({h.type})" for n, h in found.heads.items()]) or "no head"
    if names:
        raise ValueError(f"the evaluation has {known}: say which of them this head is called there")
    raise ValueError(
        f"the evaluation is of {known}, and not of this {head.settings.type} head for "
        f"{head.contract.target!r}{f' as {name!r}' if name else ''}: evaluate this one"
    )


def _is_of(head: DraftHead, found: Evaluation, name: str) -> bool:
    """Whether what was evaluated under a name can be this head."""
    seen, mine = found.heads[name], head.contract.model_dump(mode="json")
    weights = sum(p.numel() for p in head.parameters())
    if (seen.type, seen.parameters) != (head.settings.type, weights):
        return False
    if seen.fingerprint is not None and seen.fingerprint != fingerprint(head):
        return False
    pairs = {key: (mine[key], seen.contract.get(key)) for key in COMPARED}
    return all(a == b or (key in OPTIONAL and None in (a, b)) for key, (a, b) in pairs.items())


def _certified(head: DraftHead, certificate: Mapping[str, Any]) -> Certificate:
    found, contract = certificate_of(certificate), head.contract
    same_target = found.target.split(" as adapted")[0] == contract.target
    same_weights = found.fingerprint in (None, fingerprint(head))
    if not (found.type == head.settings.type and same_target and same_weights):
        raise ValueError(
            f"the certificate is of another head ({found.type}, for {found.target!r}) "
            f"than this one ({head.settings.type}, for {contract.target!r}): certify this one"
        )
    return found


# Metadata


def _metadata(
    head: DraftHead,
    title: str,
    base: str | None,
    licence: Licence,
    run: RunFacts | None,
    found: Measured | None,
) -> ModelCardData:
    tags = ["drafthead", "speculative-decoding", "draft-head", head.settings.type]
    tags.append(method_of(head.settings).tag)
    datasets = [source.dataset for source in run.sources if source.dataset] if run else []
    results = _results(found) if found is not None else []
    return ModelCardData(
        base_model=base,
        base_model_relation=RELATION if base else None,
        library_name="drafthead",
        pipeline_tag="text-generation",
        license=licence.id,
        license_name=licence.name,
        license_link=licence.link,
        language=(found.languages if found is not None else None) or None,
        tags=tags,
        datasets=datasets or None,
        model_name=title if results else None,
        eval_results=results or None,
    )


def _results(found: Measured) -> list[EvalResult]:
    """Tau and speed-up of the head's fastest shape at each temperature and batch."""
    results = []
    for place in found.evaluation.cells:
        if (best := found.best(place)) is None:
            continue
        name, record = best
        for kind, what, value, interval in (
            ("tau", "tokens a pass of the target", record.tau, record.tau_interval),
            ("speedup", "times plain decoding", record.speedup, record.speedup_interval),
        ):
            ends = [round(end, 3) for end in interval or () if end is not None]
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type="custom",
                    dataset_name=tables.listed([*map(clean, found.evaluation.files)]),
                    # The Hub tells results apart by task, data set and this.
                    dataset_config=str(place),
                    metric_type=kind,
                    metric_name=f"{kind}, {what} ({found.called(name)})",
                    metric_value=round(value or 0.0, 3),
                    metric_args={"interval_95": ends} if len(ends) == 2 else None,
                )
            )
    return results


# Text


def _facts(head: DraftHead, title: str, base: str | None) -> dict[str, Any]:
    """What the template asks of the head itself."""
    contract = head.contract
    known, target = KNOWN.get(contract.fingerprint or ""), base or contract.target
    option, served = (known.option, known.folder) if known else (_shell(target), _shell(target))
    return {
        "title": title,
        "head": head,
        "contract": contract,
        "method": method_of(head.settings),
        "weights": sum(p.numel() for p in head.parameters()),
        "dtype": str(head.dtype).removeprefix("torch."),
        "inner": [str(layer) for layer in contract.layers if layer != LAST],
        "last": LAST in contract.layers,
        "base": base,
        "target": target,
        "known": known,
        "option": option,
        "engines": engines(head, title, option, served),
    }


def _rendered(facts: Mapping[str, Any]) -> str:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "cell": _cell,
        "coded": lambda names: tables.listed([f"`{clean(name)}`" for name in names]),
        "counted": tables.counted,
        "grouped": "{:,}".format,
        "large": tables.large,
        "line": clean,
        "listed": tables.listed,
        "machine": machine,
        "number": tables.number,
        "shown": shown_name,
        "yaml": _yaml,
    }
    package = {"version": version("drafthead"), "python": metadata("drafthead")["Requires-Python"]}
    made = {"speeds": tables.speeds, "details": tables.details}
    template = (files("drafthead.heads") / "card.md.j2").read_text(encoding="utf-8")
    rendered = environment.from_string(template).render(**facts, **package, **made)
    return re.sub(r"\n{3,}", "\n\n", rendered).strip() + "\n"


def _slug(head: DraftHead) -> str:
    """A name for a head that has no repository."""
    target = re.sub(r"[^\w.-]+", "-", head.contract.target.split("/")[-1]).strip("-.")
    return f"{target or 'target'}-{method_of(head.settings).tag}"


def _yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        dict(settings), sort_keys=False, default_flow_style=None, width=100
    ).strip()


def _shell(name: str) -> str:
    """A name as a word of a command."""
    return shlex.quote(" ".join(name.split()))


def _cell(value: str) -> str:
    """As a cell of a table; what is no code of ours may look like a link or an escape."""
    escaped = value if "`" in value else value.replace("\\", "\\\\").replace("[", "\\[")
    return escaped.replace("|", "\\|")
