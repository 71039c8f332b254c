"""The end of a run: the saved head is served, and has to do what training says of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call
from drafts import own_greedy
from launch import TORCHRUN, ZERO2, ZERO3, train
from tiny_runs import LAYERS, MakeConfig, three_layers

from drafthead.inference.target import Target
from drafthead.train import keeper
from drafthead.train.config import RunConfig
from drafthead.train.loop import run
from drafthead.train.runtable import run_table

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six greedy texts of the target as rows of ids, which a head learns by heart."""
    path, target = tmp_path_factory.mktemp("rows") / "rows.jsonl", Target(three_layers())
    lines = []
    for index in range(6):
        prompt = torch.randint(3, 500, (12,), generator=torch.Generator().manual_seed(index))
        ids = own_greedy(target, prompt.tolist(), 48)
        mask = [0] * 12 + [1] * (len(ids) - 12)
        lines.append(json.dumps({"id": f"row-{index}", "input_ids": ids, "loss_mask": mask}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def short(make_config: MakeConfig, by_heart: Path) -> Callable[..., RunConfig]:
    """A run of thirty steps on those rows, which are one micro-batch."""

    def make(**groups: Any) -> RunConfig:
        training = {"max_steps": 30, "tokens_per_batch": 512, "agreement_prompts": 6}
        head = {
            "type": "eagle3", "layers": LAYERS, "draft_vocab_size": 256, "unroll_steps": 2
        }  # fmt: skip
        return make_config(
            data={"train": str(by_heart), "heldout": str(by_heart)} | groups.pop("data", {}),
            optimiser={"lr": 1e-2},
            head=groups.pop("head", head),
            training=training | groups.pop("training", {}),
            **groups,
        )

    return make


def spoilt(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Let every head that is saved come out with another config."""
    save = keeper.save_head

    @functools.wraps(save)
    def worse(head: Any, folder: Path) -> None:
        save(head, folder)
        config = json.loads((folder / "config.json").read_text())
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(keeper, "save_head", worse)


def test_a_sound_head_agrees_and_the_run_says_so(short: Callable[..., RunConfig]) -> None:
    config = short()
    result = run(config)
    found = result.agreement
    assert found is not None
    assert found["agrees"], found
    assert found["decoded_tau"] > 1.5, "or nothing would show"
    # States are held in bf16 in training, and whole when the head is served.
    assert found["decoded_tau"] == pytest.approx(found["simulated_tau"], rel=0.03)
    assert (found["prompts"], found["tree"], found["cause"]) == (6, "chain:2", None)
    figures = json.loads((config.out / "evaluation.json").read_text())
    assert figures["agreement"] == found
    assert figures["simulated_tau"] == result.simulated_tau, "the held-out figure stays"
    assert json.loads((config.out / "result.json").read_text())["agreement"] == found
    table = run_table(config.out)
    assert table is not None
    assert any("as served: decoded tau" in line and "agree" in line for line in table.lines)


def test_a_head_saved_wrongly_ends_the_command_with_1_and_its_cause(
    short: Callable[..., RunConfig],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The rotary base of the saved config is another."""
    spoilt(monkeypatch, lambda config: config["rope_parameters"].update(rope_theta=30.0))
    config = short()
    (tmp_path / "run.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    done = call("train", "--config", tmp_path / "run.yaml", "--json")
    assert done.code == 1
    lines = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "likely cause: rotary base" in lines[0]
    result = json.loads(done.out)
    assert not result["agreement"]["agrees"]
    low, high = result["agreement"]["interval"]
    assert low <= result["agreement"]["difference"] <= high < 0
    named = [f["cause"] for f in result["agreement"]["findings"] if f["named"]]
    assert named == ["rotary base"]
    assert (config.out / "head/model.safetensors").exists(), "all is saved before"


def test_a_head_that_cannot_be_bound_is_told_with_the_reason(
    short: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contract names a template that nobody serves."""
    spoilt(monkeypatch, lambda config: config["contract"].update(template="0" * 64))
    found = run(short(training={"max_steps": 2})).agreement
    assert found is not None
    assert found["agrees"] is False
    assert "template is" in found["cause"]


def test_from_a_store_the_target_is_loaded_for_the_check_or_it_is_left_out(
    short: Callable[..., RunConfig], tmp_path: Path
) -> None:
    store = {"states": str(tmp_path / "states")}
    run(short(data=store, training={"features": "fill", "max_steps": 1, "agreement_prompts": 0}))
    found = run(short(data=store, out=str(tmp_path / "second"))).agreement
    assert found is not None
    assert found["agrees"], found
    assert found["decoded_tau"] > 1.5
    config = short(data=store, training={"max_steps": 1}, out=str(tmp_path / "third"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafthead.train.served._room", lambda device: 1000)
        result = run(config)
    assert result.agreement == {"left_out": "no whole target is here, and one may not fit"}
    table = run_table(config.out)
    assert table is not None
    assert any(line.startswith("not checked as served") for line in table.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "partition"),
    [(TORCHRUN, False), (ZERO2, False), (ZERO3, True)],
    ids=["torchrun", "zero2", "zero3 in parts"],
)
def test_two_processes_serve_what_they_trained(
    short: Callable[..., RunConfig], tmp_path: Path, launcher: list[str], partition: bool
) -> None:
    """Rank 0 alone serves, with a whole target and a whole head."""
    if launcher is not TORCHRUN:
        pytest.importorskip("deepspeed")
    config = short(training={"partition_target": partition})
    train(launcher, config, tmp_path)
    found = json.loads((config.out / "result.json").read_text())["agreement"]
    assert found["agrees"], found
    assert found["decoded_tau"] > 1.5
    assert found["decoded_tau"] == pytest.approx(found["simulated_tau"], rel=0.03)


def test_without_the_setting_nothing_is_checked(short: Callable[..., RunConfig]) -> None:
    config = short(training={"max_steps": 2, "agreement_prompts": 0})
    assert run(config).agreement is None
    assert "agreement" not in json.loads((config.out / "evaluation.json").read_text())


def test_a_head_that_changes_its_target_is_served_by_one_loaded_anew(
    short: Callable[..., RunConfig],
) -> None:
    pytest.importorskip("peft")
    head = {"type": "medusa2", "draft_vocab_size": 256, "unroll_steps": 2, "lora_rank": 2}
    found = run(short(head=head, training={"max_steps": 15})).agreement
    assert found is not None
    assert found["agrees"], found
    assert found["decoded_tau"] > 1.0
