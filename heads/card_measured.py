"""What a card reads of an evaluation, a certificate and a tuning: checked, and in one-line errors.

The files are JSON that was written elsewhere, perhaps edited, perhaps another file of that name.
Nothing else of them is read, so no path in them can reach a card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafthead.heads.published import CERTIFICATE, EVALUATION, TUNING

Ends = tuple[float | None, float | None] | None
"""An interval; None where there is none, or at an end that is no number."""
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]


class _Read(BaseModel):
    """Keys that a card has no use for are let be; those it has are of the right kind."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Same(_Read):
    """How many texts equal plain decoding's."""

    equal: int
    of: int
    dtype: str | None = None
    largest_gap: float | None = None


class Group(_Read):
    """Figures of some of the prompts."""

    prompts: int
    tau: Positive
    tau_interval: Ends
    speedup: Positive
    speedup_interval: Ends


class Record(_Read):
    """One drafter at one temperature and batch; plain decoding's has no tau."""

    tokens_per_s: Positive
    tau: Positive | None = None
    tau_interval: Ends = None
    speedup: Positive = 1.0
    speedup_interval: Ends = None
    cpu_speedup: Positive = 1.0
    survival: tuple[Share, ...] = ()
    survival_interval: tuple[Ends, ...] | None = ()
    conditional: tuple[Share | None, ...] = ()
    conditional_interval: tuple[Ends, ...] | None = ()
    by_category: dict[str, Group | None] = {}
    by_language: dict[str, Group | None] = {}
    identical: Same | None = None
    agreement: Same | None = None


class Place(_Read):
    """All drafters at one temperature and batch."""

    temperature: Positive
    batch: int
    records: dict[str, Record]


class Drafter(_Read):
    """A head or sibling that was measured."""

    type: str
    parameters: int
    contract: dict[str, Any]
    fingerprint: str | None = None
    """Of its weights, where the evaluation says so."""


class TargetSeen(_Read):
    name: str
    dtype: str


class SettingsSeen(_Read):
    rule: str
    top_p: float = 1.0
    top_k: int = 0


class Agreement(_Read):
    """A chain's simulated tau and its decoded one."""

    tau: Positive
    decoded_tau: Positive
    agrees: bool


class Evaluation(_Read):
    """`evaluation.json` as `drafthead evaluate` writes it."""

    target: TargetSeen
    heads: dict[str, Drafter]
    prompts: int
    turns: int
    files: tuple[str, ...]
    new_tokens: int
    settings: SettingsSeen
    trees: tuple[str, ...] = ()
    repeats: int = 1
    failed: tuple[dict[str, Any], ...] = ()
    skipped: dict[str, int] = {}
    cells: Annotated[tuple[Place, ...], Field(min_length=1)]
    simulated: dict[str, Agreement] = {}
    machine: dict[str, str | int | None]
    versions: dict[str, str] = {}
    lossy: bool


class Check(_Read):
    name: str
    passed: bool
    figure: str | float


class CertifiedHead(_Read):
    type: str
    fingerprint: str | None = None
    """Of its weights, where the certificate says so."""


class CertifiedTarget(_Read):
    name: str


class Dtypes(_Read):
    exact: str
    serving: str


class Certificate(_Read):
    """`certificate.json` as `drafthead certify` writes it."""

    passed: bool
    checks: Annotated[tuple[Check, ...], Field(min_length=1)]
    target: CertifiedTarget
    head: CertifiedHead
    dtypes: Dtypes
    rules: tuple[str, ...]
    versions: dict[str, str] = {}


class Tuned(_Read):
    """`tuning.json` as `drafthead tune` writes it."""

    machine: dict[str, str | int | None]
    dtype: str
    head: str | None = None
    """Fingerprint of the head's weights."""
    shapes: dict[str, str]


LONGEST = 80
"""Characters of a name that a card shows."""

Kind = TypeVar("Kind", bound=_Read)


def evaluation_of(found: Mapping[str, Any], where: str = "the evaluation") -> Evaluation:
    """Check an evaluation; ValueError in one line."""
    if "cells" not in found:
        other = "the held-out figures of a training run" if "simulated_tau" in found else "another"
        raise ValueError(
            f"{where}: has no 'cells' and is {other}, no evaluation: give what "
            "`drafthead evaluate --out DIR` writes there"
        )
    return _checked(Evaluation, found, where, "drafthead evaluate")


def certificate_of(found: Mapping[str, Any], where: str = "the certificate") -> Certificate:
    """Check a certificate; ValueError in one line."""
    certificate = _checked(Certificate, found, where, "drafthead certify")
    if certificate.passed and not all(check.passed for check in certificate.checks):
        raise ValueError(f"{where}: says that it passed, but a check did not: certify again")
    return certificate


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read evaluation.json, or the one in a folder; ValueError where it is none."""
    found, where = _read(path, EVALUATION)
    evaluation_of(found, where)
    return found


def read_certificate(path: Path) -> dict[str, Any]:
    """Read certificate.json, or the one in a folder; ValueError where it is none."""
    found, where = _read(path, CERTIFICATE)
    certificate_of(found, where)
    return found


def read_tuning(folder: Path) -> Tuned | None:
    """What was tuned beside a head; None where nothing was, ValueError where it is damaged."""
    if not (folder / TUNING).exists():
        return None
    found, where = _read(folder, TUNING)
    return _checked(Tuned, found, where, "drafthead tune")


def _read(path: Path, name: str) -> tuple[dict[str, Any], str]:
    file = path / name if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=no_number)
    except FileNotFoundError:
        raise ValueError(f"{file}: not there; give {name} or the folder that holds it") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: is no JSON object, so it is no {name}")
    return found, str(file)


def no_number(name: str) -> None:
    """Refuse NaN and the infinities, which are no JSON: no other reader takes the file."""
    raise ValueError(f"it holds {name}, which is no figure")


def plain(text: Any) -> str:
    """In one line, and without what would be markup in a card."""
    words = str(text).encode(errors="replace").decode()  # names of files need not be Unicode
    return " ".join(words.split()).replace("<", "&lt;").replace("`", "'")


def clean(text: Any) -> str:
    """The same, not too long."""
    words = plain(text)
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def _cleaned(found: Any) -> Any:
    """The same with all its text, which users and models may have chosen, fit to be shown."""
    if isinstance(found, Mapping):
        return {plain(key): _cleaned(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_cleaned(value) for value in found]
    return plain(found) if isinstance(found, str) else found


def _checked(kind: type[Kind], found: Mapping[str, Any], where: str, command: str) -> Kind:
    try:
        # As JSON: there a list stands for a tuple, and text never for a number.
        return kind.model_validate_json(json.dumps(_cleaned(found)))
    except (ValidationError, ValueError, TypeError) as error:
        told = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "as a whole"
            told = f"{place}: {first['msg']}"
        raise ValueError(f"{where}: {told}; make it again with `{command}`") from None
