"""The manifest of a store of hidden states: what target, which rows, how they are stored.

Everything that decides the stored numbers is in it, and is compared wherever a store is used. It
knows no contract class: a contract is a plain dictionary here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from drafthead.data.files import write_atomically
from drafthead.data.shards import DTYPES, FORMAT, Seal

NORM = "last_hidden is post-norm: what the output rows see, after the target's final norm"
LAYER_IDS = "layer.L is the residual stream entering layer L, counted from 0; pre-norm"
NAMES = ("target", "revision")
"""Fields of a contract that say what a target is called, not what it is."""
SEALING = ("target", "fingerprint", "layers", "hidden_size")
"""Fields of a contract that a store cannot be read without."""
COMPARED = {
    "format": "the format",
    "dtype": "the dtype of the states",
    "mask_policy": "the version of the loss masks",
    "asked": "the set of rows (files, template, max_length, positions)",
}
"""What two stores are compared in beside their contracts, as messages call it."""


class StoreError(ValueError):
    """A store cannot be used for what it is wanted for; one line."""


class ShardEntry(BaseModel):
    """One shard in the manifest of a complete store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    bytes: int
    sha256: str
    rows: int
    positions: int


class Manifest(BaseModel):
    """What a store holds. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    made_by: str
    contract: dict[str, Any]
    """With the target, as `heads.contract.Contract` dumps it; its layers are the store's."""
    norm: str = NORM
    layer_ids: str = LAYER_IDS
    dtype: Literal["bfloat16", "float16", "float32"]
    """Of the stored states. Training reads them in it and casts to what it computes in."""
    borrowed: str
    """Digest of what heads borrow: tells another target by its few tensors that training reads."""
    mask_policy: int
    """Version of the code that makes ids and masks of conversations."""
    data: str
    """Names the files, the template and the settings that the rows were made of."""
    rows: int
    positions: int
    asked: str
    """Digest over the names of all rows that the store is to hold."""
    complete: bool = False
    dropped: int = 0
    """Rows whose states were not finite; counted when complete."""
    shards: tuple[ShardEntry, ...] = ()

    @field_validator("contract")
    @classmethod
    def _has_what_seals(cls, contract: dict[str, Any]) -> dict[str, Any]:
        if lacking := sorted({*SEALING} - contract.keys()):
            raise ValueError(f"has no {lacking[0]}")
        return contract

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.contract["layers"])

    @property
    def seal(self) -> Seal:
        """What each shard must carry."""
        contract = {k: v for k, v in self.contract.items() if k not in NAMES}
        parts = [self.format, contract, self.dtype, self.mask_policy, self.norm]
        return Seal(
            key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
            target=str(self.contract["target"]),
            fingerprint=str(self.contract["fingerprint"]),
            layers=self.layers,
            width=int(self.contract["hidden_size"]),
            dtype=DTYPES[self.dtype],
        )

    def differences(self, other: Manifest) -> list[str]:
        """One line for each fact in which another store would hold other numbers."""
        lines = unlike(other.contract, self.contract)
        lines += unlike(other.model_dump(include={*COMPARED}), self.model_dump(include={*COMPARED}))
        return lines


def unlike(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One line for each fact of `theirs` that is another one in the store."""
    return [
        f"{COMPARED.get(name, name)} is {short(value)}, the store has {short(ours.get(name))}"
        for name, value in theirs.items()
        if name not in NAMES and value != ours.get(name)
    ]


def asked(digests: Iterable[bytes]) -> str:
    """Name a set of rows, whatever their order."""
    return hashlib.sha256(b"".join(sorted(set(digests)))).hexdigest()


def made_by() -> str:
    return f"drafthead {metadata.version('drafthead')}"


def short(value: object) -> str:
    """A value for a message; digests are cut."""
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


def read_manifest(folder: Path) -> Manifest:
    """Read what a folder says of itself; one line says what is wrong with it."""
    path = folder / "manifest.json"
    try:
        found = json.loads(path.read_bytes())
        _check_format(path, found)
        return Manifest.model_validate(found)
    except FileNotFoundError:
        raise StoreError(
            f"data.states: {folder} holds no manifest.json, so no states; "
            "`drafthead extract --out` makes them"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path}: not a manifest of states: {where} {first['msg']}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: not a manifest of states: {error}") from error


def _check_format(path: Path, found: Any) -> None:
    """Refuse another version's manifest as such, whatever keys it has."""
    number = found.get("format", FORMAT) if isinstance(found, dict) else FORMAT
    if number != FORMAT:
        raise StoreError(f"{path}: format {number}, this version reads {FORMAT}; name another one")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / "manifest.json", manifest.model_dump_json(indent=2) + "\n")
