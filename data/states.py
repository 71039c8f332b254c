"""The store of hidden states: a folder of shards and a manifest that says what they are.

Written once, read by every training that wants these rows of this target: `manifest.json` holds the
contract with the target, the norm convention and dtype of the states, which rows were asked for,
and, when all are there, the list of shards with sizes and checksums. While it is being written, or
after a kill, the shards that are there are valid by themselves, and whoever goes on keeps them.
This module knows no target, no head and no contract class: it compares plain values.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from drafthead.data.manifest import (
    Manifest,
    ShardEntry,
    StoreError,
    asked,
    read_manifest,
    write_manifest,
)
from drafthead.data.shards import (
    DIGEST,
    Shard,
    ShardError,
    States,
    opened,
    write_shard,
)

logger = logging.getLogger(__name__)

RESERVE = 2**30
"""Bytes that stay free on the disk, or a twentieth of it where that is less."""
SHARES = 16
"""Shards that a store is cut into, but for the next two limits."""
SMALLEST_SHARD, LARGEST_SHARD = 2**16, 2**28
PREFIX = "states-"
"""A shard's file name before its number."""
OPEN = 64
"""Most shards that are mapped at once."""


def bytes_of(positions: int, layers: int, width: int, itemsize: int = 2) -> int:
    """Forecast the bytes of so many positions with `layers` captured layers, before anything runs.

    The index and the headers add less than 2 % (see `overhead`).
    """
    states = (layers + 1) * width * itemsize
    return positions * (states + 4 + 1 + 4 + 4)  # ids, mask, top, log_norm


def overhead(rows: int, shards: int, layers: int) -> int:
    """Forecast the bytes of the index (digest, offset) and of the shards' headers."""
    return rows * (DIGEST + 8) + shards * (1000 + 90 * layers)


def shard_size(total: int) -> int:
    """Bytes to collect before a shard is written: what a kill loses at most, and what RAM holds."""
    return min(max(total // SHARES, SMALLEST_SHARD), LARGEST_SHARD)


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold and still keep a reserve (F21): OSError."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    reserve = min(RESERVE, usage.total // 20)
    if needed > usage.free - reserve:
        raise OSError(
            f"{folder}: the states need {needed:,} bytes, the disk has {usage.free:,} free, of "
            f"which {reserve:,} are kept; free some, name another disk, lower data.positions, use "
            "training.features=online, or go ahead with data.check_space=false"
        )


class StateStore:
    """An opened store: where each sequence is."""

    def __init__(self, folder: Path, *, mending: bool = False) -> None:
        """Look through all shards: sizes, headers, marks and indices; only `verify` sums bytes.

        A shard that is cut off or altered is refused by name, or with `mending` put into `bad`, to
        be made again. One of another target is always refused.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.seal = self.manifest.seal
        self.bad: dict[Path, str] = {}
        self.shards: dict[Path, Shard] = {}
        self._places: dict[bytes, tuple[Shard, int]] = {}
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._reading = Lock()
        self._mending = mending
        self.refresh()
        if not mending:
            self._check_listed()

    def refresh(self) -> None:
        """Take in shards that came since; those that went are not noticed."""
        for path in shard_paths(self.folder):
            if path in self.shards or path in self.bad:
                continue
            try:
                self._adopt(Shard(path, self.seal))
            except ShardError as error:
                if not self._mending:
                    raise _repairable(error) from error
                self.bad[path] = str(error)

    def _adopt(self, shard: Shard) -> None:
        self.shards[shard.path] = shard
        for number, digest in enumerate(shard.digests):
            self._places.setdefault(digest, (shard, number))

    def _check_listed(self) -> None:
        for entry in self.manifest.shards:
            shard = self.shards.get(self.folder / entry.file)
            if shard is None or (shard.bytes, shard.sha256) != (entry.bytes, entry.sha256):
                what = "missing" if shard is None else "not the one that the manifest lists"
                raise StoreError(
                    f"{self.folder / entry.file}: {what}; `drafthead extract` makes it again"
                )

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the sequences that are not there, each once."""
        return [digest for digest in dict.fromkeys(digests) if digest not in self._places]

    def read(self, digest: bytes, layers: Sequence[int]) -> States | None:
        """A sequence's states, mapped from the disk; None where it was dropped when written.

        StoreError where the shard turns out to hold another sequence in its place.
        """
        shard, number = self._places[digest]
        with self._reading:
            if shard.path not in self._open:
                self._open[shard.path] = opened(shard.path)
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard.path)
            try:
                return shard.read(self._open[shard.path], number, layers)
            except ShardError as error:
                raise _repairable(error) from error

    def verify(self) -> None:
        """Compare all checksums; those that differ go to `bad` and count as not there."""
        for path, shard in list(self.shards.items()):
            try:
                shard.verify()
            except ShardError as error:
                self.bad[path] = str(error)
                del self.shards[path]
        self._places.clear()
        for shard in self.shards.values():
            self._adopt(shard)

    def remove_bad(self) -> None:
        """Delete shards that cannot be read, and what a kill left of one that was being written."""
        for path, reason in self.bad.items():
            logger.warning("%s; it is made again", reason)
            path.unlink(missing_ok=True)
        self.bad.clear()
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def complete(self, digests: Sequence[bytes]) -> bool:
        """Write the list of shards into the manifest if every row that was asked for is there."""
        assert asked(digests) == self.manifest.asked, "other rows than the store is for"
        self.refresh()
        if self.missing(digests):
            return False
        places = (self._places[digest] for digest in dict.fromkeys(digests))
        dropped = sum(shard.offsets[n] == shard.offsets[n + 1] for shard, n in places)
        entries = tuple(
            ShardEntry(
                file=shard.path.name,
                bytes=shard.bytes,
                sha256=shard.sha256,
                rows=len(shard.digests),
                positions=shard.positions,
            )
            for _, shard in sorted(self.shards.items())
        )
        manifest = self.manifest.model_copy(
            update={"complete": True, "dropped": dropped, "shards": entries}
        )
        if manifest != self.manifest:
            write_manifest(self.folder, manifest)
            self.manifest = manifest
        return True


def begin(folder: Path, manifest: Manifest, *, verify: bool) -> StateStore:
    """Make a store, or take up one that was begun for the same rows of the same target.

    Bad shards are deleted, to be made again; with `verify`, checksums tell them too. Only one
    process may do this at a time. Raises StoreError naming all that differs (F24).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "manifest.json").exists():
        _refuse_other_files(folder)
        write_manifest(folder, manifest)
    before = read_manifest(folder)
    different = before.differences(manifest)
    if different:
        raise StoreError(
            f"{folder}: holds states of target {before.contract['target']!r} that do not go with "
            f"those of {manifest.contract['target']!r}: {'; '.join(different)}; name another folder"
        )
    store = StateStore(folder, mending=True)
    if verify:
        store.verify()
    store.remove_bad()
    if before.complete and store.manifest.shards and len(store.shards) < len(before.shards):
        store.manifest = before.model_copy(update={"complete": False, "shards": ()})
        write_manifest(folder, store.manifest)
    return store


def _repairable(error: ShardError) -> StoreError:
    return StoreError(f"{error}; `drafthead extract` makes it again")


def _refuse_other_files(folder: Path) -> None:
    kept = [path.name for path in folder.iterdir() if not path.name.endswith(".tmp")]
    if kept:
        raise StoreError(
            f"{folder}: holds {kept[0]} but no manifest.json, so it is no store of states; name a "
            "new or empty folder"
        )


class ShardWriter:
    """Writes shards in the background, one at a time, so that the target need not wait for a disk.

    At most two shards are held in memory: the one being written and the one that waits.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")
        self._writing: Future[Path] | None = None

    def write(self, number: int, sequences: Mapping[bytes, States | None]) -> None:
        """Begin to write a shard; waits for the one before, whose failure is raised here."""
        self.wait()
        path = shard_path(self._store.folder, number)
        self._writing = self._pool.submit(self._write, path, dict(sequences))

    def _write(self, path: Path, sequences: Mapping[bytes, States | None]) -> Path:
        write_shard(path, sequences, self._store.seal)
        return path

    def wait(self) -> None:
        """Let the shard that is being written be on the disk, and in the store's index."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(
                    f"{self._store.folder}: the disk is full; what is written stays valid: free "
                    "some space and run the same command again"
                ) from error
            raise
        self._store.refresh()

    def close(self) -> None:
        """End the background thread; what it is writing is still written."""
        self._pool.shutdown()


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{PREFIX}{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """All shards of a folder, in order; copies under other names are none."""
    found = folder.glob(f"{PREFIX}*.safetensors")
    return sorted(path for path in found if path.stem.removeprefix(PREFIX).isdecimal())


def free_number(folder: Path, at_least: int, rank: int, world: int) -> int:
    """A number no shard has, which is this rank's: no other rank picks the same."""
    used = [int(path.stem.removeprefix(PREFIX)) for path in shard_paths(folder)]
    first = max([at_least, *(number + 1 for number in used)])
    return first + (rank - first) % world
