"""Several processes: the same run as one process that accumulates, with and without DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import MakeConfig, events

from drafthead import configs
from drafthead.train.checkpoint import Checkpoint, load_checkpoint
from drafthead.train.config import RunConfig
from drafthead.train.engine import wants_bf16
from drafthead.train.loop import run
from drafthead.train.result import Progress, Tick

BIN = Path(sys.executable).parent
PRESETS = Path(configs.__file__).resolve().parent
SECONDS = 240


def launch(command: list[str], config: RunConfig, folder: Path, *extra: str) -> None:
    """Run `drafthead.train` under a launcher, one thread in each process."""
    file = folder / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    process = subprocess.Popen(
        [*command, "-m", "drafthead.train", "--config", str(file), "--json", *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's workers too
    assert process.returncode == 0, stderr[-4000:]
    # The launcher and DeepSpeed write there too, before the one result of all ranks.
    results = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"head"')]
    assert [result["steps"] for result in results] == [config.training.max_steps]


ZERO2 = [
    str(BIN / "accelerate"),
    "launch",
    "--config_file",
    str(PRESETS / "accelerate/cpu-zero2.yaml"),
    "--main_process_port",
    "0",
]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]


def last(config: RunConfig) -> Checkpoint:
    return load_checkpoint(config.out / "checkpoints/last.safetensors")


def assert_equal_runs(one: RunConfig, two: RunConfig, steps: int) -> None:
    left, right = events(one.out), events(two.out)
    assert [e["step"] for e in left] == [e["step"] for e in right] == list(range(1, steps + 1))
    for a, b in zip(left, right, strict=True):
        assert b["lr"] == a["lr"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    first, second = last(one), last(two)
    assert first.updates == second.updates == steps
    for kind in ("weights", "moments"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert theirs[name].isfinite().all()
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


@pytest.fixture
def single(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    """Twenty steps in one process that accumulates two micro-batches, an odd count per epoch."""
    config = make_config(
        out=str(tmp_path / "single"),
        training={"max_steps": 20, "accumulate": 2, "tokens_per_batch": 160},
    )
    run(config)
    assert len({event["epoch"] for event in events(config.out)}) > 2
    return config


def stop_at(step: int) -> Progress:
    """A progress callback that presses Ctrl-C after so many steps."""

    def stop(tick: Tick) -> None:
        if tick.step == step:
            raise KeyboardInterrupt

    return stop


def two_processes(single: RunConfig, out: Path) -> RunConfig:
    training = single.training.model_copy(update={"accumulate": 1})
    return single.model_copy(update={"training": training, "out": out})


@pytest.mark.slow
def test_two_processes_equal_accumulation(single: RunConfig, tmp_path: Path) -> None:
    """F31, F32, F27: one curve, one gradient, and a rank without a batch keeps step."""
    config = two_processes(single, tmp_path / "ddp")
    launch(TORCHRUN, config, tmp_path)
    assert_equal_runs(single, config, 20)


@pytest.mark.slow
def test_two_zero2_processes_equal_accumulation_and_continue_what_one_process_began(
    single: RunConfig, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    config = two_processes(single, tmp_path / "zero2")
    launch(ZERO2, config, tmp_path)
    assert_equal_runs(single, config, 20)

    begun = single.model_copy(update={"out": tmp_path / "handed-over"})
    with pytest.raises(KeyboardInterrupt):
        run(begun, progress=stop_at(10))
    assert last(begun).state.step == 10
    launch(ZERO2, two_processes(single, begun.out), tmp_path, "--resume")
    assert_equal_runs(single, begun, 20)


@pytest.mark.slow
def test_two_zero2_processes_continue_a_sibling_whose_rows_are_frozen(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its tied embedding and output rows, in bf16, are neither sharded nor moved (F29, F33)."""
    pytest.importorskip("deepspeed")
    training = {"max_steps": 7, "accumulate": 2, "tokens_per_batch": 160, "precision": "bf16"}
    head = {"type": "sibling", "keep_layers": 2}
    config = make_config(out=str(tmp_path / "single"), head=head, training=training)
    run(config)
    assert len({event["epoch"] for event in events(config.out)}) > 1, "a rank had no batch once"
    begun = config.model_copy(update={"out": tmp_path / "handed-over"})
    with pytest.raises(KeyboardInterrupt):
        run(begun, progress=stop_at(3))
    launch(ZERO2, two_processes(config, begun.out), tmp_path, "--resume")
    assert_equal_runs(config, begun, 7)
    rows = [load_file(c.out / "head/model.safetensors") for c in (config, begun)]
    rows.append(load_file(Path(config.target.name) / "model.safetensors"))
    # What was computed with is what is stored.
    one, two, target = (tensors["model.embed_tokens.weight"] for tensors in rows)
    assert torch.equal(one, target.bfloat16().to(one.dtype))
    assert torch.equal(two, one)


def test_precision_auto_follows_the_device() -> None:
    cpu = torch.device("cpu")
    assert wants_bf16("bf16", cpu)
    assert not wants_bf16("fp32", cpu)
    assert wants_bf16("auto", cpu) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_wandb_without_a_key_logs_offline(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config(tracker="wandb", training={"max_steps": 2})
    run(config)
    assert list((config.out / "wandb").glob("offline-run-*"))


def test_a_tracker_that_is_not_installed_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would go on and log nothing."""
    monkeypatch.setattr("drafthead.train.engine.get_available_trackers", lambda: ["wandb"])
    with pytest.raises(ValueError, match=r"tracker: tensorboard is not installed"):
        run(make_config(tracker="tensorboard"))
