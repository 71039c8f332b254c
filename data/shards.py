"""One file of hidden states: whole sequences end to end, with the mark of the target they are of.

A shard is a safetensors file. A sequence is named by the digest of its ids and mask, never by its
place, so it can be found by whoever has the same row, and by nobody who has another (F17). This
module knows no folder of shards and no model.

Tensors, of n sequences with P positions together, for a target of width D: `rows` (n, 16) uint8
digests, `offsets` (n + 1,) int64, `ids` (P,) int32, `mask` (P,) bool, `layer.L` (P, D) for each
captured layer L, `last_hidden` (P, D) after the final norm, `top` (P,) int32 and `log_norm` (P,)
fp32: the target's likeliest next token and the log-sum-exp of its logits where the next token is
supervised, else 0. A sequence without any position is one whose states were not finite.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.files import replace_durably

FORMAT = 1
MARK = "drafthead"
"""Key of our facts in a file's metadata."""
DIGEST = 16
"""Bytes of a sequence's name."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEADER_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""What a safetensors header calls them."""


class ShardError(ValueError):
    """A shard that cannot be read as it stands: cut off, longer, or altered. It can be redone."""


class ForeignShardError(ValueError):
    """A sound shard of another target, or made with other settings: it must not be mixed in."""


@dataclass(frozen=True)
class States:
    """What a target says of one sequence of T positions."""

    ids: Tensor
    """(T,) int32"""
    mask: Tensor
    """(T,) bool"""
    layers: dict[int, Tensor]
    """(T, D) by layer id."""
    last_hidden: Tensor
    """(T, D)"""
    top: Tensor
    """(T,) int32"""
    log_norm: Tensor
    """(T,) fp32"""

    @property
    def nbytes(self) -> int:
        parts = (self.ids, self.mask, self.last_hidden, self.top, self.log_norm)
        return sum(part.nbytes for part in (*parts, *self.layers.values()))


@dataclass(frozen=True)
class Seal:
    """What all shards of one store have in common."""

    key: str
    """Names the target, the settings and the format; only equal ones are read together."""
    target: str
    fingerprint: str
    layers: tuple[int, ...]
    width: int
    dtype: torch.dtype


def digest_of(ids: Sequence[int], mask: Sequence[bool]) -> bytes:
    """Name a sequence by its content."""
    content = array("i", ids).tobytes() + bytes(mask)
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def write_shard(path: Path, sequences: Mapping[bytes, States | None], seal: Seal) -> None:
    """Write a shard that is whole or not there, its checksum inside; None is a dropped sequence.

    Raises OSError with one line; on a full disk its errno is ENOSPC, and nothing is left behind.
    """
    tensors = _tensors(sequences, seal)
    facts = {
        "format": FORMAT,
        "key": seal.key,
        "target": seal.target,
        "fingerprint": seal.fingerprint,
        "sha256": _checksum(tensors),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # As one entry: of several, safetensors writes any first, and equal states must give equal
        # files.
        save_file(tensors, temporary, metadata={MARK: json.dumps(facts, sort_keys=True)})
        temporary.chmod(path.parent.stat().st_mode & 0o666)  # it comes out for its owner only
        replace_durably(temporary, path)
    except SafetensorError as error:
        if "os error 28" in str(error) or "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(f"{path}: could not be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _tensors(sequences: Mapping[bytes, States | None], seal: Seal) -> dict[str, Tensor]:
    kept = [states for states in sequences.values() if states is not None]
    lengths = [0 if states is None else len(states.ids) for states in sequences.values()]

    def joined(parts: list[Tensor], dtype: torch.dtype, *width: int) -> Tensor:
        return torch.cat([torch.empty(0, *width, dtype=dtype), *parts])

    wide = seal.dtype, seal.width
    names = torch.frombuffer(bytearray(b"".join(sequences)), dtype=torch.uint8)
    return {
        "rows": names.view(-1, DIGEST),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "ids": joined([s.ids for s in kept], torch.int32),
        "mask": joined([s.mask for s in kept], torch.bool),
        "last_hidden": joined([s.last_hidden for s in kept], *wide),
        "top": joined([s.top for s in kept], torch.int32),
        "log_norm": joined([s.log_norm for s in kept], torch.float32),
        **{f"layer.{i}": joined([s.layers[i] for s in kept], *wide) for i in seal.layers},
    }


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hash names and bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()  # of no dtypes or shapes: a header is compared by itself
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Shard:
    """A shard on the disk: the index of its sequences. States are mapped, and read when used."""

    def __init__(self, path: Path, seal: Seal) -> None:
        """Check size, mark, header and index; ShardError or ForeignShardError name the file."""
        header = _header(path)
        self.path = path
        self.bytes = path.stat().st_size
        facts = _facts(header)
        if facts.get("format") != FORMAT:
            raise ForeignShardError(
                f"{path}: not a shard of states of format {FORMAT}, which this version reads; move "
                "it away"
            )
        if facts.get("key") != seal.key:
            raise ForeignShardError(_foreign(path, facts, seal))
        self.sha256: str = facts["sha256"]
        if not _as_laid_out(header, seal):
            raise ShardError(f"{path}: its header does not fit its store")
        with opened(path) as file:
            self.offsets: list[int] = file.get_tensor("offsets").tolist()
            names = file.get_tensor("rows").numpy().tobytes()
        self.digests = [names[i : i + DIGEST] for i in range(0, len(names), DIGEST)]
        if self.offsets != sorted(self.offsets) or self.offsets[-1] != header["ids"]["shape"][0]:
            raise ShardError(f"{path}: its index does not fit its states")

    @property
    def positions(self) -> int:
        return self.offsets[-1]

    def verify(self) -> None:
        """Compare the checksum of every byte (some 0.6 GB a second); ShardError if it differs."""
        with opened(self.path) as file:
            found = _checksum({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        if found != self.sha256:
            raise ShardError(f"{self.path}: its checksum differs, so it was altered or decayed")

    def read(self, file: Any, number: int, layers: Sequence[int]) -> States | None:
        """One sequence out of the open file, with these layers only, mapped and not yet read.

        None where it was dropped, because its states were not finite. ShardError where the ids and
        mask found there are not the ones that name it.
        """
        start, end = self.offsets[number], self.offsets[number + 1]
        if start == end:
            return None

        def part(name: str) -> Tensor:
            values: Tensor = file.get_slice(name)[start:end]
            return values

        ids, mask = part("ids"), part("mask")
        if digest_of(ids.tolist(), mask.tolist()) != self.digests[number]:
            raise ShardError(f"{self.path}: holds another sequence where its index has this one")
        return States(
            ids=ids,
            mask=mask,
            layers={layer: part(f"layer.{layer}") for layer in layers},
            last_hidden=part("last_hidden"),
            top=part("top"),
            log_norm=part("log_norm"),
        )


def opened(path: Path) -> Any:
    """Map a shard whose size has been checked."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ShardError(f"{path}: not a readable safetensors file ({error})") from error


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, after its size has been compared with it (F20)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ShardError(f"{path}: cut off after {size:,} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [p["data_offsets"][1] for n, p in header.items() if n != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ShardError(f"{path}: not a safetensors file ({error!r})") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        kind = "cut off" if size < expected else "longer than it was written"
        raise ShardError(f"{path}: {kind}: {size:,} bytes, its header says {expected:,}")
    return header


def _as_laid_out(header: Mapping[str, Any], seal: Seal) -> bool:
    """Whether names, dtypes and shapes of all tensors are those that this store's shards have."""
    found = {n: (p["dtype"], p["shape"]) for n, p in header.items() if n != "__metadata__"}
    if not {"rows", "ids"} <= found.keys():
        return False
    rows, positions = found["rows"][1][0], found["ids"][1][0]
    wide = HEADER_NAMES[seal.dtype], [positions, seal.width]
    return found == {
        "rows": ("U8", [rows, DIGEST]),
        "offsets": ("I64", [rows + 1]),
        "ids": ("I32", [positions]),
        "mask": ("BOOL", [positions]),
        "last_hidden": wide,
        "top": ("I32", [positions]),
        "log_norm": ("F32", [positions]),
        **{f"layer.{layer}": wide for layer in seal.layers},
    }


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    """What a shard says of itself; nothing where it is none of ours."""
    try:
        found = json.loads(header["__metadata__"][MARK])
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _foreign(path: Path, facts: Mapping[str, Any], seal: Seal) -> str:
    theirs, ours = str(facts.get("fingerprint")), seal.fingerprint
    if theirs != ours:
        return (
            f"{path}: holds states of target {facts.get('target')!r} ({theirs[:12]}…), the store "
            f"those of {seal.target!r} ({ours[:12]}…); two targets never mix: move it away"
        )
    return (
        f"{path}: was made of target {seal.target!r} with other settings (layers, dtype, template "
        "or tokenizer) than the store; move it away"
    )
