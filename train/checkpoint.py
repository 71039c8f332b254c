"""Checkpoints of our own: one safetensors file with everything an exact continuation needs.

Tensors: `head.NAME` (fp32 weights), `exp_avg.NAME`, `exp_avg_sq.NAME` (whole, by parameter name),
so another number of ranks or another backend can go on. The small facts (step, place in the data,
best, contract) are JSON in the file's metadata: one file is replaced at once, so a checkpoint is
never torn. Randomness needs no state: every micro-batch seeds itself from (seed, step, its place in
the step). It knows no loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafthead.data.files import replace_durably
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import Contract

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be written or does not belong to this run; one line."""


@dataclass
class LoopState:
    """Where a run is: all that the loop carries from one optimiser step to the next."""

    step: int = 0
    """Optimiser steps behind, skipped ones included."""
    epoch: int = 0
    position: int = 0
    """Micro-batches of this epoch, over all ranks, that complete steps have used."""
    seconds: float = 0.0
    """Wall-clock time over all sittings."""
    positions: int = 0
    """Token positions trained on, over all ranks, without padding."""
    skipped: int = 0
    skipped_in_row: int = 0
    best_tau: float | None = None
    """Best held-out simulated tau."""
    best_step: int | None = None
    evaluated: int | None = None
    """Step of the last complete held-out evaluation."""
    group: int | None = None
    """Micro-batches of one optimiser step, over all ranks, when last a step was made."""


@dataclass(frozen=True)
class Checkpoint:
    """What is written and read; tensors live on the CPU."""

    state: LoopState
    weights: dict[str, Tensor]
    identity: dict[str, str]
    """Hashes of the parts of the config that must not change (RunConfig.identity)."""
    contract: Contract
    moments: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    """Updates the optimiser has made: its own step count."""

    def check(self, identity: Mapping[str, str], contract: Contract, path: Path) -> None:
        """Refuse to go on with another target, data or head; the message names which."""
        _check_identity(self.identity, identity, path)
        self.contract.check(contract)


def head_weights(head: nn.Module) -> dict[str, Tensor]:
    """A copy of the head's own tensors on the CPU, each once: borrowed ones are not among them."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach().cpu().clone().contiguous()
    return weights


def load_weights(head: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights made by `head_weights` back; CheckpointError unless names and shapes agree."""
    own = head.state_dict()
    missing = head_weights(head).keys() ^ weights.keys()
    wrong = [n for n in weights.keys() & own.keys() if own[n].shape != weights[n].shape]
    if missing or wrong:
        raise CheckpointError(f"checkpoint and head differ in {sorted({*missing, *wrong})[0]!r}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write, read back, compare, and only then take the old file's place.

    Raises CheckpointError for weights that are not finite, OSError for a folder that cannot be
    written; the checkpoint that was there stays whole in both cases.
    """
    tensors = {f"head.{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= checkpoint.moments
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise CheckpointError(f"{path}: {bad[0]} is not finite; nothing was saved")
    facts = {
        "format": FORMAT,
        "state": asdict(checkpoint.state),
        "identity": checkpoint.identity,
        "contract": checkpoint.contract.model_dump(mode="json"),
        "updates": checkpoint.updates,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, temporary, metadata={"drafthead": json.dumps(facts)})
        _compare(temporary, tensors)
        replace_durably(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_settings(path: Path, identity: Mapping[str, str]) -> None:
    """Refuse a checkpoint made with other settings, before anything is loaded for it."""
    _check_identity(_read_facts(path)["identity"], identity, path)


def _check_identity(kept: Mapping[str, str], identity: Mapping[str, str], path: Path) -> None:
    changed = [part for part, value in identity.items() if kept.get(part) != value]
    if changed:
        raise CheckpointError(
            f"{path}: was made with other settings of {', '.join(changed)}; "
            "resume with the same ones, or start anew with another `out`"
        )


def _read_facts(path: Path) -> dict[str, Any]:
    """The small facts of a checkpoint; its tensors are not read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no checkpoint to resume from")
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads((file.metadata() or {})["drafthead"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of drafthead ({error})") from error
    if facts["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {facts['format']}, this version reads {FORMAT}"
        )
    return facts


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; one line says what is wrong with a file that is none."""
    facts, tensors = _read_facts(path), load_file(path)
    heads = {n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")}
    return Checkpoint(
        state=LoopState(**facts["state"]),
        weights=heads,
        identity=facts["identity"],
        contract=Contract.model_validate(facts["contract"]),
        moments={n: t for n, t in tensors.items() if not n.startswith("head.")},
        updates=facts["updates"],
    )


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the head, read it back, compare, and only then take the old one's place (F37).

    Where `folder` is a link, what it points to is replaced.
    """
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{part}") for part in ("tmp", "old"))
    if old.exists() and not folder.exists():  # killed between the two renames below
        old.rename(folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        head.save_pretrained(fresh)
        written = head.export()
        for file in fresh.iterdir():
            file.chmod(fresh.stat().st_mode & 0o666)  # weights come out for their owner only
        read = type(written).from_pretrained(fresh)
        if not same_tensors(head_weights(read), head_weights(written)):
            raise OSError(f"{folder}: read back other weights than were written")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:
        raise OSError(f"{folder}: could not be written ({error})") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bits."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def _compare(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if not same_tensors(load_file(path), tensors):
        raise OSError(
            f"{path}: read back other values than were written; is the disk full or faulty?"
        )
