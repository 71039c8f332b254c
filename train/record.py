"""The run directory: what was asked for, what happened, and what came out. It knows no tensors.

config.yaml  run.json  metrics.jsonl  evaluation.json  checkpoints/{last,best}.safetensors  head/
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drafthead.data.files import held, write_atomically
from drafthead.train.config import RunConfig, flat

logger = logging.getLogger(__name__)

PACKAGES = ("drafthead", "torch", "transformers", "accelerate", "deepspeed", "safetensors")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and the small files in it."""

    root: Path

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.root / "checkpoints" / "last.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint of the best held-out simulated tau."""
        return self.root / "checkpoints" / "best.safetensors"

    @property
    def head(self) -> Path:
        return self.root / "head"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.json"

    def start(self, config: RunConfig, resume: bool, machine: Mapping[str, Any]) -> None:
        """Write down what is run, where and with what, once nothing stands against it."""
        settings = config.model_dump(mode="json")
        path = self.root / "config.yaml"
        if resume and path.exists():
            before, now = flat(_settings_in(path)), flat(settings)
            other = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
            if other:
                logger.warning("resumed with other settings than before: %s", ", ".join(other))
        write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(settings)))
        known = _circumstances() | {"machine": dict(machine)}
        write_atomically(self.root / "run.json", json.dumps(known, indent=2) + "\n")
        if not resume:
            self.metrics.unlink(missing_ok=True)

    @contextmanager
    def claimed(self, resume: bool) -> Iterator[None]:
        """Make the folder and keep other runs out of it inside the block.

        Refused are a folder that holds another run, that another process is in or that cannot be
        written, and resuming where there is nothing to resume. A run that is refused leaves no
        empty folder.
        """
        if resume and not self.last.exists():
            raise FileNotFoundError(
                f"out: {self.root} has no checkpoint to resume; run it without --resume"
            )
        new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        with _removed_if_empty(new), held(self.root):
            if not resume and self.last.exists():
                raise FileExistsError(
                    f"out: {self.root} holds a run already; resume it with --resume, "
                    "or name another folder"
                )
            if not os.access(self.root, os.W_OK):
                raise PermissionError(
                    f"out: {self.root} cannot be written; change its permissions, "
                    "or name another folder"
                )
            yield

    def log(self, event: Mapping[str, Any]) -> None:
        """Append one event to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the events of steps that a resumed run makes again, and lines cut off."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        write_atomically(self.metrics, "".join(kept))


@contextmanager
def _removed_if_empty(folders: Sequence[Path]) -> Iterator[None]:
    """Take these folders away again, innermost first, where the block leaves nothing in them."""
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()


def _settings_in(path: Path) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    return dict(found)


def _circumstances() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "git": _git_commit(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _git_commit() -> str | None:
    """Commit of the source tree this runs from; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
