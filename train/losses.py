"""What a prediction costs: pure functions from logits to values.

They know no head, no mask and no optimiser; the trainer weighs what they sum.

Shapes: M rows (supervised positions of one depth), N teacher rows, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 21
"""Elements of one fp32 working copy on a CPU (8 MiB): a bound on memory that suits its cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 26
"""The same elsewhere (256 MiB): fewer, larger kernels."""


def soft_cross_entropy(
    hidden: Tensor,
    readout: Callable[[Tensor], Tensor],
    teacher: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of `readout(hidden)` against the teacher's distribution.

    hidden: (M, D) with gradient; readout: (m, D) → (m, Vd), with nothing trained inside; teacher:
    (N, Vd), renormalised over the draft vocabulary; rows: (M,) int64, each row's teacher. Returns
    the sum, 0-dim fp32, and (M,) int64, each row's likeliest draft id.

    Logits never exist at once: what the gradient needs is made together with the value, chunk by
    chunk, and kept as (M, D). The soft target is EAGLE-3's (arXiv 2503.01840).
    """
    if teacher.dim() != 2 or len(hidden) != len(rows):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and rows {tuple(rows.shape)} must be of one length, "
            f"the teacher {tuple(teacher.shape)} 2-D"
        )
    apply: Callable[..., tuple[Tensor, Tensor]] = _SoftCrossEntropy.apply
    return apply(hidden, readout, teacher, rows)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        readout: Callable[[Tensor], Tensor],
        teacher: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        for chunk in _chunks(hidden, teacher.shape[1]):
            with torch.set_grad_enabled(wanted):
                read = hidden[chunk].detach().requires_grad_(wanted)
                logits = readout(read)
            z, q = logits.detach().float(), teacher[rows[chunk]].float()
            # Not argmax: it takes three times as long in bf16 on a CPU.
            top, best[chunk] = z.max(dim=-1)
            z = z - top[:, None]
            parts = z.exp()
            norm = parts.sum(dim=-1)
            total += (norm.log() * q.sum(dim=-1) - (q * z).sum(dim=-1)).sum()
            if gradient is not None:
                slope = parts.div_(norm[:, None]).sub_(q)
                (gradient[chunk],) = torch.autograd.grad(logits, read, slope.to(logits.dtype))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def distribution(readout: Callable[[Tensor], Tensor], hidden: Tensor, width: int) -> Tensor:
    """softmax(readout(hidden)): (N, D) → (N, width) in the readout's dtype, without a gradient."""
    made = []
    with torch.no_grad():
        for chunk in _chunks(hidden, width):
            logits = readout(hidden[chunk])
            made.append(logits.float().softmax(dim=-1).to(logits.dtype))
    return torch.cat(made) if made else hidden.new_empty(0, width)


def overlap(logits: Tensor, teacher: Tensor) -> Tensor:
    """Sum of min(p, q) over the draft vocabulary, both renormalised there: (M,) fp32, no gradient.

    Two (M, Vd) of logits. It bounds what a ratio rule can accept at temperature 1
    (arXiv 2211.17192), up to the teacher's mass outside the draft vocabulary.
    """
    if logits.shape != teacher.shape:
        raise ValueError(
            f"draft logits {tuple(logits.shape)} do not fit teacher logits {tuple(teacher.shape)}"
        )
    value = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.no_grad():
        for chunk in _chunks(logits, logits.shape[1]):
            p, q = (side[chunk].float().softmax(dim=-1) for side in (logits, teacher))
            value[chunk] = torch.minimum(p, q).sum(dim=-1)
    return value


def depth_weights(steps: int, decay: float) -> tuple[float, ...]:
    """Weight of each depth's loss, decay ** depth: 0.8 is EAGLE-3's."""
    if steps < 1 or decay <= 0:
        raise ValueError(f"depth weights need steps >= 1 and decay > 0, not {steps} and {decay}")
    return tuple(decay**depth for depth in range(steps))


def _chunks(rows: Tensor, Vd: int) -> list[slice]:
    most = CHUNK_ELEMENTS if rows.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    size = max(1, most // max(1, Vd))
    return [slice(start, start + size) for start in range(0, len(rows), size)]
