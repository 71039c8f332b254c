"""What a card tells of the training run that left a head: its files, and no path in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from drafthead.heads.card_measured import clean, json_of, told

CONFIG, RESULT, CIRCUMSTANCES = "config.yaml", "result.json", "run.json"

LEFT_OUT = {"data": ("states", "max_bytes", "check_space"), "training": ("feature_bytes",)}
"""Where things lay and how they were held: nothing that a head's weights depend on."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Used(_Read):
    """Of a run's settings, those that a card has words for."""

    train: tuple[str, ...] = Field(validation_alias=AliasPath("data", "train"))
    heldout: tuple[str, ...] = Field((), validation_alias=AliasPath("data", "heldout"))
    max_length: int = Field(validation_alias=AliasPath("data", "max_length"))
    positions: int | None = Field(None, validation_alias=AliasPath("data", "positions"))
    head: str = Field(validation_alias=AliasPath("head", "type"))
    unroll_steps: int = Field(validation_alias=AliasPath("head", "unroll_steps"))
    lr: float = Field(validation_alias=AliasPath("optimiser", "lr"))
    schedule: str = Field(validation_alias=AliasPath("schedule", "kind"))
    loss: str = Field("soft_ce", validation_alias=AliasPath("training", "loss"))
    weights: str = Field("decay", validation_alias=AliasPath("training", "position_weights"))


class Served(_Read):
    """How the check at a run's end came out, where it was made."""

    decoded_tau: float | None = None
    simulated_tau: float | None = None
    agrees: bool | None = None
    cause: str | None = None


class Result(_Read):
    """What result.json says of a run that ended."""

    steps: int
    positions: int
    seconds: float
    best_step: int | None = None
    simulated_tau: float | None = None
    agreement: Served | None = None

    @property
    def took(self) -> str:
        minutes = self.seconds / 60
        return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.1f} minutes"


@dataclass(frozen=True)
class Source:
    """Training conversations."""

    name: str
    answered: str | None = None
    """By whom and how, in words, where the rows say so."""

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
    result: Result | None
    """None for a run that did not end."""
    hardware: str | None
    """Where it ran, in words; None where the run has not written it down."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the folder of a run; ValueError where it is none or one of its files is damaged."""
        path = folder / CONFIG
        if not path.is_file():
            raise ValueError(f"{folder}: no {CONFIG}; give the folder of a training run (its out=)")
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            used, settings = Used.model_validate(config), _settings(config)
        except (yaml.YAMLError, ValueError, AttributeError, OSError) as error:
            raise ValueError(f"{path}: no settings of a training run ({told(error)})") from None
        ran = json_of(folder / CIRCUMSTANCES) if (folder / CIRCUMSTANCES).exists() else {}
        found = ran.get("machine")
        return cls(
            used=used,
            settings=settings,
            sources=tuple(Source(shown_name(name), _answered(name)) for name in used.train),
            result=_result(folder / RESULT),
            hardware=machine(found) if isinstance(found, dict) else None,
        )

    @classmethod
    def beside(cls, head: Path) -> Self | None:
        """The run whose folder holds this head as `head/`; None where there is none."""
        head = head.resolve()
        is_runs = head.name == "head" and (head.parent / CONFIG).is_file()
        return cls.read(head.parent) if is_runs else None


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
        values, left = config.get(group) or {}, LEFT_OUT.get(group, ())
        found[group] = {n: _without_paths(v) for n, v in values.items() if n not in left}
    return found


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return shown_name(value)
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    return value


def _answered(name: str) -> str | None:
    """How the first row of a file of conversations says it was answered; None if it does not."""
    path = Path(name)
    if not name.endswith((".jsonl", ".jsonl.gz")) or not path.is_file():
        return None
    reader = gzip.open if name.endswith(".gz") else open
    try:
        with reader(path, "rt", encoding="utf-8") as lines:
            made = json.loads(next(lines))["made"]
        by = clean(shown_name(str(made["target"])))
        keys = ("temperature", "top_p", "top_k", "seed", "dtype")
        known = {key.replace("_", " "): made.get(key) for key in keys}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return f"{by} ({', '.join(f'{k} {clean(v)}' for k, v in known.items() if v is not None)})"


def _result(path: Path) -> Result | None:
    if not path.exists():
        return None
    found = json_of(path)
    try:
        return Result.model_validate(found)
    except ValueError as error:
        raise ValueError(f"{path}: {told(error)}; mend it, or move it away") from None
