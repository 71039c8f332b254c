"""Bytes, memory and hours of a run before anything of it runs.

It loads no weights and needs no network. Memory is placed by `placing`; here are the data, the
operations, the time, and all of it together. Whatever is assumed is shown to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from drafthead.data.states import bytes_of
from drafthead.heads.contract import inner_layers
from drafthead.train.assemble import head_layers
from drafthead.train.config import RunConfig
from drafthead.train.drafting import SHAPES, DraftCost, DraftShape, draft_costs
from drafthead.train.hardware import GB, Hardware
from drafthead.train.placing import (
    BUCKET,
    CPU_FIXED,
    CPU_WASTE,
    GPU_CONTEXT,
    GPU_WASTE,
    USABLE,
    Case,
    DataFacts,
    Holding,
    Need,
    Setting,
    assumed,
    cases,
    kept_states,
    need,
    smallest,
)
from drafthead.train.rehearsal import Footprint, rehearse

UTILISATION = 0.35
"""Share of the peak operations that a run reaches (matrix products of usual sizes)."""


@dataclass(frozen=True)
class Estimate:
    """The forecast of a run; bytes and seconds are whole numbers of plain units."""

    asked: Need
    needs: tuple[Need, ...]
    """Every sensible way to place the same run on as many ranks."""
    smallest: Need | None
    """The least far-reaching change that fits the hardware: `asked` itself, if it fits."""
    fits: bool
    footprint: Footprint
    data: DataFacts
    hardware: Hardware
    unroll_steps: int
    flops: dict[str, float]
    """Per position, padding included."""
    rounds: tuple[DraftCost, ...]
    """What drafting with the head takes, by shape."""
    store_bytes: int | None
    """Of all training states in a store, for one epoch's rows."""
    hours: dict[str, float] | None
    """By part and in all; None where the number of positions is not known."""
    assumptions: tuple[str, ...] = field(default=())


def forecast(
    config: RunConfig,
    target: PreTrainedConfig,
    hardware: Hardware,
    *,
    ranks: int | None = None,
    stage: int = 0,
    offload: bool = False,
    data: DataFacts | None = None,
    shapes: Sequence[DraftShape] = SHAPES,
) -> Estimate:
    """Forecast a run of this config for a target of this config, on so many ranks.

    ranks: default, as many as there are devices. data: of the rows, where they are known. shapes:
    of drafts whose cost is told. Raises ValueError for settings that a run would refuse.
    """
    ranks = ranks or hardware.devices
    bf16 = config.training.precision == "bf16" or (
        config.training.precision == "auto" and (not hardware.is_cpu or _cpu_has_bf16())
    )
    data = data or assumed(config)
    seen = rehearse(config, target, data.largest, bf16)
    holding = _holding(config)
    if holding == "partitioned":
        stage = 3  # nothing else partitions
    case = Case(ranks, stage, holding, offload, config.training.tokens_per_batch)
    text = target.get_text_config()
    at = Setting(config, hardware, seen, data, int(text.hidden_size), bf16)
    asked = need(at, case)
    needs = tuple(need(at, other) for other in cases(case))
    best = asked if asked.fits(hardware) else smallest(config, target, at, case)
    store = None
    if data.positions is not None and config.head.reads_states:
        layers = len(inner_layers(head_layers(config, int(text.num_hidden_layers))))
        store = bytes_of(data.positions, layers, text.hidden_size)
    return Estimate(
        asked=asked,
        needs=needs,
        smallest=best,
        fits=asked.fits(hardware),
        footprint=seen,
        data=data,
        hardware=hardware,
        unroll_steps=config.head.unroll_steps,
        flops=_flops(config, seen, data),
        rounds=draft_costs(config, target, bf16, shapes),
        store_bytes=store,
        hours=_hours(at, case),
        assumptions=_assumptions(at, case),
    )


# Time


def _hours(at: Setting, case: Case) -> dict[str, float] | None:
    """Hours by part; a rank's operations or its memory's bandwidth, whichever takes longer."""
    training, f, hardware = at.config.training, at.print, at.hardware
    positions = _positions_in_all(at, case)
    if positions is None:
        return None
    speed = hardware.flops * UTILISATION
    if hardware.is_cpu:
        speed /= case.ranks
    batches = positions / (at.data.largest.positions * case.ranks)
    target = max(f.target_flops / speed, f.target / hardware.bandwidth)
    epochs = 1.0
    if case.target == "store":
        target = 0.0
    elif kept_states(at, case) and at.data.positions:
        epochs = max(1.0, positions / at.data.positions)  # later epochs read what is kept
    head = max((f.forward_flops + f.backward_flops) / speed, 3 * f.head / hardware.bandwidth)
    ring = 2 * 4 * f.trained * (case.ranks - 1) / case.ranks / hardware.link
    gather = f.target * (case.ranks - 1) / case.ranks / hardware.link
    seconds = {
        "target": target * batches / epochs,
        "gathering the target": gather * batches if case.target == "partitioned" else 0.0,
        "head": head * batches,
        "summing gradients": ring * batches / training.accumulate,
    }
    hours = {name: spent / 3600 for name, spent in seconds.items()}
    whole = sum(hours.values())
    if training.max_minutes is not None:
        whole = min(whole, training.max_minutes / 60)
    return hours | {"in all": whole}


def _positions_in_all(at: Setting, case: Case) -> float | None:
    training = at.config.training
    per_step = at.data.largest.positions * training.accumulate * case.ranks
    limits = [training.max_steps * per_step] if training.max_steps is not None else []
    if training.epochs is not None and at.data.positions is not None:
        limits.append(training.epochs * at.data.positions)
    return float(min(limits)) if limits else None


def _flops(config: RunConfig, full: Footprint, data: DataFacts) -> dict[str, float]:
    """Operations for each position of a micro-batch, by part and by depth."""
    n = data.largest.positions
    found = {
        "target forward": full.target_flops / n,
        "head forward": full.forward_flops / n,
        "head backward": full.backward_flops / n,
    }
    found["head, training"] = found["head forward"] + found["head backward"]
    steps = config.head.unroll_steps
    if steps > 1:
        whole, share = found["head, training"], full.first_depth
        found |= {
            "head, first depth": share * whole,
            "head, each further depth": (1 - share) * whole / (steps - 1),
        }
    return found


# What the parts share


def _holding(config: RunConfig) -> Holding:
    training = config.training
    if training.features == "store" or (training.features == "auto" and config.data.states):
        return "store"
    return "partitioned" if training.partition_target else "whole"


def _cpu_has_bf16() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _assumptions(at: Setting, case: Case) -> tuple[str, ...]:
    hardware, data = at.hardware, at.data
    shape = data.largest
    lines = [
        f"largest micro-batch {shape.rows} x {shape.length} positions, "
        + ("as in the data" if data.known else "all supervised (the data is not read)"),
        f"{UTILISATION:.0%} of {hardware.flops / 1e12:.3g} Tflop/s a device, "
        f"or its {hardware.bandwidth / 1e9:.0f} GB/s where that takes longer",
    ]
    if hardware.is_cpu:
        lines.append(
            f"C heap {CPU_WASTE:.0%} over a step's tensors, {CPU_FIXED / GB:.2f} GB for tokenizer "
            "and kernels; what the imports take (0.4 GB) is left out"
        )
    else:
        lines.append(
            f"{GPU_CONTEXT / GB:.0f} GB of CUDA context, allocator {GPU_WASTE:.0%} over a step's "
            f"tensors, {USABLE:.0%} of a device usable: not measured on a GPU"
        )
    if case.ranks > 1:
        lines.append(f"{hardware.link / 1e9:.0f} GB/s between devices, not overlapped")
    if case.stage:
        lines.append(f"DeepSpeed's default bucket of {BUCKET / 1e6:.0f} M fp32 elements")
    return tuple(lines)
