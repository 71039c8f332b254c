"""What tests of stores of states share: whole folders compared, and their sequences."""

from __future__ import annotations

import json
from pathlib import Path

from command import COMMAND
from killing import Job

from drafthead.data.shards import States
from drafthead.data.states import StateStore


def kept_files(folder: Path) -> dict[str, bytes]:
    """The content of every file, hidden ones included."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def all_states(folder: Path, layers: tuple[int, ...]) -> list[States]:
    """Every sequence of a store that was not dropped, the longest first."""
    store = StateStore(folder)
    digests = [digest for shard in store.shards.values() for digest in shard.digests]
    found = [store.read(digest, layers) for digest in digests]
    return sorted((s for s in found if s is not None), key=lambda s: -len(s.ids))


def extraction(config: Path) -> Job:
    """The job of writing a store to the folder `states` below the root."""

    def argv(root: Path) -> list[str]:
        return [*COMMAND, "extract", "--config", str(config), "--out", str(root / "states")]

    return Job(argv, argv, lambda root: kept_files(root / "states"), whole_shards)


def whole_shards(root: Path) -> None:
    """What a kill leaves is nothing, or a store in which every shard is whole."""
    manifest = root / "states" / "manifest.json"
    if manifest.exists():
        json.loads(manifest.read_text())
        store = StateStore(root / "states")
        store.verify()
        assert not store.bad
