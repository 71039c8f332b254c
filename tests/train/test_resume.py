"""Resuming is exact (F30); checkpoints are whole, and refused where they do not belong."""

from __future__ import annotations

import importlib
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_head  # noqa: F401  registers itself
from safetensors.torch import load_file
from tiny import tiny_head, tiny_target
from tiny_runs import MakeConfig, events, write_chats

from drafthead.data.files import held
from drafthead.heads import load_head
from drafthead.heads.contract import ContractError
from drafthead.train.checkpoint import (
    CheckpointError,
    head_weights,
    load_checkpoint,
    load_weights,
    same_tensors,
    save_checkpoint,
    save_head,
)
from drafthead.train.config import RunConfig
from drafthead.train.interrupt import Preempted
from drafthead.train.loop import run
from drafthead.train.result import Tick


class InterruptAt:
    """A progress callback that presses Ctrl-C after so many micro-batches of training."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def __call__(self, tick: Tick) -> None:
        if tick.phase == "train":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def straight_and_cut(
    make_config: MakeConfig, tmp_path: Path, cuts: list[int], **groups: Any
) -> tuple[RunConfig, RunConfig]:
    """Run once straight, and once interrupted after each of these counts of micro-batches."""
    whole = make_config(out=str(tmp_path / "whole"), **groups)
    cut = make_config(out=str(tmp_path / "cut"), **groups)
    run(whole)
    for index, batches in enumerate(cuts):
        with pytest.raises(KeyboardInterrupt):
            run(cut, resume=index > 0, progress=InterruptAt(batches))
    run(cut, resume=True)
    return whole, cut


def assert_same_run(whole: RunConfig, cut: RunConfig) -> None:
    left, right = events(whole.out), events(cut.out)
    assert [e["step"] for e in right] == [e["step"] for e in left]
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"positions_per_s", "data_wait"}:
            assert b[name] == pytest.approx(a[name], abs=1e-6), (a["step"], name)
    first = load_checkpoint(whole.out / "checkpoints/last.safetensors")
    second = load_checkpoint(cut.out / "checkpoints/last.safetensors")
    assert first.updates == second.updates
    for one, two in ((first.weights, second.weights), (first.moments, second.moments)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("features", ["memory", "online"])
def test_f30_twelve_steps_equal_six_and_six_cut_mid_epoch_and_mid_accumulation(
    make_config: MakeConfig, tmp_path: Path, features: str
) -> None:
    # 13 micro-batches after 6 steps of 2 and one half: the half is run again.
    training = {"max_steps": 12, "accumulate": 2, "eval_every": 4, "features": features}
    training |= {"precision": "fp32", "tokens_per_batch": 192}
    whole, cut = straight_and_cut(make_config, tmp_path, [13], training=training)
    assert_same_run(whole, cut)
    assert len(events(whole.out)) == 12
    assert len({e["epoch"] for e in events(whole.out)}) > 2
    left, right = events(whole.out, "evaluation"), events(cut.out, "evaluation")
    assert left == right


def test_resuming_twice_and_with_a_head_that_draws_random_numbers(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    head = {"type": "toy", "dropout": 0.5, "unroll_steps": 2}
    training = {"precision": "fp32", "tokens_per_batch": 192, "max_steps": 9}
    whole, cut = straight_and_cut(make_config, tmp_path, [3, 2], head=head, training=training)
    assert_same_run(whole, cut)


def raise_in(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, number: signal.Signals, times: int = 1
) -> None:
    """Let this process get a signal while a function of the trainer runs."""
    real = getattr(importlib.import_module(module), name)

    def wrapped(*args: Any) -> Any:
        for _ in range(times):
            signal.raise_signal(number)
        return real(*args)

    monkeypatch.setattr(f"{module}.{name}", wrapped)


@pytest.mark.parametrize(
    ("module", "name", "step"),
    [
        ("drafthead.train.loop", "assemble", 0),
        ("drafthead.train.loop", "simulate", 2),
        ("drafthead.train.keeper", "save_checkpoint", 2),
    ],
    ids=["before the first step", "amid an evaluation", "amid a checkpoint"],
)
def test_sigterm_at_any_time_saves_and_the_run_goes_on_as_if_nothing_had_been(
    make_config: MakeConfig, tmp_path: Path, module: str, name: str, step: int
) -> None:
    """Twice, as clusters send it."""
    training = {"max_steps": 5, "eval_every": 2, "save_every": 2, "precision": "fp32"}
    whole = make_config(out=str(tmp_path / "whole"), training=training)
    run(whole)
    cut = make_config(out=str(tmp_path / "cut"), training=training)
    with pytest.MonkeyPatch.context() as monkeypatch:
        raise_in(monkeypatch, module, name, signal.SIGTERM, times=2)
        with pytest.raises(Preempted) as stop:
            run(cut)
    assert stop.value.code == 0
    assert load_checkpoint(cut.out / "checkpoints/last.safetensors").state.step == step
    run(cut, resume=True)
    assert_same_run(whole, cut)
    assert events(whole.out, "evaluation") == events(cut.out, "evaluation")


def test_another_global_batch_is_told_and_keeps_to_the_epochs(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it is stopped once more, and where the epochs are over."""
    training = {"epochs": 2, "accumulate": 2, "tokens_per_batch": 160}
    smaller = make_config(training={**training, "accumulate": 1})
    config = make_config(training=training)
    with pytest.raises(KeyboardInterrupt):
        run(config, progress=InterruptAt(5))
    positions = events(config.out)[-1]["positions"]
    with pytest.raises(KeyboardInterrupt):
        run(smaller, resume=True, progress=InterruptAt(2))
    assert "a step was 2 micro-batches over all ranks" in caplog.text
    steps = run(smaller, resume=True).steps
    last = events(config.out)[-1]
    each = next(e["positions"] for e in events(config.out) if e["epoch"] == 1)
    assert positions < each
    assert (last["epoch"], last["positions"]) == (2, 2 * each)
    run(config, resume=True)
    assert run(smaller, resume=True).steps == steps


def test_a_best_checkpoint_that_is_gone_is_made_anew(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """As where only the last one was copied to another machine."""
    training = {"max_steps": 2, "eval_every": 1}
    config = make_config(training=training)
    run(config)
    (config.out / "checkpoints/best.safetensors").unlink()
    result = run(make_config(training={**training, "max_steps": 3}), resume=True)
    assert "best.safetensors: no longer there" in caplog.text
    assert result.best_step == 3
    (config.out / "evaluation.json").unlink()
    result = run(make_config(training={**training, "max_steps": 3}), resume=True)
    assert result.best_step == 3
    assert len(result.simulated_survival) == config.head.unroll_steps


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    config.out.mkdir()
    # Root may write everywhere, so that permissions would not make it one.
    monkeypatch.setattr("drafthead.train.record.os.access", lambda path, mode: False)
    monkeypatch.delattr("drafthead.train.loop.assemble")
    with pytest.raises(PermissionError, match=r"out: .* cannot be written"):
        run(config)


def test_other_settings_are_refused_before_anything_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(make_config(training={"max_steps": 1}))
    monkeypatch.delattr("drafthead.train.loop.assemble")
    with pytest.raises(CheckpointError, match="other settings of head;"):
        run(make_config(training={"max_steps": 4}, head={"unroll_steps": 3}), resume=True)


def test_a_finished_run_is_not_run_over_and_an_absent_one_is_not_resumed(
    make_config: MakeConfig,
) -> None:
    config = make_config(training={"max_steps": 2})
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume"):
        run(config, resume=True)
    run(config)
    before = (config.out / "checkpoints/last.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="holds a run already"):
        run(config)
    result = run(config, resume=True)
    assert result.steps == 2
    assert load_file(config.out / "checkpoints/last.safetensors").keys()
    assert len(events(config.out)) == 2
    assert len(before) == (config.out / "checkpoints/last.safetensors").stat().st_size


def test_a_checkpoint_of_other_settings_is_refused_by_name(make_config: MakeConfig) -> None:
    run(make_config(training={"max_steps": 2}))
    with pytest.raises(CheckpointError, match="other settings of head;"):
        run(make_config(training={"max_steps": 4}, head={"unroll_steps": 3}), resume=True)
    with pytest.raises(CheckpointError, match=r"other settings of training\.seed;"):
        run(make_config(training={"max_steps": 4, "seed": 1}), resume=True)


def test_other_settings_that_a_run_may_go_on_with_are_told(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_config(training={"max_steps": 1}))
    assert "other settings" not in caplog.text
    run(make_config(training={"max_steps": 2}, optimiser={"lr": 1e-4}), resume=True)
    assert "than before: optimiser.lr, training.max_steps" in caplog.text


def test_other_content_under_the_same_names_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(training={"max_steps": 2})
    run(config)
    write_chats(tmp_path / "heldout.jsonl", [8] * 6, seed=2)
    with pytest.raises(CheckpointError, match=r"of data \(content of the files\);"):
        run(config, resume=True)


def test_a_folder_in_which_another_run_writes_is_left_to_it(make_config: MakeConfig) -> None:
    config = make_config(training={"max_steps": 1})
    config.out.mkdir()
    with held(config.out), pytest.raises(ValueError, match="another process writes here"):
        run(config)
    assert list(config.out.iterdir()) == []


def test_the_result_tells_of_the_weights_it_saved(make_config: MakeConfig) -> None:
    """A killed run leaves a best checkpoint from after the one that is gone on from."""
    config = make_config(training={"max_steps": 2})
    run(config)
    path = config.out / "checkpoints/best.safetensors"
    best = load_checkpoint(path)
    later = replace(best.state, step=3, best_step=3, best_tau=7.0)
    save_checkpoint(path, replace(best, state=later))
    result = run(config, resume=True)
    assert (result.best_step, result.simulated_tau) == (3, 7.0)


def test_a_head_is_saved_over_links_and_what_a_kill_left(tmp_path: Path) -> None:
    head = tiny_head(tiny_target())
    folder = tmp_path / "head"
    folder.symlink_to(tmp_path / "real", target_is_directory=True)
    for _ in range(3):
        save_head(head, folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "real"]
    (tmp_path / "real").rename(tmp_path / ".real.old")  # killed between two renames
    assert not folder.exists()
    save_head(head, folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "real"]
    assert same_tensors(head_weights(load_head(folder)), head_weights(head))
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert len(modes) == 1, "as readable as its folder"


def test_a_checkpoint_of_another_target_is_refused(make_config: MakeConfig) -> None:
    config = make_config(training={"max_steps": 1})
    run(config)
    path = config.out / "checkpoints/last.safetensors"
    checkpoint = load_checkpoint(path)
    other = checkpoint.contract.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(ContractError, match="fingerprint"):
        checkpoint.check(config.identity(), other, path)


def test_f26_f37_a_checkpoint_that_is_not_finite_leaves_the_old_one(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Neither as the last nor as the best."""
    config = make_config(training={"max_steps": 1})
    run(config)
    path = config.out / "checkpoints/last.safetensors"
    before = path.read_bytes()
    checkpoint = load_checkpoint(path)
    checkpoint.weights["fc.weight"].fill_(float("nan"))
    with pytest.raises(CheckpointError, match="is not finite"):
        save_checkpoint(path, checkpoint)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(path)


def test_weights_of_another_shape_are_refused() -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="'weight'"):
        load_weights(small, head_weights(large))
