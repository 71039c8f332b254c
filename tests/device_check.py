"""Judges what tests/device.sh has left in a folder: python device_check.py OUT cpu|cuda."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any


def read(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


def identity_of(record: dict[str, Any]) -> tuple[int, int]:
    """Prompts equal to plain decoding in float32, of so many compared."""
    found = record["identical"]
    assert found["of"] > 0, "nothing was compared"
    assert found["dtype"] == "float32"
    return int(found["equal"]), int(found["of"])


def main() -> None:
    out, device = Path(sys.argv[1]), sys.argv[2]
    trained, resumed = read(out, "train"), read(out, "resume")
    assert trained["steps"] > 0
    assert trained["skipped"] == 0
    assert math.isfinite(trained["simulated_tau"])
    assert resumed["steps"] == trained["steps"], "a finished run has nothing left to do"
    lines = [f"{device}: {trained['steps']} steps, {trained['positions_per_s']:.0f} positions/s"]
    for shape in ("chain", "tree"):
        records = read(out, f"evaluate-{shape}")["cells"][0]["records"]
        drafted = {name: record for name, record in records.items() if "tau" in record}
        assert "head" in drafted
        for name, record in drafted.items():
            equal, compared = identity_of(record)
            assert equal == compared, f"{shape}, {name}: {equal} of {compared} equal in float32"
            speed = record["tokens_per_s"]
            lines.append(f"{shape}, {name}: tau {record['tau']:.2f}, {speed:.1f} tokens/s")
    assert read(out, "generate")["new_tokens"] > 0
    if device == "cuda":
        import torch

        forecast = read(out, "forecast")["asked"]["device"] / 1e9
        lines.append(f"forecast {forecast:.1f} GB on {torch.cuda.get_device_name(0)}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
