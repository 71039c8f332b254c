"""Write the target's states of all rows of a config into a store, to train from without the target.

The micro-batches are those of training, cut into groups; each group becomes one shard, whose number
and content follow from the config alone. So a run that was killed is gone on with by the same
command, a shard that is bad is made again and no other is touched, ranks share the groups, and what
comes out is the same however often it was interrupted and however many ranks there were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from drafthead.data.batches import plan
from drafthead.data.chat import Row
from drafthead.data.files import held
from drafthead.data.manifest import StoreError
from drafthead.data.shards import DTYPES, States
from drafthead.data.states import (
    ShardWriter,
    StateStore,
    begin,
    bytes_of,
    free_number,
    shard_path,
    shard_paths,
    shard_size,
)
from drafthead.heads.contract import check_layers, inner_layers
from drafthead.train.assemble import head_layers, read_texts, target_folder
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.outline import outline_of
from drafthead.train.sources import (
    Texts,
    check_size,
    forecast,
    manifest_of,
    online,
    refuse_others,
)
from drafthead.train.stored import sequences_of
from drafthead.train.teacher import OnlineFeatures

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extracted:
    """What came out, over all ranks and sittings unless it says otherwise."""

    out: Path
    rows: int
    positions: int
    dropped: int
    """Rows whose states were not finite."""
    shards: int
    bytes: int
    forecast_bytes: int
    seconds: float
    """Of this sitting, the target's loading not included."""
    new_positions: int
    """Of this sitting."""

    @property
    def positions_per_s(self) -> float:
        return self.new_positions / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Work:
    """All that is to be stored: unique rows, their micro-batches, and the groups of these."""

    digests: list[bytes]
    rows: list[Row]
    batches: list[tuple[int, ...]]
    groups: list[list[int]]
    """Numbers of micro-batches; each group becomes one shard."""

    def positions(self, group: Sequence[int]) -> int:
        return sum(len(self.rows[row].ids) for index in group for row in self.batches[index])


def extract(
    config: RunConfig,
    out: Path,
    layers: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extracted:
    """Fill the store `out`, or go on with it; `layers` are stored beside those the head reads.

    `progress` is told positions: done, of all. Every rank of a launch calls it. Raises ValueError
    or OSError; nothing that is written is lost by it, nor by Ctrl-C.
    """
    engine = Engine(config)
    try:
        return _extract(config, out, layers, progress, engine)
    finally:
        engine.close()


def _extract(
    config: RunConfig,
    out: Path,
    layers: Sequence[int],
    progress: Callable[[int, int], None],
    engine: Engine,
) -> Extracted:
    outline = outline_of(target_folder(config.target, engine), config.target.revision)
    wanted = inner_layers(sorted({*head_layers(config, outline.num_layers), *layers}))
    kept = check_layers(wanted, outline.num_layers) if wanted else ()
    texts = read_texts(config.data, outline)
    refuse_others(out, texts, kept)
    rows = list(texts.unique.values())
    size = forecast(config.data, outline, rows, kept)
    logger.info("the states come to %.1f MB in %s (forecast)", size / 1e6, out)
    stored = sum(path.stat().st_size for path in shard_paths(out))
    check_size(config.data, out, max(0, size - stored), size)
    taught = online(config, engine, outline, kept)
    assert taught.target is not None, "it is online"
    manifest = manifest_of(config.data, texts, taught)
    itemsize = DTYPES[config.data.states_dtype].itemsize
    work = _work(config, texts, lambda n: bytes_of(n, len(kept), outline.width, itemsize))
    out.mkdir(parents=True, exist_ok=True)
    with held(out) if engine.is_main else nullcontext():
        if engine.is_main:
            begin(out, manifest, verify=True)
        engine.wait()
        store = StateStore(out, mending=True)
        engine.wait()  # so that all see the same before anybody writes
        dtype = DTYPES[config.data.states_dtype]
        source = OnlineFeatures(taught.target, work.rows, work.batches, kept, dtype)
        since = time.perf_counter()
        made = _Extraction(engine, store, work, source, progress).run()
        engine.wait()
        seconds = time.perf_counter() - since
        if engine.is_main and not store.complete(work.digests):
            raise StoreError(f"{out}: shards have gone while it was written; run it again")
        engine.wait()
        store = StateStore(out)
    return Extracted(
        out=out,
        rows=store.manifest.rows,
        positions=store.manifest.positions,
        dropped=store.manifest.dropped,
        shards=len(store.manifest.shards),
        bytes=sum(entry.bytes for entry in store.manifest.shards),
        forecast_bytes=size,
        seconds=seconds,
        new_positions=made,
    )


def _work(config: RunConfig, texts: Texts, size_of: Callable[[int], int]) -> Work:
    digests, rows = list(texts.unique), list(texts.unique.values())
    training = config.training
    lengths = [len(row.ids) for row in rows]
    batches = plan(lengths, training.tokens_per_batch, training.seed)
    most = shard_size(size_of(sum(lengths)))
    groups: list[list[int]] = []
    room = 0
    for index, batch in enumerate(batches):
        size = size_of(sum(lengths[row] for row in batch))
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= size
    return Work(digests, rows, batches, groups)


class _Extraction:
    """One rank's part of the work."""

    def __init__(
        self,
        engine: Engine,
        store: StateStore,
        work: Work,
        source: OnlineFeatures,
        progress: Callable[[int, int], None],
    ) -> None:
        self.engine, self.store, self.work, self.source = engine, store, work, source
        self.progress = progress

    def run(self) -> int:
        """Write what is missing; positions that the target was run on, over all ranks."""
        work = self.work
        todo = [n for n, group in enumerate(work.groups) if self.store.missing(self.names(group))]
        total = sum(work.positions(group) for group in work.groups)
        new = sum(work.positions(work.groups[n]) for n in todo)
        done = total - new
        if done:
            logger.info("%d of %d positions are there already", done, total)
        mine = todo[self.engine.rank :: self.engine.world]
        writer = ShardWriter(self.store)
        try:
            with self.engine.together():
                for number in mine:
                    found: dict[bytes, States | None] = {}
                    for index in work.groups[number]:
                        found |= self.states(index)
                        # Ranks have about the same speed: one tells for all.
                        done += work.positions([index]) * self.engine.world
                        self.progress(min(done, total), total)
                    writer.wait()  # the last shard's number is taken only when it is on the disk
                    writer.write(self.number(number), found)
                writer.wait()
        finally:
            writer.close()
        return new

    def names(self, group: Sequence[int]) -> Iterator[bytes]:
        for index in group:
            yield from (self.work.digests[row] for row in self.work.batches[index])

    def states(self, index: int) -> dict[bytes, States | None]:
        """The states of a micro-batch that are not stored yet."""
        taught = self.source.taught(index, normalise=True)
        found = sequences_of(taught, self.source.members(index), self.source.layers)
        pairs = zip(self.names([index]), found, strict=True)
        return {digest: states for digest, states in pairs if digest not in self.store}

    def number(self, group: int) -> int:
        """The group's own number, unless a store filled by training has given it to other rows."""
        folder = self.store.folder
        if not shard_path(folder, group).exists():
            return group
        engine = self.engine
        return free_number(folder, len(self.work.groups), engine.rank, engine.world)
