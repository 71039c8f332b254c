"""What reading Llama-like foreign heads shares: plain names, the target's copies, the contract.

Shapes: V target vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafthead.heads.contract import Contract
from drafthead.heads.layouts.copies import is_copy
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored
from drafthead.heads.layouts.recognise import plain_name


def plain_tensors(stored: Stored) -> dict[str, Tensor]:
    """By plain names, without rotary tables and without biases that are zero."""
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        short = plain_name(name)
        if "rotary_emb." in short or (short.endswith(".bias") and not bool(tensor.any())):
            continue
        if short in plain:
            raise LayoutError(f"{stored.place}: two tensors are called {short}")
        plain[short] = tensor
    return plain


def take_embedding(tensors: dict[str, Tensor], asked: Asked, place: str) -> None:
    """Take a copy of the target's embedding out; LayoutError for one of its own."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is None or is_copy(own, asked.embedding):
        return
    if own.shape != asked.embedding.shape:
        raise LayoutError(
            f"{place}: embed_tokens.weight has shape {tuple(own.shape)}, the target's embedding "
            f"{tuple(asked.embedding.shape)}: it is another target's head"
        )
    changed = int((own != asked.embedding.to(own)).any(-1).sum())
    raise LayoutError(
        f"{place}: embed_tokens.weight differs from the target's embedding in {changed} of "
        f"{len(own)} rows: heads with an embedding of their own are not supported, if it is not "
        "another target's head"
    )


def check_sizes(geometry: Mapping[str, Any], contract: Contract, place: str) -> None:
    """LayoutError where a head is not as wide as the target, or has another vocabulary."""
    for name in ("hidden_size", "vocab_size"):
        own, wanted = geometry[name], getattr(contract, name)
        if own != wanted:
            raise LayoutError(
                f"{place}: {name} is {own}, that of target {contract.target!r} {wanted}"
            )
