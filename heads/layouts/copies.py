"""What folders carry of the target itself, and how a head of ours takes tensors by their names.

Shapes: V target vocabulary, Vd draft vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedConfig

from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import Contract
from drafthead.heads.layouts.layout import LayoutError
from drafthead.heads.vocabulary import check_ids, ids_of

FLOATS = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
"""What weights can be read in: others are quantised, and mean nothing without their scales."""
SHOWN = 4
"""Names that one error lists."""


def is_copy(tensor: Tensor, own: Tensor) -> bool:
    """Whether a shipped tensor is the target's own, as far as a dtype on its way could hold it."""
    if tensor.shape != own.shape or tensor.dtype not in FLOATS:
        return False
    ways = (tensor.dtype, torch.bfloat16, torch.float16)
    return any(torch.equal(tensor, own.to(way).to(tensor)) for way in ways)


def floats_in(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors in this dtype, detached; maps and masks as they are."""
    return {
        name: (x.to(dtype) if x.is_floating_point() else x).detach() for name, x in tensors.items()
    }


def listed(names: list[str]) -> str:
    """Some names for an error."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def count(value: object, name: str, place: str) -> int:
    """A positive whole number of a config; LayoutError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{place}: {name} is {value!r}, not a positive whole number")
    return value


def built(
    settings: BorrowingSettings, contract: Contract, target: PreTrainedConfig, place: str
) -> BorrowingHead:
    """An untrained head over the whole vocabulary, with the target's geometry and no memory yet."""
    try:
        with torch.device("meta"):
            head = settings.build(contract, target, None)
    except ValidationError as error:
        raise LayoutError(f"{place}: {error.errors()[0]['msg']}") from error
    assert isinstance(head, BorrowingHead)
    return head


def filled(head: BorrowingHead, tensors: Mapping[str, Tensor], place: str) -> BorrowingHead:
    """Give a head that has no memory yet all its tensors, in the dtype that most of them have.

    LayoutError where one is missing, surplus, of another shape than the config says, quantised, or
    damaged.
    """
    expected = {name: tuple(x.shape) for name, x in head.state_dict().items()}
    weights = {name for name, x in head.state_dict().items() if x.is_floating_point()}
    differing = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "surplus": sorted(tensors.keys() - expected.keys()),
    }
    problems = [f"{what} {listed(names)}" for what, names in differing.items() if names]
    problems += [
        f"{name} has shape {tuple(x.shape)}, not {expected[name]}"
        for name, x in tensors.items()
        if name in expected and tuple(x.shape) != expected[name]
    ][:SHOWN]
    if problems:
        raise LayoutError(f"{place}: tensors do not match config.json: {'; '.join(problems)}")
    sizes: dict[torch.dtype, int] = {}
    for name in sorted(weights):
        x = tensors[name]
        if x.dtype not in FLOATS:
            raise LayoutError(f"{place}: {name} is {x.dtype}: quantised heads cannot be read")
        if not bool(x.isfinite().all()):
            raise LayoutError(f"{place}: {name} holds values that are not finite")
        sizes[x.dtype] = sizes.get(x.dtype, 0) + x.numel()
    dtype = max(sizes, key=lambda kind: sizes[kind])
    head.load_state_dict(floats_in(tensors, dtype), assign=True)
    head.starts_at_bind = False
    head.eval()  # type: ignore[no-untyped-call]
    return head


def kept_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int, place: str) -> Tensor:
    """(Vd,) target ids of a map of offsets or, where only that fits, of absolute ids.

    LayoutError for a map that names no ascending tokens of the target, or not those of t2d (V,).
    """
    for name, map in (("d2t", d2t), ("t2d", t2d)):
        if map is not None and (map.dim() != 1 or map.is_floating_point() or map.is_complex()):
            raise LayoutError(f"{place}: {name} is {map.dtype} of shape {tuple(map.shape)}, no map")
    reasons = []
    for ids in (ids_of(d2t.long()), d2t.long()):
        try:
            ids = check_ids(ids, vocab_size)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if t2d is None:
            return ids
        if len(t2d) == vocab_size and int(t2d.sum()) == len(ids) and bool(t2d.bool()[ids].all()):
            return ids
        reasons.append("t2d keeps other tokens")
    raise LayoutError(f"{place}: d2t is no map into the target's vocabulary ({reasons[0]})")
