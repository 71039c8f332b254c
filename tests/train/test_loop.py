"""The loop on real, tiny runs: what it trains, divides by, skips, writes, and how it stops."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import toy_head  # noqa: F401  registers itself
from tiny_runs import MakeConfig, events, write_chats
from trainers import first_gradient, make_trainer, poison

from drafthead.heads import load_head
from drafthead.train.checkpoint import head_weights, load_checkpoint
from drafthead.train.config import ScheduleConfig, load_config
from drafthead.train.interrupt import StopRequest
from drafthead.train.loop import DivergedError, run
from drafthead.train.schedule import Limits, learning_rate


def test_a_run_leaves_everything_it_promises(make_config: MakeConfig) -> None:
    config = make_config(target={"revision": "main"}, training={"epochs": 2, "eval_every": 5})
    result = run(config)
    assert result.steps == len(events(config.out)) == len({e["step"] for e in events(config.out)})
    begun = {e["epoch"]: e["positions"] for e in reversed(events(config.out))}
    assert result.positions == begun[2] == 2 * begun[1], "every epoch sees every position"
    assert result.positions_per_s > 0
    assert {"target", "forward", "loss", "backward", "optimiser"} <= result.shares.keys()
    assert sum(result.shares.values()) == pytest.approx(1.0)
    figures = json.loads((config.out / "evaluation.json").read_text())
    assert figures["step"] == result.best_step
    assert figures["simulated_tau"] == result.simulated_tau
    known = json.loads((config.out / "run.json").read_text())
    assert known["versions"]["torch"]
    assert known["machine"]["cores"] == os.cpu_count()
    assert load_config(config.out / "config.yaml") == config
    best = load_checkpoint(config.out / "checkpoints/best.safetensors")
    head = load_head(result.head)
    assert head.contract.revision == "main"
    assert all(torch.equal(t, best.weights[n]) for n, t in head_weights(head).items())
    losses = [event["loss"] for event in events(config.out)]
    assert losses[-1] < losses[0]


def test_long_prompts_leave_nothing_to_learn_and_are_refused_before_the_target_loads(
    make_config: MakeConfig, tmp_path: Path, target_folder: Path
) -> None:
    """F04: eight chats whose question fills the row."""
    write_chats(tmp_path / "long.jsonl", [3] * 8, question=200)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in target_folder.iterdir():
        if "safetensors" not in file.name:
            (bare / file.name).write_bytes(file.read_bytes())
    config = make_config(
        data={"train": str(tmp_path / "long.jsonl"), "max_length": 64},
        target={"name": str(bare)},
    )
    with pytest.raises(ValueError, match="max_length 64"):
        run(config)


def test_rows_without_an_answer_left_are_dropped_and_every_loss_is_finite(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F04: four such chats among four good ones."""
    write_chats(tmp_path / "mixed.jsonl", [3] * 4, question=200)
    good = write_chats(tmp_path / "good.jsonl", [6] * 4)
    with (tmp_path / "mixed.jsonl").open("a") as file:
        file.write(good.read_text())
    config = make_config(
        data={"train": str(tmp_path / "mixed.jsonl"), "max_length": 120},
        training={"max_steps": 6, "tokens_per_batch": 120},
    )
    run(config)
    assert "4 rows skipped" in caplog.text
    losses = [event["loss"] for event in events(config.out)]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    weights = load_checkpoint(config.out / "checkpoints/last.safetensors").weights
    assert all(w.isfinite().all() for w in weights.values())


def test_f32_the_gradient_of_a_batch_is_that_of_its_halves_accumulated(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A short and a long answer, together and one after the other (two ranks: test_engine)."""
    write_chats(tmp_path / "two.jsonl", [1, 30])
    data = {"train": str(tmp_path / "two.jsonl"), "heldout": (), "max_length": 128}
    together = first_gradient(make_config(data=data, training={"tokens_per_batch": 512}))
    apart = first_gradient(
        make_config(data=data, training={"tokens_per_batch": 128, "accumulate": 2})
    )
    assert together.keys() == apart.keys()
    whole, halves = (torch.cat([g[n].flatten() for n in together]) for g in (together, apart))
    # Not to the last digit: a state that rounds the other way in bf16 differs with its batch.
    assert (halves - whole).norm() < 1e-5 * whole.norm()


def test_memory_and_online_features_give_equal_losses(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    losses = []
    for features in ("memory", "online"):
        config = make_config(
            out=str(tmp_path / features), training={"max_steps": 10, "features": features}
        )
        run(config)
        losses.append([event["loss"] for event in events(config.out)])
    assert losses[0] == losses[1]


def test_f29_only_the_head_is_trained_and_the_target_stays_as_it_was(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Five steps with weight decay on."""
    config = make_config(training={"max_steps": 5}, optimiser={"weight_decay": 0.5})
    trainer = make_trainer(config)
    target, head = trainer.parts.target.model, trainer.parts.head
    borrowed = {n: b for n, b in head.named_buffers() if b is not None}
    before = {n: t.clone() for n, t in [*target.named_parameters(), *borrowed.items()]}
    start = head_weights(head)
    trainer.train(StopRequest())
    for name, tensor in [*target.named_parameters(), *borrowed.items()]:
        assert torch.equal(tensor, before[name]), name
    assert not any(module.training for module in target.modules())
    assert not any(p.requires_grad for p in target.parameters())
    held = trainer.engine.optimised()
    assert {id(p) for p in held} == {id(p) for p in trainer.parts.trainable.values()}
    assert any(not torch.equal(t, start[n]) for n, t in head_weights(head).items())


def test_f26_one_bad_sample_costs_one_step_and_many_in_a_row_stop_the_run(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state of 1e30 is finite, its gradient's norm is not."""
    target = poison(tmp_path)
    head = {"type": "toy", "unroll_steps": 1}
    training = {"epochs": 1, "tokens_per_batch": 128, "precision": "fp32"}

    config = make_config(
        target=target, head=head, training=training, data={"train": str(tmp_path / "one.jsonl")}
    )
    result = run(config)
    assert result.skipped == 1
    assert "bad" in next(r.getMessage() for r in caplog.records if "skipped" in r.getMessage())
    weights = load_checkpoint(config.out / "checkpoints/last.safetensors").weights
    assert all(w.isfinite().all() for w in weights.values())

    training = {**training, "save_every": 1, "max_skips": 3, "epochs": 3}
    config = make_config(
        out=str(tmp_path / "diverged"),
        target=target,
        head=head,
        training=training,
        data={"train": str(tmp_path / "all.jsonl")},
    )
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run(config)
    weights = load_checkpoint(config.out / "checkpoints/last.safetensors").weights
    assert all(w.isfinite().all() for w in weights.values())


def test_one_chat_is_learned_at_every_depth(make_config: MakeConfig, tmp_path: Path) -> None:
    """F38: no depth is left untrained."""
    write_chats(tmp_path / "one.jsonl", [10])
    config = make_config(
        data={"train": str(tmp_path / "one.jsonl"), "heldout": str(tmp_path / "one.jsonl")},
        head={"type": "eagle3", "layers": (1, 2, 3), "draft_vocab_size": None, "unroll_steps": 3},
        training={"max_steps": 300, "epochs": None},
        optimiser={"lr": 1e-2},
    )
    result = run(config)
    last = events(config.out)[-1]
    assert [last[f"simulated_match_{depth}"] for depth in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert result.simulated_tau is not None


@pytest.mark.slow
def test_f33_small_updates_are_not_lost_in_bf16(make_config: MakeConfig, tmp_path: Path) -> None:
    """At this rate, weights kept in bf16 would never leave 1."""
    write_chats(tmp_path / "one.jsonl", [10])
    norms = {}
    for precision in ("fp32", "bf16"):
        config = make_config(
            out=str(tmp_path / precision),
            data={"train": str(tmp_path / "one.jsonl"), "heldout": ()},
            optimiser={"lr": 1e-4},
            schedule={"kind": "constant", "warmup_steps": 0},
            training={"max_steps": 400, "epochs": None, "precision": precision},
        )
        run(config)
        checkpoint = load_checkpoint(config.out / "checkpoints/last.safetensors")
        assert {t.dtype for t in checkpoint.moments.values()} == {torch.float32}
        assert all(t.dtype != torch.bfloat16 for t in checkpoint.weights.values())
        norms[precision] = checkpoint.weights["layers.0.input_layernorm.weight"]
    for norm in norms.values():
        assert norm.dtype == torch.float32
        assert (norm - 1).abs().max() > 0.005
    assert (norms["fp32"] - norms["bf16"]).abs().max() < 0.02


def test_f31_the_schedule_ends_at_its_last_step_whatever_the_accumulation(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Forty steps; two processes: test_engine."""
    curves = []
    for accumulate in (1, 4):
        config = make_config(
            out=str(tmp_path / str(accumulate)),
            head={"type": "toy", "unroll_steps": 1},
            training={"max_steps": 40, "accumulate": accumulate},
            schedule={"warmup_steps": 5, "min_ratio": 0.1},
        )
        run(config)
        curves.append([event["lr"] for event in events(config.out)])
    assert curves[0] == curves[1]
    end = 0.1 * 2e-3
    assert curves[0][-1] == pytest.approx(end)
    assert all(rate > end * 1.0001 for rate in curves[0][6:-1])
    assert max(curves[0]) == curves[0][5] == 2e-3


def test_under_a_limit_of_time_the_rate_follows_the_share_that_is_gone() -> None:
    schedule = ScheduleConfig(kind="linear", warmup_steps=2)
    limits = Limits(steps=None, seconds=100.0)
    assert learning_rate(1.0, schedule, limits, 0, 0.0) == pytest.approx(1 / 3)
    assert learning_rate(1.0, schedule, limits, 50, 25.0) == pytest.approx(0.75)
    assert learning_rate(1.0, schedule, limits, 90, 100.0) == 0.0
    assert limits.reached(3, 100.0)
    assert not limits.reached(3, 99.0)
    both = Limits(steps=11, seconds=100.0)
    assert learning_rate(1.0, schedule, both, 9, 10.0) == pytest.approx(1 - 7 / 8)


def test_a_limit_of_minutes_ends_a_run_and_counts_over_sittings(make_config: MakeConfig) -> None:
    training = {"max_minutes": 2.0 / 60, "epochs": None, "max_steps": None}
    config = make_config(training=training, head={"type": "toy", "unroll_steps": 1})
    result = run(config)
    assert 2.0 <= result.seconds < 20.0
    assert events(config.out)[-1]["lr"] < 0.1 * 2e-3
    again = run(config, resume=True)
    assert again.steps == result.steps


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file over `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_f37_a_folder_that_cannot_hold_the_head_is_an_error_and_keeps_the_last_checkpoint(
    make_config: MakeConfig,
) -> None:
    """A full disk; without it the folder holds config and weights."""
    result = run(make_config(training={"max_steps": 2}))
    assert {"config.json", "model.safetensors"} <= {path.name for path in result.head.iterdir()}
    config = make_config(training={"max_steps": 4})
    path = config.out / "checkpoints/last.safetensors"
    before = path.read_bytes()
    with largest_file(20_000), pytest.raises(OSError, match=r"could not be written|File too large"):
        run(config, resume=True)
    assert path.read_bytes() == before
    assert run(config, resume=True).steps == 4


def wait_for(condition: object, seconds: float = 120.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_and_sigterm_save_what_was_done_sitting_after_sitting(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """An interrupted command ends with 130; a preempted one did all it could, and ends with 0."""
    config = make_config(training={"max_steps": 100_000, "epochs": None})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "drafthead.train", "--config", str(file)]
    done = 0
    for sitting, (sent, code) in enumerate(
        [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGINT, 130)]
    ):
        extra = ["--resume"] if sitting else []
        process = subprocess.Popen(command + extra, stderr=subprocess.PIPE, text=True)
        metrics = config.out / "metrics.jsonl"
        goal = done + 5

        def far_enough(goal: int = goal, metrics: Path = metrics) -> bool:
            return metrics.exists() and metrics.read_text().count('"event": "step"') >= goal

        wait_for(far_enough)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr
        assert "stopped; saved as it was after step" in stderr
        assert "--resume continues" in stderr.splitlines()[-1]
        state = load_checkpoint(config.out / "checkpoints/last.safetensors").state
        assert state.step >= goal
        assert [event["step"] for event in events(config.out)] == list(range(1, state.step + 1))
        done = state.step
    command += ["--resume", f"training.max_steps={done + 2}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert len(events(config.out)) == done + 2


@pytest.mark.slow
def test_a_users_mistake_is_one_line_and_exit_2(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(make_config().model_dump(mode="json")))
    command = [sys.executable, "-m", "drafthead.train", "--config", str(file)]
    command.append("training.max_step=3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: training.max_step: unknown setting")
    assert done.stderr.count("\n") == 1
