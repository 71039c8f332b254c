"""Decide where the target's states come from, and load the target only if they need it.

Everything that can be refused without the target's weights is refused before they are loaded. It
knows no head but the layers that one reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from drafthead.data.chat import ROWS_VERSION, Row
from drafthead.data.files import held
from drafthead.data.manifest import Manifest, StoreError, asked, made_by, read_manifest, unlike
from drafthead.data.shards import DTYPES, digest_of
from drafthead.data.states import (
    StateStore,
    begin,
    bytes_of,
    check_room,
    overhead,
    shard_size,
)
from drafthead.heads.contract import Contract, inner_layers
from drafthead.inference.target import Target
from drafthead.train.config import DataConfig, RunConfig, TargetConfig
from drafthead.train.engine import Engine
from drafthead.train.outline import Outline, borrowed_mark
from drafthead.train.samples import Sample
from drafthead.train.stored import FillFeatures, Filling, StoredFeatures
from drafthead.train.teacher import Features, OnlineFeatures, choose_features

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """The rows of a run, and what names them."""

    train: list[Row]
    heldout: list[Row]
    content: str
    """Names the files' content and all that makes rows of it."""
    samples: list[Sample] = field(default_factory=list)
    """A few of their prompts, held-out ones where there are any."""

    @cached_property
    def unique(self) -> dict[bytes, Row]:
        """All rows by digest, equal ones once, in the order of the files."""
        return {digest_of(row.ids, row.mask): row for row in [*self.train, *self.heldout]}


@dataclass
class Teacher:
    """The source of a run's teacher features, and what a head needs of the target."""

    contract: Contract
    source: PreTrainedModel | Path
    """What a head borrows from."""
    device: torch.device
    target: Target | None = None
    store: StateStore | None = None
    filling: Filling | None = None
    names: tuple[bytes, ...] = ()
    """The rows that a store being filled is to hold in the end."""
    lock: ExitStack = field(default_factory=ExitStack)

    def features(
        self, config: RunConfig, rows: Sequence[Row], batches: Sequence[tuple[int, ...]]
    ) -> Features:
        """Features of these rows in these micro-batches."""
        layers, training = self.contract.layers, config.training
        if self.target is None:
            assert self.store is not None, "without a target there is a store"
            return StoredFeatures(self.store, rows, batches, layers, self.device)
        if self.filling is not None:
            seal = self.filling.seal
            return FillFeatures(
                OnlineFeatures(self.target, rows, batches, seal.layers, seal.dtype),
                StoredFeatures(self.filling, rows, batches, layers, self.device),
                self.filling,
            )
        online = OnlineFeatures(self.target, rows, batches, layers)
        mode = training.features
        assert mode in ("auto", "memory", "online"), "the others have a store"
        return choose_features(online, mode, training.feature_bytes)

    def settle(self, engine: Engine) -> None:
        """Write what a store that is being filled still holds in memory; all ranks call it."""
        if self.filling is None or self.store is None:
            return
        self.filling.settle()
        engine.wait()
        if engine.is_main and self.store.complete(self.names):
            logger.debug("%s is complete", self.store.folder)

    def close(self) -> None:
        """Let go of a store that was being filled."""
        if self.filling is not None:
            self.filling.close()
        self.lock.close()


def teacher(
    config: RunConfig, engine: Engine, outline: Outline, texts: Texts, layers: tuple[int, ...]
) -> Teacher:
    """Open the store or load the target, as `training.features` says; ValueError or OSError."""
    folder, mode = config.data.states, config.training.features
    if folder is None or mode in ("memory", "online"):
        return online(config, engine, outline, layers)
    if mode == "fill":
        found = StateStore(folder, mending=True) if (folder / "manifest.json").exists() else None
        lacking = list(texts.unique) if found is None else found.missing(texts.unique)
        if lacking:
            return filling(config, engine, outline, texts, layers, lacking)
    return stored(config, engine, outline, texts, layers)


def online(config: RunConfig, engine: Engine, outline: Outline, layers: tuple[int, ...]) -> Teacher:
    """A target that is run."""
    revision = config.target.revision
    target = engine.load_target(outline.name, target_dtype(config.target, engine), revision)
    contract = target.contract(layers, config.data.template_kwargs)
    contract = contract.model_copy(update={"revision": revision})
    return Teacher(contract, target.source, engine.device, target)


def stored(
    config: RunConfig,
    engine: Engine,
    outline: Outline,
    texts: Texts,
    layers: tuple[int, ...],
) -> Teacher:
    """A store that holds every row; the target is not loaded, of its weights what heads borrow."""
    folder = config.data.states
    assert folder is not None, "the caller has looked"
    store = StateStore(folder)
    contract = contract_of(store.manifest, folder)
    different = unlike(outline.facts(config.data.template_kwargs), store.manifest.contract)
    if different:
        raise StoreError(f"data.states: {folder} does not fit: {'; '.join(different)}")
    if absent := [n for n in inner_layers(layers) if n not in contract.layers]:
        raise StoreError(
            f"data.states: {folder} holds layers {list(contract.layers)}, the head also reads "
            f"{absent}; extract them, or set head.layers"
        )
    rows = texts.unique
    if lacking := store.missing(rows):
        state = "is for other rows" if store.manifest.complete else "is not complete"
        raise StoreError(
            f"data.states: {folder} {state}: it lacks {len(lacking)} of {len(rows)} rows (such as "
            f"{rows[lacking[0]].id}); go on with `drafthead extract`, or training.features=fill"
        )
    names = None if not layers else {contract.embedding, contract.output, contract.norm or ""}
    source = outline.files(names)
    if borrowed_mark(source, contract) != store.manifest.borrowed:
        raise StoreError(
            f"data.states: {folder} was made of target {contract.target!r}; the embedding, output "
            f"rows or final norm of {source.name!r} are others"
        )
    logger.info("teacher features: read from %s; the target is not loaded", folder)
    update = {"layers": layers, "revision": config.target.revision}
    return Teacher(contract.model_copy(update=update), source, engine.device, store=store)


def filling(
    config: RunConfig,
    engine: Engine,
    outline: Outline,
    texts: Texts,
    layers: tuple[int, ...],
    lacking: Sequence[bytes],
) -> Teacher:
    """A target that is run for the rows that a store lacks, and a store that takes them in."""
    folder, rows = config.data.states, texts.unique
    assert folder is not None, "the caller has looked"
    kept = store_layers(folder, inner_layers(layers))
    refuse_others(folder, texts, kept)
    needed = forecast(config.data, outline, [rows[digest] for digest in lacking], kept)
    whole = forecast(config.data, outline, list(rows.values()), kept)
    logger.info("teacher features: %.1f MB more go to %s", needed / 1e6, folder)
    check_size(config.data, folder, needed, whole)
    taught = online(config, engine, outline, kept)
    manifest = manifest_of(config.data, texts, taught)
    lock = ExitStack()
    if engine.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        lock.enter_context(held(folder))
        begin(folder, manifest, verify=False)
    engine.wait()
    store = StateStore(folder, mending=True)
    return Teacher(
        contract=taught.contract.model_copy(update={"layers": layers}),
        source=taught.source,
        device=engine.device,
        target=taught.target,
        store=store,
        filling=Filling(store, shard_size(whole), engine.rank, engine.world),
        names=tuple(rows),
        lock=lock,
    )


def target_dtype(config: TargetConfig, engine: Engine) -> str:
    """The dtype name to load the target in; `auto` follows the run's precision."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if engine.bf16 else "float32"


def contract_of(manifest: Manifest, folder: Path) -> Contract:
    """What a store says of its target; one line for a contract of another version."""
    try:
        return Contract.model_validate(manifest.contract)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(
            f"data.states: {folder} was made by {manifest.made_by}, whose contract this version "
            f"does not read: {where}: {first['msg']}; name another folder"
        ) from error


# What a store that is to be written needs


def refuse_others(folder: Path, texts: Texts, layers: tuple[int, ...]) -> None:
    """Refuse a store of other rows or layers before a target is loaded; `begin` compares all."""
    if not (folder / "manifest.json").exists():
        return
    manifest = read_manifest(folder)
    other_layers = manifest.layers != layers
    if other_layers or manifest.asked != asked(texts.unique):
        what = "layers" if other_layers else "rows (files, template, max_length, positions)"
        raise StoreError(
            f"{folder}: is a store of other {what}; name another folder, or use the settings it "
            "was begun with"
        )


def store_layers(folder: Path, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers to store: those wanted, or those of a store begun with these and others."""
    if not (folder / "manifest.json").exists():
        return layers
    begun = read_manifest(folder).layers
    return begun if set(layers) <= set(begun) else layers


def forecast(data: DataConfig, outline: Outline, rows: Sequence[Row], layers: Sequence[int]) -> int:
    """Bytes on the disk of the states of these rows."""
    itemsize = DTYPES[data.states_dtype].itemsize
    positions = sum(len(row.ids) for row in rows)
    states = bytes_of(positions, len(layers), outline.width, itemsize)
    return states + overhead(len(rows), -(-states // shard_size(states)), len(layers))


def check_size(data: DataConfig, folder: Path, needed: int, whole: int) -> None:
    """Refuse a store over the user's cap, or more than the disk has room for (F21)."""
    if data.max_bytes is not None and whole > data.max_bytes:
        raise ValueError(
            f"data.max_bytes: the states come to {whole:,} bytes, {data.max_bytes:,} are allowed; "
            "raise it, lower data.positions, or use training.features=online"
        )
    if data.check_space:
        check_room(folder, needed)


def manifest_of(data: DataConfig, texts: Texts, taught: Teacher) -> Manifest:
    """What a store of these rows of this target says of itself."""
    assert taught.target is not None, "a store is made by a target"
    computed = str(taught.target.dtype).removeprefix("torch.")
    if data.states_dtype == "float16" and computed != "float16":
        logger.warning(
            "data.states_dtype: float16 ends at 65,504, %s does not; rows beyond are dropped",
            computed,
        )
    rows = texts.unique
    return Manifest(
        made_by=made_by(),
        contract=taught.contract.model_dump(mode="json"),
        dtype=data.states_dtype,
        borrowed=borrowed_mark(taught.source, taught.contract),
        mask_policy=ROWS_VERSION,
        data=texts.content,
        rows=len(rows),
        positions=sum(len(row.ids) for row in rows.values()),
        asked=asked(rows),
    )
