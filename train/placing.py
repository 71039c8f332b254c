"""One rank's memory: what a step holds, spread over ranks as the backends do it.

`rehearse` counts the bytes of one process that shares nothing; here they are placed by ZeRO stage
and by how the target is held, with what backends and allocators need besides, and compared with
hardware. What is assumed and not computed stands in the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedConfig

from drafthead.train.config import RunConfig
from drafthead.train.hardware import GB, Hardware
from drafthead.train.rehearsal import BatchShape, Footprint, rehearse

GPU_CONTEXT = int(1.0 * GB)
"""What a GPU's context, kernels and communication buffers take."""
GPU_WASTE = 0.10
"""Share of a step's bytes that the caching allocator holds on top of it."""
CPU_FIXED = int(0.13 * GB)
"""Tokenizer, rows and kernels of one process, above what the imports take."""
CPU_WASTE = 0.20
"""Share of a step's bytes that the C heap keeps on top of it: measured, tests/bench/memory.py."""
USABLE = 0.95
"""Share of a device's memory that a forecast may fill."""
BUCKET = 500_000_000
"""Elements of DeepSpeed's default bucket in which gradients are summed over ranks."""
PREFETCH = 50_000_000
"""Elements of a partitioned target that are gathered ahead."""

Holding = Literal["whole", "partitioned", "store"]


@dataclass(frozen=True)
class Case:
    """One way to place a run."""

    ranks: int
    stage: int
    """ZeRO stage of the head; 0 is plain data parallelism, or one process."""
    target: Holding
    """`store`: the states are read, no target is there."""
    offload: bool
    """Optimiser state in host memory."""
    tokens_per_batch: int

    @property
    def title(self) -> str:
        parts = [f"ZeRO-{self.stage}" if self.stage else "no ZeRO", f"target {self.target}"]
        if self.target == "store":
            parts[1] = "states from a store"
        if self.offload:
            parts.append("optimiser offloaded")
        return ", ".join(parts)


@dataclass(frozen=True)
class Need:
    """Bytes of one rank at its peak."""

    case: Case
    parts: dict[str, int]
    host: int
    """Of host memory, for rank 0: what is offloaded, kept or written from there."""

    @property
    def device(self) -> int:
        return sum(self.parts.values())

    def fits(self, hardware: Hardware) -> bool:
        """Whether every rank has a device to itself; on a CPU all share one memory."""
        if hardware.is_cpu:
            return self.case.ranks * (self.device + self.host) <= USABLE * hardware.memory
        return self.case.ranks <= hardware.devices and self.device <= USABLE * hardware.memory


@dataclass(frozen=True)
class DataFacts:
    """What is known of the training rows."""

    positions: int | None
    """Of one epoch; None where nobody can say."""
    largest: BatchShape
    """The largest micro-batch."""
    known: bool
    """Read from the files, not assumed from the settings."""


@dataclass(frozen=True)
class Setting:
    """What all cases share."""

    config: RunConfig
    hardware: Hardware
    print: Footprint
    data: DataFacts
    width: int
    bf16: bool


def assumed(config: RunConfig) -> DataFacts:
    """Rows of the greatest length, all of each supervised: an upper bound."""
    length = config.data.max_length
    rows = max(1, config.training.tokens_per_batch // length)
    return DataFacts(config.data.positions, BatchShape(rows, length), known=False)


def facts_of(
    lengths: Sequence[int], prompts: Sequence[int], batches: Sequence[Sequence[int]]
) -> DataFacts:
    """From the rows themselves: their lengths, the unsupervised starts, the micro-batches."""

    def size(batch: Sequence[int]) -> int:
        return len(batch) * max(lengths[row] for row in batch)

    largest = max(batches, key=size)
    start = sum(prompts[row] for row in largest) // len(largest)
    longest = max(lengths[row] for row in largest)
    shape = BatchShape(len(largest), longest, min(start, longest - 2))
    return DataFacts(sum(lengths), shape, known=True)


def need(at: Setting, case: Case) -> Need:
    """One rank's bytes, by part."""
    f, hardware = at.print, at.hardware
    P, N, stage = 4 * f.trained, case.ranks, case.stage
    shards = N if stage >= 1 else 1
    accumulate = at.config.training.accumulate
    step = max(f.step, f.target_forward if case.target != "store" else 0)
    if accumulate > 1 or stage:
        step += P // (N if stage >= 2 else 1)
    state = {"moments": 2 * P // shards, "master weights": P // shards if stage else 0}
    parts = {
        **_target_parts(at, case),
        "head": f.head - (P - P // N if stage == 3 else 0),
        "teacher states": accumulate * f.batch,
        **({} if case.offload else state),
        "step": step,
        "buckets": _buckets(at, case),
    }
    host = (sum(state.values()) if case.offload else 0) + kept_states(at, case)
    # A checkpoint: weights and both moments are copied, and once more into what is written.
    saving = 2 * 3 * P
    if hardware.is_cpu:
        parts["heap and tokenizer"] = CPU_FIXED + int(CPU_WASTE * step)
        parts["saving"] = max(0, saving - step)  # after a step, when what it made is gone
    else:
        host += saving
        parts["context and allocator"] = GPU_CONTEXT + int(GPU_WASTE * step)
    return Need(case, {name: size for name, size in parts.items() if size}, host)


def _target_parts(at: Setting, case: Case) -> dict[str, int]:
    f = at.print
    if case.target == "whole":
        return {"target": f.target, "borrowed": f.borrowed}
    if case.target == "store":
        return {"borrowed": f.borrowed_alone}
    itemsize = f.target / f.target_weights
    gathered = f.largest_layer + int(PREFETCH * itemsize)
    held = f.target // case.ranks + f.output_rows
    return {
        "target": held,
        "target, gathered": min(gathered, f.target),
        "borrowed": f.borrowed_alone,
    }


def _buckets(at: Setting, case: Case) -> int:
    """What the backend holds to sum gradients in."""
    P = 4 * at.print.trained
    if case.stage == 0:
        return P if case.ranks > 1 else 0
    # Made whole at once, of which a CPU gives only the pages that are touched.
    return min(P, 4 * BUCKET) if at.hardware.is_cpu else 4 * BUCKET


def kept_states(at: Setting, case: Case) -> int:
    """Host memory of states that a run keeps after their first use."""
    training = at.config.training
    if case.target == "store" or training.features not in ("auto", "memory"):
        return 0
    positions = at.data.positions
    if positions is None:
        return 0
    size = positions * (at.print.batch // at.data.largest.positions)
    return size if size <= training.feature_bytes else 0


def cases(asked: Case) -> list[Case]:
    """Every way to place it, from the least far-reaching on."""
    found = []
    for stage in (0, 1, 2, 3):
        for target in ("whole", "partitioned", "store"):
            for offload in (False, True):
                if (offload and not stage) or (target == "partitioned" and stage != 3):
                    continue
                found.append(replace(asked, stage=stage, target=target, offload=offload))
    return found


def smallest(config: RunConfig, target: PreTrainedConfig, at: Setting, asked: Case) -> Need | None:
    """The first that fits: another way to hold it, then smaller micro-batches, then more ranks."""
    ways = sorted(cases(asked), key=lambda case: (case.target == "store", case.offload))
    if asked.target == "store":
        ways = [case for case in ways if case.target == "store"]
    for ranks in _rank_counts(asked.ranks, at.hardware):
        for tokens in _token_counts(config):
            here = at
            if tokens != asked.tokens_per_batch:
                rows = max(1, tokens // at.data.largest.length)
                shape = replace(at.data.largest, rows=rows)
                here = replace(at, print=rehearse(config, target, shape, at.bf16))
            for way in ways:
                case = replace(way, ranks=ranks, tokens_per_batch=tokens)
                found = need(here, case)
                if found.fits(replace(at.hardware, devices=max(ranks, at.hardware.devices))):
                    return found
    return None


def _token_counts(config: RunConfig) -> list[int]:
    """The asked tokens_per_batch and the least that holds a row."""
    asked, least = config.training.tokens_per_batch, config.data.max_length
    return [asked] if asked == least else [asked, least]


def _rank_counts(ranks: int, hardware: Hardware) -> list[int]:
    if hardware.is_cpu:
        return [ranks]
    return [ranks * 2**k for k in range(5)]
