"""A target in parts over two ranks is the target: its states, its contract, and what it costs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from launch import ZERO3, drive, write_run
from tiny_runs import MakeConfig
from trainers import make_trainer

from drafthead.train.engine import Engine
from drafthead.train.objective import Objective
from drafthead.train.partitioned import tell_of_locks
from drafthead.train.teacher import blank


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_f28_a_partitioned_target_gives_the_states_of_the_whole_one(
    make_config: MakeConfig, tmp_path: Path, dtype: str
) -> None:
    """To the last bit, while one rank asks three times as often; each rank holds half of it."""
    pytest.importorskip("deepspeed")
    config = make_config(training={"partition_target": True})
    target = config.target.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"target": target})
    drive(ZERO3, "target", write_run(config, tmp_path), str(tmp_path / "facts"))
    for rank in range(2):
        facts = json.loads((tmp_path / f"facts.{rank}").read_text())
        assert facts["same"] == [True] * 3 * (1 + 2 * rank)
        assert facts["contract"]
        assert facts["fingerprint"]
        assert facts["weights"]
        assert facts["dtype"] == f"torch.{dtype}"
        assert not facts["training"]
        assert not facts["gradients"]
        assert 0.45 < facts["bytes"] / facts["whole_bytes"] < 0.55


def test_a_target_is_not_partitioned_without_deepspeed(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"training\.partition_target: only DeepSpeed"):
        Engine(make_config(training={"partition_target": True}))


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed waits for it without a word; that of a rank which starts now is none."""
    lock = tmp_path / "py311_cpu/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    tell_of_locks()
    assert not caplog.text
    os.utime(lock, (0, 0))
    tell_of_locks()
    assert f"{lock}: DeepSpeed waits" in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        {"type": "eagle3", "layers": (1, 2, 3), "draft_vocab_size": 256, "own_rows": True},
        {"type": "eagle3", "layers": (1, 2), "draft_vocab_size": None, "norm_output": True},
        {"type": "sibling", "keep_layers": 2},
    ],
    ids=["eagle3 with rows", "eagle3", "sibling"],
)
def test_f27_a_batch_with_nothing_supervised_gives_every_weight_a_gradient(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, head: dict[str, object]
) -> None:
    """By the head's own graph: where ZeRO shards weights, nothing else connects them, and ranks
    that reduce other gradients wait for ever.
    """
    monkeypatch.setattr(Objective, "_anchor", lambda self: torch.zeros(()))
    trainer = make_trainer(make_config(head=head))
    batch = blank(trainer.parts.train.batch(0))
    trainer.model(batch, 1.0).loss.backward()
    for name, parameter in trainer.parts.trainable.items():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
