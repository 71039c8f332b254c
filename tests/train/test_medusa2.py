"""Medusa-2 through the ordinary loop and the command: what it trains, keeps, and decodes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from calls import generate
from command import Call, write_prompts
from drafts import own_greedy, prompt_of
from launch import TORCHRUN, ZERO2, assert_equal_runs, train
from tiny_runs import MakeConfig, events, three_layers
from torch import Tensor
from trainers import first_gradient, make_trainer

from drafthead.heads import load_head
from drafthead.heads.adapter import acting
from drafthead.inference.target import Target
from drafthead.train.assemble import check_live
from drafthead.train.checkpoint import head_weights, load_checkpoint
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.estimate import forecast
from drafthead.train.hardware import parse_hardware
from drafthead.train.loop import run

MEDUSA: dict[str, Any] = {"type": "medusa", "draft_vocab_size": 256, "unroll_steps": 2}
MEDUSA2 = MEDUSA | {"type": "medusa2", "lora_rank": 4, "lora_targets": ("q_proj", "down_proj")}
FAST: dict[str, Any] = {"optimiser": {"lr": 1e-2}, "data": {"positions": 300}}


def test_the_states_may_be_kept_since_they_are_the_original_targets(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Online or in memory, one run or two sittings (F30): bit for bit the same head."""

    def last(name: str, steps: int, features: str, *, resume: bool = False) -> dict[str, Tensor]:
        training = {"max_steps": steps, "features": features, "loss": "ce"}
        schedule, out = {"kind": "constant"}, str(tmp_path / name)
        groups: dict[str, Any] = FAST | {"schedule": schedule, "training": training}
        run(make_config(head=MEDUSA2, out=out, **groups), resume=resume)
        return load_checkpoint(tmp_path / name / "checkpoints/last.safetensors").weights

    online, memory = (last(mode, 4, mode) for mode in ("online", "memory"))
    last("cut", 2, "online")
    resumed = last("cut", 4, "online", resume=True)
    for other in (memory, resumed):
        assert other.keys() == online.keys()
        assert all(torch.equal(online[name], other[name]) for name in online)
    moved = [n for n, t in online.items() if n.endswith("lora_B.weight") and t.any()]
    assert len(moved) == 2 * 3


def test_a_step_trains_the_adapter_with_the_heads_and_nothing_of_the_target(
    make_config: MakeConfig,
) -> None:
    config = make_config(head=MEDUSA2, **FAST, training={"features": "online"})
    trainer = make_trainer(config)
    target = trainer.parts.target
    assert target is not None
    before = three_layers()
    own = {id(p) for p in trainer.parts.head.parameters()}
    assert {id(p) for p in trainer.engine.optimised()} == own
    assert all(id(p) in own or not p.requires_grad for p in target.model.parameters())
    group = trainer.next_group()
    for _ in range(8):
        trainer.forward_backward(trainer.fetch(group))
        trainer.update(1e-2)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(target.model(ids).logits, before(ids).logits), "it rests between steps"
    with acting(target.model):
        assert (target.model(ids).logits - before(ids).logits).abs().max() > 1e-2
    names = {name for name, grad in first_gradient(config).items() if grad.any()}
    assert any("lora_B" in name for name in names)
    assert any("medusa_head" in name for name in names)


def test_the_divergence_holds_the_target_where_it_was(make_config: MakeConfig) -> None:
    """The more it weighs, the less the adapted target's text differs from the original's."""
    ids = torch.arange(5, 45)[None]
    before = three_layers()(ids).logits.log_softmax(-1)
    drift = []
    for weight in (0.0, 50.0):
        head = MEDUSA2 | {"distillation": weight, "lora_alpha": 16.0}
        trainer = make_trainer(make_config(head=head, **FAST, training={"loss": "ce"}))
        group = trainer.next_group()
        for _ in range(12):
            trainer.forward_backward(trainer.fetch(group))
            trainer.update(1e-2)
        assert trainer.parts.target is not None
        with acting(trainer.parts.target.model), torch.no_grad():
            after = trainer.parts.target.model(ids).logits.log_softmax(-1)
        drift.append(float((before.exp() * (before - after)).sum(-1).mean()))
    assert drift[1] < 0.5 * drift[0]


def test_two_stages_then_the_command_decodes_the_adapted_target(
    make_config: MakeConfig,
    tmp_path: Path,
    target_folder: Path,
    call: Call,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = run(make_config(head=MEDUSA, training={"max_steps": 3}, out=str(tmp_path / "one")))
    training = {"max_steps": 12, "start": str(first.head)}
    second = make_config(head=MEDUSA2, **FAST, training=training, out=str(tmp_path / "two"))
    begun = head_weights(make_trainer(second).parts.head)
    given = head_weights(load_head(first.head))
    assert given.keys() < begun.keys()
    assert all(torch.equal(begun[name], tensor) for name, tensor in given.items())
    done = run(make_config(head=MEDUSA2, **FAST, training=training, out=str(tmp_path / "three")))
    assert done.simulated_tau is not None
    assert len(events(done.out)) == 12

    head, target = load_head(done.head), Target(three_layers())
    head.bind(target.model)
    adapted = generate(target, head, [prompt_of(6)], tree="chain:2")[0].tolist()
    assert adapted == own_greedy(target, prompt_of(6), 12)  # it is adapted now, for plain text too

    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    options = ["--target", target_folder, "--prompts", prompts, "--dtype", "float32"]
    command = ["evaluate", "--head", done.head, *options, "--tree", "chain:2", "--json"]
    caplog.clear()
    told = call(*command, "--max-new-tokens", 12)
    assert told.code == 0, told.err
    record = json.loads(told.out)["cells"][0]["records"]["head"]
    assert record["identical"]["equal"] == record["identical"]["of"] == 3
    assert record["agreement"]["equal"] == 3
    assert "is, without loss, that of 'tiny' as adapted" in caplog.text


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"training": {"features": "store"}, "data": {"states": "s"}}, "training.features: a head"),
        ({"training": {"features": "fill"}, "data": {"states": "s"}}, "training.features: a head"),
        ({"data": {"states": "s"}}, "training.features: a head of type 'medusa2' changes its"),
        (
            {"training": {"checkpoint_activations": True}},
            "training.checkpoint_activations: a head of type 'medusa2' has no layer",
        ),
    ],
)
def test_what_needs_the_target_at_hand_is_refused(
    groups: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run(make_config(head=MEDUSA2, **groups))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ZERO2], ids=["ddp", "zero2"])
def test_two_processes_equal_one_that_accumulates(
    make_config: MakeConfig, tmp_path: Path, launcher: list[str]
) -> None:
    training = {"max_steps": 3, "features": "online", "loss": "ce", "accumulate": 2}
    one = make_config(head=MEDUSA2, training=training)
    two = make_config(head=MEDUSA2, training=training | {"accumulate": 1}, out=str(tmp_path / "2"))
    run(one)
    train(launcher, two, tmp_path)
    assert_equal_runs(one, two, steps=3)


def test_zero_stage_3_is_refused(make_config: MakeConfig) -> None:
    engine = cast(Engine, SimpleNamespace(stage=3))
    with pytest.raises(ValueError, match=r"shares weights with its target, .* use stage 1 or 2"):
        check_live(make_config(head=MEDUSA2), engine)
    check_live(make_config(head=MEDUSA), engine)
    parts = make_config(head=MEDUSA2, training={"partition_target": True})
    with pytest.raises(ValueError, match=r"training\.partition_target: a head of type 'medusa2'"):
        check_live(parts, engine)


def test_a_medusa_1_head_cannot_begin_from_a_medusa_2(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    made = run(make_config(head=MEDUSA2, training={"max_steps": 1}, out=str(tmp_path / "two")))
    config = make_config(head=MEDUSA, training={"start": str(made.head)}, out=str(tmp_path / "x"))
    with pytest.raises(ValueError, match="one of type 'medusa' begins from 'medusa'"):
        make_trainer(config)


def test_a_forecast_counts_the_targets_backward_pass(make_config: MakeConfig) -> None:
    def seen(head: dict[str, Any]) -> Any:
        config: RunConfig = make_config(head=head)
        found = forecast(config, three_layers().config, parse_hardware("1xH100-80GB"))
        return found.footprint

    plain, adapting = seen(MEDUSA), seen(MEDUSA2)
    assert adapting.target_weights == plain.target_weights
    widths = 3 * 4 * ((64 + 64) + (128 + 64))
    assert adapting.trained - plain.trained == widths
    assert adapting.backward_flops > plain.backward_flops + plain.target_flops
    assert adapting.step > plain.step
