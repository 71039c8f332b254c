"""Checkpoint folders of others: read without running anything, written whole or not at all.

Tensors are read from safetensors, or from `.bin` and `.pt` files by torch's weights-only loader,
which builds tensors and refuses every other object. Code that a folder ships is not looked at.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.heads.layouts.fields import dtype_fields
from drafthead.heads.layouts.kinds import check_kinds
from drafthead.heads.layouts.layout import WEIGHTS, Asked, Layout, LayoutError, Stored
from drafthead.heads.layouts.recognise import layout_in

logger = logging.getLogger(__name__)

PICKLED = (".bin", ".pt", ".pth")
INDICES = (f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json")
USUAL = (WEIGHTS, "pytorch_model.bin")


def load_foreign(folder: str | Path, asked: Asked) -> DraftHead:
    """Read a folder that another trainer or engine wrote, as an unbound head.

    Raises ValueError (one line) for a folder that is of no known layout or not clear.
    """
    stored, layout = open_foreign(folder)
    return layout.read(stored, asked)


def open_foreign(folder: str | Path) -> tuple[Stored, Layout]:
    """The first half of `load_foreign`, all that can be told without the target."""
    stored = read_folder(folder)
    check_kinds(stored.config, f"{stored.place}/config.json")
    for name, tensor in stored.tensors.items():
        if tensor.dim() == 0:
            raise LayoutError(f"{stored.place}: {name} is a single number, which no draft head has")
    return stored, layout_in(stored)


def read_folder(folder: str | Path) -> Stored:
    """Config and tensors of a folder; ValueError (one line) names the file that is wrong."""
    folder = Path(folder)
    config = _json(folder / "config.json")
    names = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        more = _tensors(folder / name)
        if twice := sorted(tensors.keys() & more.keys()):
            raise LayoutError(f"{folder}: {twice[0]} is in {name} and in a file before it")
        tensors |= more
    unread = [p.name for p in _candidates(folder) if p.name not in names]
    if unread:
        logger.warning("%s: %s not read; tensors are from %s", folder, unread, names)
    return Stored(config, tensors, names[0] if len(names) == 1 else WEIGHTS, str(folder))


def write_folder(stored: Stored, out: str | Path) -> Path:
    """Write config.json and the tensors' file, all at once; returns the folder.

    Both spellings of the dtype are put into a config that has neither: engines read one or the
    other. ValueError where `out` holds something already, OSError where it cannot be written.
    """
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out}: exists already; name a folder that does not")
    config = dict(stored.config)
    floating = {t.dtype for t in stored.tensors.values() if t.is_floating_point()}
    if len(floating) == 1 and not {"torch_dtype", "dtype"} & config.keys():
        config |= dtype_fields(floating.pop())
    work = out.parent / f".{out.name}.{os.getpid()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if stored.weights.endswith(".safetensors"):
            save_file(_apart(stored.tensors), work / stored.weights, metadata={"format": "pt"})
        else:
            torch.save(_apart(stored.tensors), work / stored.weights)
        work.rename(out)
    except (SafetensorError, RuntimeError) as error:  # what their writers make of a full disk
        raise OSError(f"{out}: could not be written ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, none sharing memory with another: else saving fails or drops one."""
    apart: dict[str, Tensor] = {}
    held: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        # A view is cloned as well: its whole storage would be written.
        if storage.data_ptr() in held or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        held.add(plain.untyped_storage().data_ptr())
        apart[name] = plain
    return apart


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise LayoutError(f"{path.parent}: no {path.name}; expected the folder of a draft head")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{path}: no JSON ({error})") from error
    if not isinstance(found, dict):
        raise LayoutError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _candidates(folder: Path) -> list[Path]:
    """Every file that could hold tensors, by name."""
    kinds = (".safetensors", *PICKLED)
    return sorted(p for p in folder.iterdir() if p.suffix in kinds and p.is_file())


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that together hold the tensors: safetensors before pickles."""
    found = [p.name for p in _candidates(folder)]
    for suffixes, index, usual in zip(((".safetensors",), PICKLED), INDICES, USUAL, strict=True):
        if (folder / index).is_file():
            return _shards(folder / index)
        of_kind = [name for name in found if name.endswith(suffixes)]
        if usual in of_kind:
            return [usual]
        of_kind = [name for name in of_kind if name != "training_args.bin"]
        if len(of_kind) == 1:
            return of_kind
        if of_kind:
            raise LayoutError(
                f"{folder}: {of_kind} could all be the tensors; keep one, or name it {usual}"
            )
    raise LayoutError(f"{folder}: no tensors; expected {WEIGHTS}")


def _shards(index: Path) -> list[str]:
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise LayoutError(f"{index}: no weight_map")
    shards = sorted({str(name) for name in names.values()})
    for name in shards:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise LayoutError(f"{index}: {name!r} is no file of this folder")
    return shards


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise LayoutError(f"{file}: not a safetensors file ({error}); get it anew") from error
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any type, as the loader runs over what is no archive
        first = str(error).strip().split("\n")[0]
        raise LayoutError(
            f"{file}: holds more than tensors, or is damaged, and is not opened ({first}); "
            "save it as safetensors"
        ) from error
    if not isinstance(loaded, dict):
        raise LayoutError(f"{file}: expected named tensors, found {type(loaded).__name__}")
    for name, value in loaded.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise LayoutError(f"{file}: {name!r} is {type(value).__name__}, not a tensor")
    return loaded
