"""What a prediction costs: pure functions from logits to one value per row.

They know no head, no mask and no optimiser; the trainer weighs and sums what they return.

Shapes: M rows (supervised positions of one depth), N teacher rows, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 21
"""Elements of one fp32 working copy (8 MiB): a bound on memory that suits a CPU's cache."""


def soft_cross_entropy(
    logits: Tensor, teacher_logits: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Cross-entropy against the teacher's distribution, renormalised over the draft vocabulary.

    logits: (M, Vd) with gradient; teacher_logits: (N, Vd), never given one; rows: (M,) int64, which
    teacher row each draft row is measured against (default: N = M, in order). Returns (M,) fp32.
    Row chunks bound the fp32 copies; the gradient, softmax(logits) - softmax(teacher), is kept
    once in the dtype of the logits. The soft target is EAGLE-3's (arXiv 2503.01840).
    """
    _check(logits, teacher_logits, rows)
    apply: Callable[..., Tensor] = _SoftCrossEntropy.apply
    return apply(logits, teacher_logits, rows)


class _SoftCrossEntropy(torch.autograd.Function):
    """`-sum(softmax(teacher) * log_softmax(logits))`, storing its gradient and no input."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor, rows: Tensor | None) -> Tensor:
        value = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for chunk in _chunks(logits):
            z = logits[chunk].float()
            q = _teacher(teacher_logits, rows, chunk)
            norm = z.logsumexp(dim=-1)
            value[chunk] = norm - (q * z).sum(dim=-1)
            if gradient is not None:
                # z may be a view of the caller's logits: write into a copy only.
                gradient[chunk] = (z - norm[:, None]).exp_().sub_(q)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None].to(gradient.dtype), None, None


def overlap(logits: Tensor, teacher_logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """Sum of min(p, q) over the draft vocabulary, both renormalised there: (M,) fp32, no gradient.

    Arguments as `soft_cross_entropy`. It bounds what a ratio rule can accept at temperature 1
    (arXiv 2211.17192), up to the teacher's mass outside the draft vocabulary.
    """
    _check(logits, teacher_logits, rows)
    value = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.no_grad():
        for chunk in _chunks(logits):
            p = logits[chunk].float().softmax(dim=-1)
            value[chunk] = torch.minimum(p, _teacher(teacher_logits, rows, chunk)).sum(dim=-1)
    return value


def depth_weights(steps: int, decay: float) -> tuple[float, ...]:
    """Weight of each depth's loss, decay ** depth: 0.8 is EAGLE-3's."""
    if steps < 1 or decay <= 0:
        raise ValueError(f"depth weights need steps >= 1 and decay > 0, not {steps} and {decay}")
    return tuple(decay**depth for depth in range(steps))


def _teacher(teacher_logits: Tensor, rows: Tensor | None, chunk: slice) -> Tensor:
    """The teacher's distribution of one chunk, (m, Vd) fp32."""
    picked = teacher_logits[chunk] if rows is None else teacher_logits[rows[chunk]]
    return picked.float().softmax(dim=-1)


def _chunks(logits: Tensor) -> list[slice]:
    M, Vd = logits.shape
    size = max(1, CHUNK_ELEMENTS // max(1, Vd))
    return [slice(start, start + size) for start in range(0, M, size)]


def _check(logits: Tensor, teacher_logits: Tensor, rows: Tensor | None) -> None:
    count = len(teacher_logits) if rows is None else len(rows)
    if logits.shape[1:] != teacher_logits.shape[1:] or len(logits) != count:
        raise ValueError(
            f"draft logits {tuple(logits.shape)} do not fit "
            f"teacher logits {tuple(teacher_logits.shape)}"
            + ("" if rows is None else f" picked by rows {tuple(rows.shape)}")
        )
