"""Several processes: the same run as one process that accumulates, with and without DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import toy_head  # noqa: F401  registers itself
from launch import (
    TORCHRUN,
    ZERO2,
    ZERO3,
    assert_equal_runs,
    drive,
    farthest,
    last,
    train,
    write_run,
)
from rank_driver import gradient
from safetensors.torch import load_file
from tiny_runs import MakeConfig, events, write_chats
from trainers import poison

from drafthead.inference.target import load_target
from drafthead.train.config import RunConfig
from drafthead.train.engine import wants_bf16
from drafthead.train.loop import run
from drafthead.train.result import Progress, Tick

STEPS = 20


@pytest.fixture
def single(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    """Twenty steps in one process that accumulates four micro-batches, an odd count per epoch."""
    config = make_config(
        out=str(tmp_path / "single"),
        training={"max_steps": STEPS, "accumulate": 4, "tokens_per_batch": 160},
    )
    run(config)
    assert len({event["epoch"] for event in events(config.out)}) > 2
    return config


def stop_at(step: int) -> Progress:
    """A progress callback that presses Ctrl-C amid the step after so many."""

    def stop(tick: Tick) -> None:
        if tick.step == step:
            raise KeyboardInterrupt

    return stop


def halved(one: RunConfig, out: Path, partition: bool = False) -> RunConfig:
    """The same global batch for two processes."""
    accumulate = one.training.accumulate // 2
    changed = {"accumulate": accumulate, "partition_target": partition}
    training = one.training.model_copy(update=changed)
    return one.model_copy(update={"training": training, "out": out})


def assert_exact(one: RunConfig, two: RunConfig) -> None:
    """F30: an interrupted run made the same steps, to the last digit."""
    left, right = events(one.out), events(two.out)
    assert [e["step"] for e in right] == [e["step"] for e in left]
    for a, b in zip(left, right, strict=True):
        for name in a.keys() - {"positions_per_s", "data_wait"}:
            assert b[name] == pytest.approx(a[name], abs=1e-6), (a["step"], name)
    first, second = last(one), last(two)
    assert first.updates == second.updates
    for mine, theirs in ((first.weights, second.weights), (first.moments, second.moments)):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert farthest(theirs[name], tensor) <= 1e-6, name


@pytest.mark.slow
def test_f27_f31_two_processes_equal_one_that_accumulates(
    single: RunConfig, tmp_path: Path
) -> None:
    """One curve of rates, one gradient; the rank that has no batch at an epoch's end keeps step."""
    config = halved(single, tmp_path / "ddp")
    train(TORCHRUN, config, tmp_path)
    assert_equal_runs(single, config, STEPS)


@pytest.mark.slow
def test_f32_two_processes_have_the_gradient_of_one_batch(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A short and a long answer: together, one after the other, and each on its rank."""
    write_chats(tmp_path / "two.jsonl", [1, 30])
    data = {"train": str(tmp_path / "two.jsonl"), "heldout": (), "max_length": 128}
    grads = {}
    for name, training in (
        ("together", {"tokens_per_batch": 512}),
        ("apart", {"tokens_per_batch": 128, "accumulate": 2}),
        ("ranks", {"tokens_per_batch": 128}),
    ):
        config = make_config(out=str(tmp_path / name), data=data, training=training)
        file = tmp_path / f"{name}.safetensors"
        if name == "ranks":
            drive(TORCHRUN, "gradient", write_run(config, tmp_path), str(file))
        else:
            gradient(config, file)
        grads[name] = load_file(file)
    assert grads["together"].keys() == grads["apart"].keys() == grads["ranks"].keys()
    for name, tensor in grads["apart"].items():
        assert (grads["ranks"][name] - tensor).abs().max() <= 1e-6, name
    whole = torch.cat([t.flatten() for t in grads["together"].values()])
    halves = torch.cat([t.flatten() for t in grads["apart"].values()])
    # Not to the last digit: a state that rounds the other way in bf16 differs with its batch.
    assert (halves - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "partition"), [(ZERO2, False), (ZERO3, True)], ids=["2", "3"])
def test_f28_f30_zero_resumes_exactly_with_any_number_of_processes(
    single: RunConfig, tmp_path: Path, launcher: list[str], partition: bool
) -> None:
    """Preempted amid a step and an epoch, on one rank alone; gone on with by two processes, and by
    one, which two relieve again.
    """
    pytest.importorskip("deepspeed")
    whole = halved(single, tmp_path / "whole", partition)
    train(launcher, whole, tmp_path)
    assert_equal_runs(single, whole, STEPS, loss=1e-4)

    cut = halved(single, tmp_path / "cut", partition)
    errors = drive(launcher, "run", write_run(cut, tmp_path), "--sigterm-in", "8")
    assert "saved as it was after step 8" in errors
    assert last(cut).state.step == 8
    assert last(cut).state.position > 0
    assert_whole_tensors(cut, single)
    handed_over = single.model_copy(update={"out": tmp_path / "handed-over"})
    shutil.copytree(cut.out, handed_over.out)

    errors = train(launcher, cut, tmp_path, "--resume")
    weights = load_target(single.target.name, "float32").num_weights
    assert f"frozen: {weights} weights of the target" in errors, "in parts or not"
    assert_exact(whole, cut)

    with pytest.raises(KeyboardInterrupt):
        run(handed_over, resume=True, progress=stop_at(13))
    assert last(handed_over).state.step == 13
    errors = train(launcher, halved(single, handed_over.out, partition), tmp_path, "--resume")
    assert "a step was" not in errors, "the global batch is the same"
    assert_equal_runs(single, handed_over, STEPS, loss=1e-4)


def assert_whole_tensors(saved: RunConfig, single: RunConfig) -> None:
    """F28: exactly the head's own weights, in full shape; nothing of the target."""
    kept, wanted = last(saved).weights, last(single).weights
    assert {n: t.shape for n, t in kept.items()} == {n: t.shape for n, t in wanted.items()}
    assert all(tensor.numel() for tensor in kept.values())
    assert {t.dtype for t in kept.values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_f28_two_zero3_processes_continue_a_sibling_whose_rows_are_frozen(
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
    train(ZERO3, halved(config, begun.out), tmp_path, "--resume")
    assert_equal_runs(config, begun, 7)
    rows = [load_file(c.out / "head/model.safetensors") for c in (config, begun)]
    rows.append(load_file(Path(config.target.name) / "model.safetensors"))
    # What was computed with is what is stored.
    one, two, target = (tensors["model.embed_tokens.weight"] for tensors in rows)
    assert torch.equal(one, target.bfloat16().to(one.dtype))
    assert torch.equal(two, one)
    assert rows[1].keys() == rows[0].keys()


@pytest.mark.slow
def test_f26_f27_a_bad_sample_on_one_rank_costs_both_the_same_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    config = make_config(
        out=str(tmp_path / "single"),
        target=poison(tmp_path),
        data={"train": str(tmp_path / "one.jsonl"), "heldout": ()},
        head={"type": "toy", "unroll_steps": 1},
        training={"epochs": 1, "tokens_per_batch": 128, "accumulate": 2},
    )
    assert run(config).skipped == 1
    two = halved(config, tmp_path / "two")
    drive(ZERO3, "run", write_run(two, tmp_path))
    assert json.loads((two.out / "result.json").read_text())["skipped"] == 1
    assert [e["grad_norm"] for e in events(two.out)].count(None) == 1
    for name, tensor in last(config).weights.items():
        torch.testing.assert_close(last(two).weights[name], tensor, rtol=1e-3, atol=2e-5)


def test_precision_auto_follows_the_device() -> None:
    cpu = torch.device("cpu")
    assert wants_bf16("bf16", cpu)
    assert not wants_bf16("fp32", cpu)
    assert wants_bf16("auto", cpu) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_wandb_without_a_key_logs_offline_and_a_resumed_run_to_the_same_one(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config(tracker="wandb", training={"max_steps": 2})
    for sitting in range(2):
        run(config, resume=sitting > 0)
    first, second = (config.out / "wandb").glob("offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]


def test_a_tracker_that_is_not_installed_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would go on and log nothing."""
    monkeypatch.setattr("drafthead.train.engine.get_available_trackers", lambda: ["wandb"])
    with pytest.raises(ValueError, match=r"tracker: tensorboard is not installed"):
        run(make_config(tracker="tensorboard"))
