"""Read the tensors that a head borrows from its target: embedding, output rows, final norm.

From a live model, or alone from the target's safetensors folder, so that a target of 70B need not
be loaded to use or export a head. It knows no head.

Shapes: V target vocabulary, Vd draft vocabulary, D hidden width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from drafthead.heads.contract import Contract, ContractError, describe, held


@dataclass(frozen=True)
class Borrowed:
    """A target's tensors in its own dtype, detached; they may share storage with the target."""

    embedding: Tensor
    """(V, D)"""
    rows: Tensor
    """(Vd, D) output rows of the draft vocabulary."""
    norm: Tensor | None
    """(D,) fp32 weight of the final norm as it acts, or None if the target has none."""


def borrow(
    source: PreTrainedModel | Path, contract: Contract, draft_ids: Tensor | None, check: bool
) -> Borrowed:
    """Read what the contract names; draft_ids: (Vd,), or None for all rows.

    Raises ContractError where shapes differ and, for a live model unless `check` is False, where it
    is another target than the contract's.
    """
    names = [contract.embedding, contract.output]
    names += [contract.norm] if contract.norm is not None else []
    if isinstance(source, PreTrainedModel):
        if check:
            contract.check(describe(source, None, contract.layers, contract.template_kwargs))
        tensors = {name: _live(source, name) for name in set(names)}
        where = source.name_or_path or type(source).__name__
    else:
        tensors = {name: _stored(Path(source), name) for name in set(names)}
        where = str(source)
        bias = contract.output.removesuffix("weight") + "bias"
        # As `describe` does, which is not asked here; token readers use the output module whole.
        if contract.layers and _holds(Path(source), bias):
            raise ContractError(
                f"{where}: output rows with a bias ({bias}) are not supported; use a target whose "
                "lm_head has none"
            )
    table = (contract.vocab_size, contract.hidden_size)
    for name in set(names):
        expected = table[1:] if name == contract.norm else table
        if tuple(tensors[name].shape) != expected:
            raise ContractError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, the head made for "
                f"{contract.target!r} expects {expected}"
            )
    rows = tensors[contract.output]
    norm = None
    if contract.norm is not None:
        norm = tensors[contract.norm].float() + contract.norm_offset
    return Borrowed(
        embedding=tensors[contract.embedding],
        rows=rows if draft_ids is None else rows[draft_ids.to(rows.device)],
        norm=norm,
    )


def _live(model: PreTrainedModel, name: str) -> Tensor:
    try:
        return held(name, model.get_parameter(name))
    except AttributeError as error:
        raise ContractError(
            f"{type(model).__name__} has no parameter {name}, which the head borrows"
        ) from error


def _holds(folder: Path, name: str) -> bool:
    """Whether a folder that others were read from has this tensor, too."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return name in json.loads(index.read_text())["weight_map"]
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return name in tensors.keys()  # noqa: SIM118  (a safetensors handle is no mapping)


def _stored(folder: Path, name: str) -> Tensor:
    """Read one tensor from a folder with one safetensors file or an index of several."""
    index = folder / "model.safetensors.index.json"
    file = folder / "model.safetensors"
    try:
        if index.is_file():
            shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
            file = folder / shards[name]
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
    except FileNotFoundError as error:
        raise ContractError(
            f"{folder}: no {file.name}; save the target with safetensors"
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ContractError(
            f"{file}: no tensor {name} to be read, which the head borrows ({error})"
        ) from error
    return tensor
