"""Start runs of several processes, as a user does: a launcher, a config file, one thread each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_runs import events
from torch import Tensor

from drafthead import configs
from drafthead.train.checkpoint import Checkpoint, load_checkpoint
from drafthead.train.config import RunConfig

BIN = Path(sys.executable).parent
PRESETS = Path(configs.__file__).resolve().parent
DRIVER = str(Path(__file__).with_name("rank_driver.py"))
SECONDS = 400
"""Longer than the slowest launch on a busy machine; a run that hangs takes this long to fail."""

TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]


def accelerate(name: str) -> list[str]:
    """Two processes with one of the shipped configs."""
    file = str(PRESETS / f"accelerate/{name}.yaml")
    port = ["--main_process_port", "0"]
    return [str(BIN / "accelerate"), "launch", "--config_file", file, *port]


ZERO2, ZERO3 = accelerate("cpu-zero2"), accelerate("cpu-zero3")


def write_run(config: RunConfig, folder: Path) -> str:
    """The config as a file; JSON is YAML."""
    file = folder / f"{config.out.name}.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    return str(file)


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a launcher in a session of its own."""
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Its output and its errors; it must end well, and in time."""
    try:
        out, errors = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's workers too
    assert process.returncode == 0, errors[-6000:]
    return out, errors


def drive(launcher: Sequence[str], *arguments: str) -> str:
    """Run `rank_driver.py` on every rank; the errors that all wrote."""
    return finish(start([*launcher, DRIVER, *arguments]))[1]


def train(launcher: Sequence[str], config: RunConfig, folder: Path, *extra: str) -> str:
    """Run the command under a launcher to its end; the errors that all ranks wrote."""
    command = [*launcher, "-m", "drafthead.train", "--config", write_run(config, folder), "--json"]
    out, errors = finish(start([*command, *extra]))
    # The launcher writes there too, beside the one result of all ranks.
    assert "built successfully" not in out, "DeepSpeed prints it in every process"
    results = [json.loads(line) for line in out.splitlines() if line.startswith('{"head"')]
    assert [result["steps"] for result in results] == [config.training.max_steps]
    return errors


def last(config: RunConfig) -> Checkpoint:
    """What a run is resumed from."""
    return load_checkpoint(config.out / "checkpoints/last.safetensors")


def farthest(one: Tensor, two: Tensor) -> float:
    """The largest difference of two tensors of any dtype."""
    return float((one.double() - two.double()).abs().max())


def assert_equal_runs(one: RunConfig, two: RunConfig, steps: int, loss: float = 1e-5) -> None:
    """The same steps, to rounding: sums over ranks are added in another order."""
    left, right = events(one.out), events(two.out)
    assert [e["step"] for e in left] == [e["step"] for e in right] == list(range(1, steps + 1))
    for a, b in zip(left, right, strict=True):
        assert b["lr"] == a["lr"]
        assert b["loss"] == pytest.approx(a["loss"], rel=loss)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        assert (b["epoch"], b["positions"]) == (a["epoch"], a["positions"])
    first, second = last(one), last(two)
    assert first.updates == second.updates == steps
    for kind in ("weights", "moments"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert theirs[name].shape == tensor.shape
            assert theirs[name].isfinite().all()
            apart, most = farthest(theirs[name], tensor), float(tensor.double().abs().max())
            assert apart <= 2e-5 + 1e-3 * most, (name, apart)
