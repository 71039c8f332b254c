"""A target in parts over two ranks is the target: its states, its contract, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import ZERO3, drive, write_run
from tiny_runs import MakeConfig
from trainers import make_trainer

from drafthead.train.engine import Engine
from drafthead.train.objective import Objective
from drafthead.train.partitioned import leave_sums_to_gloo
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


def test_deepspeed_compiles_nothing_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed
    from deepspeed.comm.torch import build_shm_op

    known = deepspeed.ops.__compatible_ops__
    monkeypatch.setitem(known, "deepspeed_shm_comm", known["deepspeed_shm_comm"])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    leave_sums_to_gloo()
    assert build_shm_op() is None
    assert not list(tmp_path.iterdir())


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
