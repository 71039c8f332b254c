"""What a prediction costs: pure functions from logits to values.

They know no head, no mask, no position and no optimiser; the trainer weighs what they give.

Shapes: M rows (supervised positions of one depth), N teacher rows, Vd draft vocabulary. In
formulae p is the draft's distribution, q the teacher's, y the text's next token, z the logits less
each row's largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["soft_ce", "ce", "kl", "reverse_kl", "tv", "lk", "ce_l1"]
"""soft_ce: −Σ q log p (EAGLE-3, arXiv 2503.01840). ce: −log p(y) (Medusa, DFlash).
kl: Σ q log(q / p), soft_ce less the teacher's entropy, so of the same gradient and 0 at its best.
reverse_kl: Σ p log(p / q). tv: ½ Σ |p − q|, one less the overlap; its gradient vanishes far away.
lk: l kl + (1 − l) tv with l = exp(−eta · overlap), held fixed: kl while far, tv when near
(arXiv 2602.23881). ce_l1: 0.1 ce + 0.9 Σ |p − q| (DSpark, arXiv 2607.05147)."""

HARD: frozenset[Kind] = frozenset({"ce", "ce_l1"})
"""Kinds that need the text's token among the drafts."""
SOFT: frozenset[Kind] = frozenset(get_args(Kind)) - {"ce"}
"""Kinds that need the teacher's choice among them."""
_OVERLAPPING: frozenset[Kind] = frozenset({"tv", "lk", "ce_l1"})
_FRACTIONS = (0.1, 0.9)
"""Of ce and of Σ |p − q| in ce_l1."""

CHUNK_ELEMENTS = 1 << 21
"""Elements of one fp32 working copy on a CPU (8 MiB): a bound on memory that suits its cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 26
"""The same elsewhere (256 MiB): fewer, larger kernels."""


@dataclass(frozen=True)
class RowLosses:
    """What M rows cost and what they show; only `value` has a gradient. fp32, or fp64 of fp64."""

    value: Tensor
    """(M,)"""
    best: Tensor
    """(M,) int64: the likeliest draft id."""
    chance: Tensor
    """(M,) the draft's probability of the label; 0 where that is outside the draft vocabulary."""
    overlap: Tensor | None
    """(M,) sum of min(p, q), both over the draft vocabulary alone, where it was asked for.

    It bounds what a ratio rule can accept at temperature 1 (arXiv 2211.17192), up to the teacher's
    mass outside the draft vocabulary.
    """


def row_losses(
    hidden: Tensor,
    readout: Callable[[Tensor], Tensor],
    teacher: Tensor,
    rows: Tensor,
    labels: Tensor,
    kind: Kind = "soft_ce",
    *,
    eta: float = 3.0,
    overlap: bool = False,
) -> RowLosses:
    """The loss of each row of `readout(hidden)`, and what is known of the row beside it.

    hidden: (M, D) with gradient; readout: (m, D) → (m, Vd), with nothing trained inside; teacher:
    (N, Vd), renormalised over the draft vocabulary; rows: (M,) int64, each row's teacher; labels:
    (M,) int64 draft ids, -1 where the text's token has none: such a row costs nothing in `ce` and
    `ce_l1`. `overlap` asks for it where the kind does not need it.

    Logits never exist at once: what the gradient needs is made together with the value, chunk by
    chunk, and kept as (M, D); the backward pass scales it row by row.
    """
    M = len(hidden)
    if teacher.dim() != 2 or len(rows) != M or len(labels) != M:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, rows {tuple(rows.shape)} and labels "
            f"{tuple(labels.shape)} must be of one length, the teacher {tuple(teacher.shape)} 2-D"
        )
    if kind not in SOFT | HARD:
        raise ValueError(f"loss {kind!r} is unknown; use one of {', '.join(get_args(Kind))}")
    rule = _Rule(kind, eta, overlap or kind in _OVERLAPPING)
    apply: Callable[..., tuple[Tensor, ...]] = _RowLosses.apply
    value, best, chance, *shared = apply(hidden, readout, teacher, rows, labels, rule)
    return RowLosses(value, best, chance, shared[0] if shared else None)


@dataclass(frozen=True)
class _Rule:
    kind: Kind
    eta: float
    overlap: bool


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        readout: Callable[[Tensor], Tensor],
        teacher: Tensor,
        rows: Tensor,
        labels: Tensor,
        rule: _Rule,
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        value = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        best = torch.empty_like(value, dtype=torch.int64)
        chance = torch.empty_like(value)
        shared = torch.empty_like(value) if rule.overlap else None
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        for chunk in _chunks(hidden, teacher.shape[1]):
            with torch.set_grad_enabled(wanted):
                read = hidden[chunk].detach().requires_grad_(wanted)
                logits = readout(read)
            q = teacher[rows[chunk]].to(dtype)
            part = _Chunk(logits.detach().to(dtype), q, labels[chunk], rule)
            best[chunk], chance[chunk] = part.best, part.chance
            if shared is not None:
                shared[chunk] = part.overlap
            value[chunk] = part.value
            if gradient is not None:
                slope = part.slope().to(logits.dtype)
                (gradient[chunk],) = torch.autograd.grad(logits, read, slope)
            del part  # before the next one takes as much
        ctx.save_for_backward(gradient)
        seen = (best, chance) if shared is None else (best, chance, shared)
        ctx.mark_non_differentiable(*seen)
        return value, *seen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None].to(gradient.dtype), None, None, None, None, None


class _Chunk:
    """Some rows at work: parts that several kinds share are made once, and only where used."""

    def __init__(self, logits: Tensor, q: Tensor, labels: Tensor, rule: _Rule) -> None:
        # Not argmax: it takes three times as long in bf16 on a CPU.
        top, self.best = logits.max(dim=-1)
        self.z, self.q, self.rule = logits - top[:, None], q, rule
        self._parts = self.z.exp()
        self.norm = self._parts.sum(dim=-1)
        self.has, self.labels = labels >= 0, labels.clamp(min=0)
        self.z_label = self.z.gather(1, self.labels[:, None])[:, 0]

    @property
    def chance(self) -> Tensor:
        return self.z_label.exp() / self.norm * self.has

    @cached_property
    def p(self) -> Tensor:
        return self._parts.div_(self.norm[:, None])

    @cached_property
    def log_norm(self) -> Tensor:
        return self.norm.log()

    @cached_property
    def overlap(self) -> Tensor:
        return torch.minimum(self.p, self.q).sum(dim=-1)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(p / q); a teacher's chance that was rounded to zero is the smallest there is."""
        floor = torch.finfo(torch.float32).tiny
        return self.z - self.log_norm[:, None] - self.q.clamp_min(floor).log()

    @cached_property
    def far(self) -> Tensor:
        """Share of kl in lk."""
        return (-self.rule.eta * self.overlap).exp()

    # Values, (m,)

    @cached_property
    def value(self) -> Tensor:
        match self.rule.kind:
            case "soft_ce":
                return self._soft_ce()
            case "ce":
                return self._ce()
            case "kl":
                return self._kl()
            case "reverse_kl":
                return (self.p * self.log_ratio).sum(dim=-1)
            case "tv":
                return 1.0 - self.overlap
            case "lk":
                return self.far * self._kl() + (1.0 - self.far) * (1.0 - self.overlap)
            case "ce_l1":
                hard, soft = _FRACTIONS
                return hard * self._ce() + soft * 2.0 * (1.0 - self.overlap) * self.has

    def _soft_ce(self) -> Tensor:
        return self.log_norm * self.q.sum(dim=-1) - (self.q * self.z).sum(dim=-1)

    def _ce(self) -> Tensor:
        return (self.log_norm - self.z_label) * self.has

    def _kl(self) -> Tensor:
        return self._soft_ce() + torch.xlogy(self.q, self.q).sum(dim=-1)

    # Gradients with respect to the logits, (m, Vd); they may use up `p`, so they come last

    def slope(self) -> Tensor:
        match self.rule.kind:
            case "soft_ce" | "kl":
                return self.p.sub_(self.q)
            case "ce":
                return self._ce_slope()
            case "reverse_kl":
                return self.p * (self.log_ratio - self.value[:, None])
            case "tv":
                return self._tv_slope()
            case "lk":
                far = self.far[:, None]
                near = (1.0 - far) * self._tv_slope()
                return near.add_(self.p.sub_(self.q).mul_(far))
            case "ce_l1":
                hard, soft = _FRACTIONS
                near = self._tv_slope().mul_(2.0 * soft * self.has[:, None])
                return near.add_(self._ce_slope().mul_(hard))

    def _ce_slope(self) -> Tensor:
        ones = self.has.to(self.p.dtype)[:, None]
        return self.p.mul_(ones).scatter_add_(1, self.labels[:, None], -ones)

    def _tv_slope(self) -> Tensor:
        short = self.p * (self.p < self.q)  # where more chance would raise the overlap
        return (self.p * short.sum(dim=-1, keepdim=True)).sub_(short)


def distribution(readout: Callable[[Tensor], Tensor], hidden: Tensor, width: int) -> Tensor:
    """softmax(readout(hidden)): (N, D) → (N, width) in the readout's dtype, without a gradient."""
    made = []
    with torch.no_grad():
        for chunk in _chunks(hidden, width):
            logits = readout(hidden[chunk])
            made.append(logits.float().softmax(dim=-1).to(logits.dtype))
    return torch.cat(made) if made else hidden.new_empty(0, width)


def _chunks(rows: Tensor, Vd: int) -> list[slice]:
    most = CHUNK_ELEMENTS if rows.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    size = max(1, most // max(1, Vd))
    return [slice(start, start + size) for start in range(0, len(rows), size)]
