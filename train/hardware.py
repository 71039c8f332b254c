"""What machines can do, as their makers state it, and this one as it is found. It runs no model."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """A number of equal devices."""

    name: str
    devices: int
    memory: int
    """Bytes of one device; of a CPU, all of the machine's."""
    flops: float
    """Dense bf16 operations a second of one device, at its peak."""
    bandwidth: float
    """Bytes a second of one device's memory."""
    link: float
    """Bytes a second between one device and the others, one way."""
    is_cpu: bool = False

    @property
    def title(self) -> str:
        return f"{self.devices} x {self.name} ({self.memory / GB:.0f} GB)"


KNOWN = {
    # GB, dense bf16 Tflop/s, GB/s of memory, GB/s of NVLink or PCIe one way: makers' data sheets
    "A100-40GB": (40, 312, 1555, 300),
    "A100-80GB": (80, 312, 2039, 300),
    "H100-80GB": (80, 989, 3350, 450),
    "H200-141GB": (141, 989, 4800, 450),
    "B200-180GB": (180, 2250, 7700, 900),
    "L40S-48GB": (48, 362, 864, 32),
    "RTX4090-24GB": (24, 165, 1008, 32),
    "MI300X-192GB": (192, 1307, 5300, 448),
}


def parse_hardware(text: str) -> Hardware:
    """`8xH100-80GB`, `H100` or `64xA100-80GB`; ValueError, listing the known ones, for another."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?([A-Za-z0-9-]+)", text.strip())
    asked = found[2].upper() if found else ""
    names = [name for name in KNOWN if asked and name.upper().startswith(asked)]
    if found is None or not names or found[1] == "0":
        raise ValueError(
            f"--hardware {text!r}: write NxNAME with one of {', '.join(KNOWN)}; or give --gpus, "
            "--gpu-memory, --flops and --bandwidth"
        )
    name = names[-1]  # the larger one, where only a family is named
    memory, tera, bandwidth, link = KNOWN[name]
    count = int(found[1] or 1)
    return Hardware(name, count, memory * GB, tera * 1e12, bandwidth * 1e9, link * 1e9)


def changed(
    hardware: Hardware,
    devices: int | None,
    memory_gb: float | None,
    tera_flops: float | None,
    bandwidth_gb: float | None,
) -> Hardware:
    """Lay what a user knows better over it."""
    return replace(
        hardware,
        devices=devices or hardware.devices,
        memory=int(memory_gb * GB) if memory_gb else hardware.memory,
        flops=tera_flops * 1e12 if tera_flops else hardware.flops,
        bandwidth=bandwidth_gb * GB if bandwidth_gb else hardware.bandwidth,
    )


def this_machine(devices: int | None = None) -> Hardware:
    """The GPUs found here, else the CPU, whose speed one matrix product tells."""
    import torch

    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        near = [name for name in KNOWN if name.split("-")[0] in facts.name.replace(" ", "")]
        known = parse_hardware(near[-1] if near else "A100-40GB")
        return replace(
            known,
            name=facts.name,
            devices=devices or torch.cuda.device_count(),
            memory=facts.total_memory,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Processes share its memory's and its cores' speed.
    return Hardware("CPU", devices or 1, memory, _matmul_flops(), 20e9, 10e9, is_cpu=True)


def _matmul_flops() -> float:
    import torch

    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    size = 1024
    matrix = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
