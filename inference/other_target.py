"""Another target for a head that was trained: fine-tuned, adapted with PEFT, or quantised.

A head can draft for any target of the same shape and vocabulary, perhaps worse; one of another
shape is refused. It measures nothing.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

from torch import nn

from drafthead.heads.base import DraftHead
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import ContractError, describe
from drafthead.inference.placement import unwrapped
from drafthead.inference.target import Target, load_config, load_target, load_tokenizer

INT8 = "int8"
"""Stands for the target itself, its linear layers in 8 bits (weights only)."""
SHAPE = (
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_layers",
    "logit_scale",
    "logit_softcap",
)
"""Facts of the contract that another target must have, too."""

Kind = Literal["model", "adapter", "int8"]


def kind_of(other: str) -> Kind:
    """What `other` names: int8 (./int8 is a folder), a folder with a PEFT adapter, or a model."""
    if other == INT8:
        return "int8"
    return "adapter" if (Path(other) / "adapter_config.json").is_file() else "model"


def check_other(target: str, other: str) -> None:
    """Refuse another target that is not there or of another shape, before anything is measured.

    It looks at configs only; the rest is `fit_to_other`'s. Raises ValueError or OSError, one line.
    """
    kind = kind_of(other)
    if kind == "int8":
        _torchao()
    elif kind == "adapter":
        _peft(Path(other))
    else:
        mine, theirs = load_config(target), load_config(other, role="other target")
        wrong = [
            f"{fact} is {getattr(theirs, fact)}, the target's {getattr(mine, fact)}"
            for fact in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
            if getattr(theirs, fact, None) != getattr(mine, fact, None)
        ]
        if wrong:
            raise ContractError(f"{other!r}: no head of {target!r} drafts for it: {wrong[0]}")


def load_other(target: str, other: str, dtype: str) -> Target:
    """The other target anew; an adapter and 8 bits are put on a fresh copy of `target`.

    Raises ValueError or OSError, one line each.
    """
    kind = kind_of(other)
    if kind == "model":
        return load_target(other, dtype)
    base = load_target(target, dtype)
    if kind == "int8":
        quantise(base)
        return base
    return merged(base, Path(other))


def quantise(target: Target) -> None:
    """Store the weights of the linear layers in 8 bits, in place; output rows stay as they are.

    As torchao does it in transformers: one scale for each row, computed in the target's dtype.
    """
    torchao = _torchao()
    rows = target.model.get_output_embeddings()

    def inner(module: nn.Module, _name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not rows

    torchao.quantize_(target.model, torchao.Int8WeightOnlyConfig(), filter_fn=inner)


def merged(base: Target, folder: Path) -> Target:
    """The target with a PEFT adapter added to its weights."""
    peft = _peft(folder)
    try:
        json.loads((folder / "adapter_config.json").read_text())
        adapted = peft.PeftModel.from_pretrained(base.model, str(folder))
        unwrapped(adapted)  # refuses adapters that act on prompts
        return Target(adapted.merge_and_unload(), base.tokenizer)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        first = (str(error) or repr(error)).splitlines()[0].rstrip(" :")
        raise ValueError(f"{folder}: this adapter does not go onto the target: {first}") from error


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ValueError("int8 needs torchao: pip install 'drafthead[quant]'") from error


def _peft(folder: Path) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            f"{folder} is an adapter, which needs PEFT: pip install 'drafthead[adapters]'"
        ) from error


def fit_to_other(head: DraftHead, target: str, other: Target) -> list[str]:
    """Bind a head to another target than its own (`target`); remarks on what else is different.

    Raises ContractError where shape or vocabulary differ.
    """
    if not isinstance(head, BorrowingHead):
        raise ContractError(f"a head of type {head.settings.type!r} is bound to its own target")
    mine = head.contract
    theirs = describe(other.model, other.tokenizer, (), mine.template_kwargs)
    wrong = [
        f"{fact} is {getattr(theirs, fact)}, the head expects {getattr(mine, fact)}"
        for fact in SHAPE
        if getattr(theirs, fact) != getattr(mine, fact)
    ]
    remarks = []
    if mine.tokenizer not in (None, theirs.tokenizer) and other.tokenizer is not None:
        if load_tokenizer(target).get_vocab() != other.tokenizer.get_vocab():
            wrong.append("its tokenizer has other tokens")
        else:
            remarks.append("its tokenizer is another, of the same tokens")
    if wrong:
        raise ContractError(
            f"{theirs.target!r}: a head made for {mine.target!r} cannot draft for it: "
            + "; ".join(wrong)
        )
    if mine.template is not None and mine.template != theirs.template:
        remarks.append("its chat template is another, and prompts are rendered with that")
    if theirs.fingerprint == mine.fingerprint:
        remarks.append("its weights are those of the head's own target")
    head.bind(other.model, check=False)
    head.adapt(other.model)
    return remarks
