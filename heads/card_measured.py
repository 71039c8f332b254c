"""What a card reads of an evaluation, a certificate and a tuning: checked, and in one-line errors.

The files are JSON that was written elsewhere, perhaps edited, perhaps another file of that name.
Nothing else of them is read, so no path in them can reach a card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

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

    @property
    def unsure(self) -> bool:
        """Whether its interval reaches down to plain decoding's speed."""
        low = self.speedup_interval[0] if self.speedup_interval else None
        return low is not None and low <= 1


class Place(_Read):
    """All drafters at one temperature and batch."""

    temperature: Positive
    batch: int
    records: dict[str, Record]

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, batch {self.batch}"


class Drafter(_Read):
    """A head or sibling that was measured."""

    type: str
    parameters: int
    contract: dict[str, Any]
    fingerprint: str | None = None
    """Of its weights, where the evaluation says so."""


class Agreement(_Read):
    """A chain's simulated tau and its decoded one."""

    tau: Positive
    decoded_tau: Positive
    agrees: bool


class Evaluation(_Read):
    """`evaluation.json` as `drafthead evaluate` writes it."""

    dtype: str = Field(validation_alias=AliasPath("target", "dtype"))
    heads: dict[str, Drafter]
    prompts: int
    turns: int
    files: tuple[str, ...]
    new_tokens: int
    rule: str = Field(validation_alias=AliasPath("settings", "rule"))
    top_p: float = Field(1.0, validation_alias=AliasPath("settings", "top_p"))
    top_k: int = Field(0, validation_alias=AliasPath("settings", "top_k"))
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


class Certificate(_Read):
    """`certificate.json` as `drafthead certify` writes it."""

    passed: bool
    checks: Annotated[tuple[Check, ...], Field(min_length=1)]
    target: str = Field(validation_alias=AliasPath("target", "name"))
    type: str = Field(validation_alias=AliasPath("head", "type"))
    fingerprint: str | None = Field(None, validation_alias=AliasPath("head", "fingerprint"))
    """Of the head's weights, where the certificate says so."""
    exact: str = Field(validation_alias=AliasPath("dtypes", "exact"))
    serving: str = Field(validation_alias=AliasPath("dtypes", "serving"))
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
    file = _file(path, EVALUATION)
    found = json_of(file)
    evaluation_of(found, str(file))
    return found


def read_certificate(path: Path) -> dict[str, Any]:
    """Read certificate.json, or the one in a folder; ValueError where it is none."""
    file = _file(path, CERTIFICATE)
    found = json_of(file)
    certificate_of(found, str(file))
    return found


def read_tuning(folder: Path) -> Tuned | None:
    """What was tuned beside a head; None where nothing was, ValueError where it is damaged."""
    file = folder / TUNING
    return _checked(Tuned, json_of(file), str(file), "drafthead tune") if file.exists() else None


def _file(path: Path, name: str) -> Path:
    file = path / name if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{file}: not there; give {name} or the folder that holds it")
    return file


def json_of(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ValueError in one line."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, OSError) as error:
        again = "make it again, or move it away"
        raise ValueError(f"{file}: cannot be read as JSON ({error}); {again}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: is no JSON object; make it again, or move it away")
    return found


def _no_number(name: str) -> None:
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
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {told(error)}; make it again with `{command}`") from None


def told(error: Exception) -> str:
    """What is wrong, in one line: of a model's mistakes the first, with its place."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'as a whole'}: {first['msg']}"
    return " ".join(str(error).split())
