"""`training.start`: a run begins with a trained head's weights, and with nothing half fitting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import MakeConfig, three_layers, write_target
from torch import Tensor, nn
from trainers import make_trainer

from drafthead.heads import load_head
from drafthead.train.checkpoint import head_weights, load_checkpoint
from drafthead.train.config import RunConfig
from drafthead.train.loop import run

MEDUSA: dict[str, Any] = {"type": "medusa", "draft_vocab_size": 256, "unroll_steps": 2}


@pytest.fixture
def begin(make_config: MakeConfig, tmp_path: Path) -> Any:
    """Config of a run that begins from a short one's head."""
    first = make_config(head=MEDUSA, training={"max_steps": 2}, out=str(tmp_path / "first"))
    folder = run(first).head

    def again(head: dict[str, Any] = MEDUSA, **groups: Any) -> RunConfig:
        over = {**groups, "training": {"start": str(folder), **groups.get("training", {})}}
        return make_config(head=head, out=str(tmp_path / "second"), **over)

    return again


def started(config: RunConfig) -> nn.Module:
    return make_trainer(config).parts.head


def test_a_run_begins_where_the_other_ended(begin: Any) -> None:
    """The draft vocabulary comes along, though other data would give another."""
    config = begin(data={"positions": 40})
    assert config.training.start is not None
    trained = head_weights(load_head(config.training.start))
    head = started(config)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in head_weights(head).items())
    rows = three_layers().get_output_embeddings().weight
    assert torch.equal(head.rows, rows[head.draft_ids]), "bound by the vocabulary taken over"
    fresh = started(begin(data={"positions": 40}, training={"start": None}))
    assert not torch.equal(fresh.draft_ids, head.draft_ids)


def test_own_rows_are_not_started_anew(make_config: MakeConfig, tmp_path: Path) -> None:
    head = {**MEDUSA, "own_rows": True}
    folder = run(make_config(head=head, training={"max_steps": 2}, out=str(tmp_path / "a"))).head
    config = make_config(head=head, training={"start": str(folder)}, out=str(tmp_path / "b"))
    trained = load_head(folder).state_dict()["medusa_head.0.1.weight"]
    assert torch.equal(started(config).state_dict()["medusa_head.0.1.weight"], trained)


def test_what_the_other_head_lacks_starts_as_in_a_new_one(begin: Any) -> None:
    """Medusa-2 with rows of its own, and a head more: these rows are the target's, not random."""
    head = started(begin(MEDUSA | {"type": "medusa2", "own_rows": True, "unroll_steps": 3}))
    rows = three_layers().get_output_embeddings().weight[head.draft_ids]
    weights = head.state_dict()
    for depth in range(3):
        assert torch.equal(weights[f"medusa_head.{depth}.1.weight"], rows)
    assert weights["medusa_head.1.0.linear.weight"].any(), "the trained heads are taken"
    assert not weights["medusa_head.2.0.linear.weight"].any()


def test_f30_a_run_goes_on_without_the_head_that_it_began_from(begin: Any, tmp_path: Path) -> None:
    """That head, whose vocabulary it took over, is gone by then: cut or straight, the same head."""

    def cut(out: str, steps: int) -> RunConfig:
        config: RunConfig = begin(data={"positions": 40}, schedule={"kind": "constant"})
        training = config.training.model_copy(update={"max_steps": steps, "epochs": None})
        return config.model_copy(update={"training": training, "out": tmp_path / out})

    def last(config: RunConfig) -> dict[str, Tensor]:
        return load_checkpoint(config.out / "checkpoints/last.safetensors").weights

    run(straight := cut("straight", 4))
    run(cut("cut", 2))
    resumed = cut("cut", 4)
    assert resumed.training.start is not None
    shutil.rmtree(resumed.training.start)
    head = load_head(run(resumed, resume=True).head)
    assert last(resumed).keys() == last(straight).keys() > {"d2t"}
    assert all(torch.equal(tensor, last(resumed)[name]) for name, tensor in last(straight).items())
    assert torch.equal(head.state_dict()["d2t"], last(straight)["d2t"])


def test_heads_that_do_not_fit_are_refused_in_one_line(begin: Any, tmp_path: Path) -> None:
    def refusal(**groups: Any) -> str:
        with pytest.raises((ValueError, OSError)) as error:
            started(begin(**groups))
        assert "\n" not in str(error.value)
        return str(error.value)

    eagle = {"type": "eagle3", "layers": (1, 2, 3), "draft_vocab_size": 256}
    assert "is a head of type 'medusa'; one of type 'eagle3' begins from 'eagle3'" in refusal(
        head=eagle
    )
    for other, name in (
        ({"unroll_steps": 3}, "medusa_head.2.0.linear.bias"),
        ({"unroll_steps": 1}, "medusa_head.1.0.linear.bias"),
        ({"own_rows": True}, "medusa_head.0.1.weight"),
        ({"draft_vocab_size": 128}, "d2t"),
    ):
        assert f"and this head differ in {name!r}" in refusal(head=MEDUSA | other)
    config = Path(begin().training.start) / "config.json"
    stored = json.loads(config.read_text())
    scaled = stored | {"rope_parameters": {**stored["rope_parameters"], "rope_theta": 7.0}}
    config.write_text(json.dumps(scaled))
    assert "was trained with rotary positions by {'rope_theta': 7.0" in refusal()
    config.write_text(json.dumps(stored))
    target = write_target(tmp_path / "other", three_layers(seed=1))
    assert "fingerprint" in refusal(target={"name": str(target)})
    assert "no config.json" in refusal(training={"start": str(tmp_path)})
    assert refusal(head=MEDUSA | {"warm_start": 9}).startswith("head.warm_start: would undo")
