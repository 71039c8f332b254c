"""What a card tells of the training run that left a head: its files, and no path in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

CONFIG, RESULT, CIRCUMSTANCES = "config.yaml", "result.json", "run.json"

LEFT_OUT = {"data": ("states", "max_bytes", "check_space"), "training": ("feature_bytes",)}
"""Where things lay and how they were held: nothing that a head's weights depend on."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class DataUsed(_Read):
    train: tuple[str, ...]
    heldout: tuple[str, ...] = ()
    max_length: int
    positions: int | None = None


class HeadUsed(_Read):
    type: str
    unroll_steps: int


class OptimiserUsed(_Read):
    lr: float


class ScheduleUsed(_Read):
    kind: str


class TrainingUsed(_Read):
    loss: str = "soft_ce"
    position_weights: str = "decay"


class Used(_Read):
    """Of a run's settings, those that a card has words for."""

    data: DataUsed
    head: HeadUsed
    optimiser: OptimiserUsed
    schedule: ScheduleUsed
    training: TrainingUsed


class Result(_Read):
    """What result.json says of a run that ended."""

    steps: int
    positions: int
    seconds: float
    best_step: int | None = None
    simulated_tau: float | None = None
    agreement: dict[str, Any] | None = None


@dataclass(frozen=True)
class Source:
    """Training conversations, and how their answers were made where the rows say so."""

    name: str
    made: Mapping[str, Any] | None = None

    @property
    def dataset(self) -> str | None:
        """The Hub's id of a data set; None for what is none."""
        if not self.name.startswith("hub:"):
            return None
        parts = self.name.removeprefix("hub:").split("@")[0].split(":")[0].split("/")
        return "/".join(parts[:2])


@dataclass(frozen=True)
class RunFacts:
    """A training run as its folder tells of it."""

    used: Used
    settings: Mapping[str, Any]
    """All that the head depends on, by group."""
    sources: tuple[Source, ...]
    result: Result | None = None
    """None for a run that did not end."""
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    """What run.json holds."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the folder of a run; ValueError where it is none or one of its files is damaged."""
        path = folder / CONFIG
        if not path.is_file():
            raise ValueError(f"{folder}: no {CONFIG}; give the folder of a training run (its out=)")
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            used = Used.model_validate(config)
        except (yaml.YAMLError, ValidationError, ValueError, OSError) as error:
            raise ValueError(f"{path}: no settings of a training run ({_told(error)})") from None
        return cls(
            used=used,
            settings=_settings(config),
            sources=tuple(Source(shown_name(name), _made(name)) for name in used.data.train),
            result=_result(folder / RESULT),
            circumstances=_json(folder / CIRCUMSTANCES),
        )

    @classmethod
    def beside(cls, head: Path) -> Self | None:
        """The run whose folder holds this head as `head/`; None where there is none."""
        head = head.resolve()
        is_runs = head.name == "head" and (head.parent / CONFIG).is_file()
        return cls.read(head.parent) if is_runs else None

    @property
    def hardware(self) -> str | None:
        """Where it ran, in words; None where the run has not written it down."""
        found = self.circumstances.get("machine")
        return machine(found) if isinstance(found, dict) else None


def machine(found: Mapping[str, Any]) -> str:
    """A machine in words: device, processor, and how much of it."""
    known = {name: value for name, value in found.items() if value}
    device, words = str(known.pop("device", "a machine")), {"cores": "core", "threads": "thread"}
    parts = [
        f"{value} {words[name]}{'s' * (value != 1)}" if name in words else str(value)
        for name, value in known.items()
    ]
    return f"{device} ({', '.join(parts)})" if parts else device


def shown_name(text: str) -> str:
    """A source as others can know it: its last part where it is a path; `mine` of `mine/head`."""
    if text.startswith(("hub:", "samples/")) or not {"/", "\\"} & set(text):
        return text
    parts = [part for part in text.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    if len(parts) > 1 and parts[-1] == "head":
        return parts[-2]
    return parts[-1] if parts else text


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of settings, without where things lay, and files by name."""
    found: dict[str, Any] = {}
    for group in ("data", "head", "optimiser", "schedule", "training"):
        values = dict(config.get(group) or {})
        for name in LEFT_OUT.get(group, ()):
            values.pop(name, None)
        found[group] = {name: _without_paths(value) for name, value in values.items()}
    return found


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return shown_name(value)
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    return value


def _made(name: str) -> dict[str, Any] | None:
    """How the first row of a file of conversations says it was answered; None if it does not."""
    path = Path(name)
    if not name.endswith((".jsonl", ".jsonl.gz")) or not path.is_file():
        return None
    reader = gzip.open if name.endswith(".gz") else open
    try:
        with reader(path, "rt", encoding="utf-8") as lines:
            found = json.loads(next(lines))["made"]
        return {**found, "target": shown_name(str(found["target"]))}
    except (OSError, EOFError, ValueError, KeyError, TypeError, StopIteration):
        return None


def _result(path: Path) -> Result | None:
    found = _json(path)
    try:
        return Result.model_validate(found) if found else None
    except ValidationError as error:
        raise ValueError(f"{path}: {_told(error)}; mend it, or move it away") from None


def _told(error: Exception) -> str:
    """What is wrong, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); mend it, or move it away") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no JSON object; mend it, or move it away")
    return found
