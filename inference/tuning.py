"""What was measured and chosen for a head on one machine: the file `tuning.json`, and its use.

It lies beside the head, or, where a head's folder cannot be written or is the Hub client's, in the
user's cache. It holds for the machine, the dtype, the target and the head that it was measured
with, and is not used for others, which is said once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from drafthead.data.embedded import cache_dir, reference_head
from drafthead.data.files import write_atomically
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import ContractError, fingerprint
from drafthead.inference.costs import Costs
from drafthead.inference.machine import machine
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import TreeShape, parse_shape

logger = logging.getLogger(__name__)

NAME = "tuning.json"
_FORMAT = 1
_TOLD: set[str] = set()
"""Files of which it was said that they are for something else."""


@dataclass(frozen=True)
class Tuning:
    """Shapes by batch size, and what they were chosen by."""

    machine: Mapping[str, Any]
    dtype: str
    target: str | None
    """Fingerprint of the weights; None where they are not held in one process."""
    head: str
    """Fingerprint of the head's weights."""
    shapes: Mapping[int, TreeShape]
    costs: Mapping[int, Costs]
    """With the draft step of the shape that was chosen."""
    measured: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Tokens per second by shape, `off` being plain decoding."""
    gains: Mapping[int, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    """How many times plain decoding that is, and its 95 % interval, None for a single decoding."""
    prompts: int = 0
    temperature: float = 0.0
    clock: str = "wall"
    date: str = ""

    def nearest(self, batch: int) -> int:
        """The batch size to go by: this one or the next larger, where drafts pay less rather than
        more; the largest where all are smaller.
        """
        return min((size for size in self.shapes if size >= batch), default=max(self.shapes))

    def misfits(self, target: Target, head: DraftHead | None) -> list[str]:
        """What of this machine, target or head is not what it was measured with."""
        pairs = {
            "machine": (self.machine, machine(target.device)),
            "dtype": (self.dtype, dtype_of(target)),
            "target": (self.target, fingerprint_of(target)),
            "head": (self.head, None if head is None else fingerprint(head)),
        }
        known = {name: pair for name, pair in pairs.items() if None not in pair}
        return [name for name, (own, here) in known.items() if own != here]


@dataclass(frozen=True)
class Tuned:
    """What to draft with here."""

    shape: TreeShape
    costs: Costs | None
    """None where the batch is larger than any that was measured."""


def tuned(
    folder: Path | None, target: Target, batch: int, head: DraftHead | None = None
) -> Tuned | None:
    """What was chosen for a head's folder (None: of no folder) and a batch on this machine.

    Raises ValueError for a file that is none, or torn.
    """
    if (found := fitting(folder, target, head)) is None:
        return None
    tuning = found[1]
    size = tuning.nearest(batch)
    return Tuned(tuning.shapes[size], tuning.costs[size] if batch <= size else None)


def fitting(
    folder: Path | None, target: Target, head: DraftHead | None = None
) -> tuple[Path, Tuning] | None:
    """The tuning of a head's folder that holds here, and its file; of one that does not it is said
    once. Raises ValueError for a file that is none, or torn.
    """
    misfits: dict[Path, list[str]] = {}
    for path in places(folder):
        if not path.is_file():
            continue
        tuning = read(path)
        if not (lines := tuning.misfits(target, head)):
            return path, tuning
        misfits[path] = lines
    for path, lines in misfits.items():
        if str(path) not in _TOLD:
            _TOLD.add(str(path))
            logger.warning(
                "%s was measured with another %s: not used; `drafthead tune` measures here",
                path,
                " and ".join(lines),
            )
    return None


def folder_of(head: DraftHead) -> Path | None:
    """Where a head was loaded from."""
    name = head.lm.name_or_path if isinstance(head, Sibling) else head.name_or_path
    return Path(name) if name else None


def places(folder: Path | None) -> Iterator[Path]:
    """Where a head's tuning may lie: where it is written here, then beside it or in the cache."""
    if folder is not None:
        yield from dict.fromkeys((place_for(folder), folder / NAME, cached(folder)))


def cached(folder: Path) -> Path:
    """The file in the user's cache for a head whose folder cannot be written."""
    key = hashlib.sha256(str(folder.expanduser().resolve()).encode()).hexdigest()[:12]
    return cache_dir() / "tuning" / f"{folder.name}-{key}.json"


def place_for(folder: Path) -> Path:
    """Where to write a head's tuning: beside it where that is allowed, and neither in the package
    nor in the Hub client's cache, whose folders hold what a repository holds.
    """
    here = folder.expanduser().resolve()
    foreign = (reference_head().parent, Path(constants.HF_HUB_CACHE).resolve())
    inside = any(place in here.parents for place in foreign)
    return folder / NAME if os.access(here, os.W_OK) and not inside else cached(folder)


# The file


def check_place(path: Path) -> None:
    """Refuse to write over a file that is no tuning; ValueError."""
    if path.is_file() and path.stat().st_size:
        try:
            read(path)
        except ValueError as error:
            raise ValueError(f"{path}: is there and no tuning; name another file") from error


def write(tuning: Tuning, path: Path) -> None:
    """Write the file at once, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_dict(tuning), indent=2) + "\n")


def as_dict(tuning: Tuning) -> dict[str, Any]:
    """The file's content."""
    values = {name: getattr(tuning, name) for name in tuning.__dataclass_fields__}
    return values | {
        "format": _FORMAT,
        "machine": dict(tuning.machine),
        "shapes": {str(batch): str(shape) for batch, shape in tuning.shapes.items()},
        "costs": {str(batch): asdict(costs) for batch, costs in tuning.costs.items()},
        "measured": {str(batch): dict(rates) for batch, rates in tuning.measured.items()},
        "gains": {str(batch): dict(gains) for batch, gains in tuning.gains.items()},
    }


def read(path: Path) -> Tuning:
    """Read the file. Raises ValueError, one line, if it is none or of another format."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != _FORMAT:
            raise ValueError(f"not of format {_FORMAT}")
        values["shapes"] = {int(b): parse_shape(text) for b, text in values["shapes"].items()}
        values["costs"] = {int(b): _costs(costs) for b, costs in values["costs"].items()}
        for name in ("measured", "gains"):
            values[name] = {int(b): by_shape for b, by_shape in values[name].items()}
        tuning = Tuning(**values)
        if not tuning.shapes or set(tuning.shapes) != set(tuning.costs):
            raise ValueError("shapes and costs are not of the same batch sizes")
        return tuning
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: no tuning of a head ({error}): delete it, or tune again"
        ) from error


def _costs(values: dict[str, Any]) -> Costs:
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    return Costs(**fields)


# What it holds for


def dtype_of(target: Target) -> str:
    """The dtype's name."""
    return str(target.dtype).removeprefix("torch.")


def fingerprint_of(target: Target) -> str | None:
    """Of the target's weights; None where they are not held in this process."""
    try:
        return fingerprint(target.model)
    except ContractError:
        return None
