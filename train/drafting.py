"""What one round of a head's drafting costs, from configs alone.

The head is built as in `rehearsal` and goes through its own decoding code, `extend` and `expand`,
in a `dry_run`; so a new head needs no formula here. The target's verifying forward is not in it,
nor is any figure of a machine: operations and bytes are what any machine has to do.

Shapes: L captured layers, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from drafthead.heads.base import DraftHead
from drafthead.train.config import RunConfig
from drafthead.train.dryrun import dry_run
from drafthead.train.rehearsal import dry_contract, dry_head, dry_target

CONTEXT = 128
"""Tokens that are committed before the round, which its attention looks back on."""
SMALL = 0.25
"""A step that reads less than this share of what the largest one reads is called small."""

_aten = torch.ops.aten
_LOOKUPS = (_aten.embedding, _aten.index, _aten._unsafe_index, _aten.index_select, _aten.gather)
"""Operations that read rows of their first operand: as much as they give."""


@dataclass(frozen=True)
class DraftShape:
    """A chain (width 1), or a tree: `depth` levels, `width` nodes of each gone on from."""

    depth: int
    width: int = 1

    def __str__(self) -> str:
        if self.width == 1:
            return f"chain of {self.depth}"
        return f"tree of {self.depth} levels, {self.width} wide"


SHAPES = (DraftShape(4), DraftShape(4, 4))


@dataclass(frozen=True)
class DraftCost:
    """One round of one row: one token is committed and a draft of this shape made after it."""

    shape: DraftShape
    """Not deeper than the head drafts."""
    macs: int
    """Multiply-adds of matrix products, attention's included: half the operations."""
    bytes: int
    """Of weights, the head's own and borrowed, each time that an operation reads them; of tables
    the rows looked up."""
    steps: int
    """Calls of the head one after another that compute or read anything."""
    small_steps: int
    """Those of them that read little (`SMALL`)."""
    dtype: str
    """Of the weights."""
    context: int = CONTEXT


def draft_costs(
    config: RunConfig,
    target: PreTrainedConfig,
    bf16: bool,
    shapes: Sequence[DraftShape] = SHAPES,
    context: int = CONTEXT,
) -> tuple[DraftCost, ...]:
    """What rounds of this config's head cost; `bf16`: whether its weights are held in it.

    Raises ValueError for settings that a run would refuse.
    """
    if not shapes:
        return ()
    # All in fp32, as heads are built; what is counted is numbers, so it does for either.
    in_fp32 = config.target.model_copy(update={"dtype": "float32"})
    config = config.model_copy(update={"target": in_fp32})
    dtype = torch.bfloat16 if bf16 else torch.float32
    with dry_run() as run:
        model = dry_target(config, target, bf16=False)
        head = dry_head(config, dry_contract(config, model), target, run)
        # Any target of this shape does: there are no values to compare.
        cast(Any, head).bind(model, check=False)
        head.train(False)
        reads = WeightReads(head)
        return tuple(
            _cost(shape, _gone(head, shape, context, lambda: run.flops, reads), dtype, context)
            for shape in shapes
        )


def _gone(
    head: DraftHead, shape: DraftShape, context: int, flops: Callable[[], int], reads: WeightReads
) -> list[tuple[int, int]]:
    """Operations, and numbers read, by call of one round."""
    calls = draft_calls(head, shape, context)
    next(calls)  # what was committed before is not the round's
    found = []
    before = flops(), reads.numbers
    with reads:
        for _ in calls:
            after = flops(), reads.numbers
            found.append((after[0] - before[0], after[1] - before[1]))
            before = after
    return found


def _cost(
    shape: DraftShape, calls: list[tuple[int, int]], dtype: torch.dtype, context: int
) -> DraftCost:
    largest = max(read for _, read in calls)
    working = [read for flops, read in calls if flops or read]
    return DraftCost(
        shape=DraftShape(len(calls), shape.width),
        macs=sum(flops for flops, _ in calls) // 2,
        bytes=dtype.itemsize * sum(read for _, read in calls),
        steps=len(working),
        small_steps=sum(read < SMALL * largest for read in working),
        dtype=str(dtype).removeprefix("torch."),
        context=context,
    )


def draft_calls(head: DraftHead, shape: DraftShape, context: int) -> Iterator[None]:
    """Call a bound head as a decoder would: the prompt, one token more, then level by level.

    Stops after each call; the first is the prompt's. Tokens do not matter, so they are all 0.
    """
    depth = min(shape.depth, head.max_depth or shape.depth)
    device, columns = head.draft_ids.device, len(head.contract.layers) * head.contract.hidden_size
    state = head.open(1, context + 1 + shape.width * depth)

    def commit(count: int) -> None:
        ids = torch.zeros(1, count, dtype=torch.long, device=device)
        features = torch.zeros(1, count, columns, dtype=head.dtype, device=device)
        head.extend(state, features, ids, torch.full((1,), count))

    commit(context)
    yield
    commit(1)
    yield
    nodes = torch.zeros(1, shape.width, dtype=torch.long, device=device)
    for level in range(depth - 1):
        above = torch.arange(shape.width, device=device)[None] + (level - 1) * shape.width
        head.expand(state, nodes, above if level else torch.full_like(nodes, -1))
        yield


class WeightReads(TorchDispatchMode):
    """Counts the numbers of a head's parameters and borrowed tensors that operations read."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = [*head.parameters(), *(b for b in head.buffers() if b.is_floating_point())]
        self._weights = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "aten" and not func.is_view:
            if func._overloadpacket in _LOOKUPS:
                self.numbers += out.numel() if self._is_weight(args[0]) else 0
            else:
                given = tree_leaves((args, kwargs))
                self.numbers += sum(value.numel() for value in given if self._is_weight(value))
        return out

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._weights
