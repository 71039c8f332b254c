"""The forecast, held against what is allocated, and what the command makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call, assert_one_line
from tiny import tiny_batch
from tiny_runs import LAYERS, MakeConfig, three_layers, write_chats
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PreTrainedConfig

from drafthead.data.states import bytes_of
from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.train import rehearsal
from drafthead.train.config import RunConfig
from drafthead.train.dryrun import dry_run
from drafthead.train.estimate import Estimate, forecast
from drafthead.train.hardware import Hardware, changed, parse_hardware
from drafthead.train.objective import Objective
from drafthead.train.placing import Case, assumed
from drafthead.train.planning import data_facts, launch_settings, target_config
from drafthead.train.rehearsal import BatchShape, rehearse
from drafthead.train.timing import Stopwatch

VOCABULARY = 512


def run_config(length: int, rows: int, **head: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"train": "no-such-file.jsonl", "max_length": length},
            "head": {"type": "eagle3", "layers": LAYERS, "draft_vocab_size": 256, **head},
            "training": {"tokens_per_batch": length * rows, "max_steps": 10, "precision": "fp32"},
        }
    )


def allocated(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator gave out during the work, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    live = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        live += change
        peak = max(peak, live)
    return peak


# The dry run itself


def test_a_dry_run_counts_every_tensor_for_as_long_as_it_lives() -> None:
    with dry_run() as run:
        first = torch.zeros(1000)
        assert run.live == 4000
        second = first * 2 + 1  # the product lives until the sum is there
        assert (run.live, run.peak) == (8000, 12000)
        view = second[10:]
        del second
        assert run.live == 8000, "a view holds the storage"
        del view, first
        assert run.live == 0
        weight = torch.zeros(8, 16, requires_grad=True)
        run.restart()
        (torch.zeros(4, 8) @ weight).sum().backward()
        assert run.flops == 2 * 4 * 8 * 16 * 2, "forward, and the weight's gradient"


def test_a_dry_run_follows_the_values_that_no_weight_decides() -> None:
    mask = torch.tensor([[True, False, True, True]])
    with dry_run() as run:
        known = run.known(mask)
        slots = known.nonzero()[:, 1]
        assert slots.tolist() == [0, 2, 3]
        states = torch.zeros(1, 4, 8)
        assert states[known].shape == (3, 8)
        assert int(known.sum()) == 3
        counts = torch.zeros(4, dtype=torch.int64)
        counts[slots] = 5
        assert counts.tolist() == [5, 0, 5, 5], "written in place"
        assert states.isfinite().all(dim=-1).all().item(), "what weights decide is taken as true"


# One process against real allocations


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"own_rows": True, "unroll_steps": 2}])
def test_the_bytes_of_a_step_are_those_that_are_allocated(
    rows: int, settings: dict[str, Any]
) -> None:
    length, start = 192, 8
    model = three_layers()
    config = run_config(length, rows, **settings)
    found = rehearse(config, model.config, BatchShape(rows, length, start), bf16=False)

    ids = torch.arange(rows * length).view(rows, length) % VOCABULARY
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, :start] = False
    head_settings = config.head
    assert isinstance(head_settings, Eagle3Settings)
    draft_ids = torch.arange(256) * 2
    head = head_settings.build(describe(model, None, LAYERS, {}), model.config, draft_ids)
    head.bind(model)
    objective = Objective(head, VOCABULARY, 0.8, bf16=False, watch=Stopwatch())
    # A teacher that always chooses what can be drafted: nothing is left out of the loss.
    batch = replace(tiny_batch(model, ids, mask, LAYERS), top=torch.zeros_like(ids))
    held: TeacherBatch = replace(
        batch, features=batch.features.bfloat16(), last_hidden=batch.last_hidden.bfloat16()
    )
    objective(held, 1.0).loss.backward()  # tables and other things made once
    head.zero_grad(set_to_none=True)

    def step() -> None:
        objective(held, 1.0).loss.backward()

    assert found.step == pytest.approx(allocated(step), rel=0.05)
    parameters = list(head.parameters())
    assert found.trained == sum(p.numel() for p in parameters)
    assert found.target_weights == sum(p.numel() for p in model.parameters())
    tensors: list[Tensor] = [*parameters, head.d2t, head.t2d]
    assert found.head == pytest.approx(sum(t.nbytes for t in tensors), abs=64), "rotary's own"
    assert head.rows is not None
    assert found.borrowed == head.rows.nbytes, "the embedding is the target's own"


def test_a_large_micro_batch_is_drawn_through_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    target, config, shape = three_layers().config, run_config(200, 3), BatchShape(3, 200, 16)
    whole = rehearse(config, target, shape, bf16=False)
    monkeypatch.setattr(rehearsal, "WHOLE", 100)
    monkeypatch.setattr(rehearsal, "SHORT", 50)
    drawn = rehearse(config, target, shape, bf16=False)
    assert drawn.batch == whole.batch
    assert drawn.target_forward == pytest.approx(whole.target_forward, rel=0.15)
    assert drawn.step == pytest.approx(whole.step, rel=0.05)
    assert drawn.target_flops == pytest.approx(whole.target_flops, rel=1e-3)
    assert drawn.first_depth == pytest.approx(whole.first_depth, rel=0.05)


# Placing it


def llama70() -> PreTrainedConfig:
    return target_config("meta-llama/Llama-3.3-70B-Instruct")


def small(**training: Any) -> RunConfig:
    """A head for a 70B, with micro-batches small enough for a test."""
    return RunConfig.model_validate(
        {
            "target": {"name": "meta-llama/Llama-3.3-70B-Instruct"},
            "data": {"train": "answers.jsonl", "max_length": 64, "positions": 1_000_000},
            "head": {"type": "eagle3", "draft_vocab_size": 32000, "unroll_steps": 1},
            "training": {"tokens_per_batch": 64, "epochs": 2, "features": "online", **training},
        }
    )


def test_a_70b_fits_eight_gpus_only_in_parts_and_the_forecast_says_so() -> None:
    found = forecast(small(), llama70(), parse_hardware("8xH100-80GB"))
    assert found.footprint.target_weights == pytest.approx(70.55e9, rel=1e-3)
    assert not found.fits
    assert found.asked.parts["target"] == pytest.approx(141.1e9, rel=0.01)
    by_case = {(n.case.stage, n.case.target, n.case.offload): n for n in found.needs}
    assert {stage for stage, _, _ in by_case} == {0, 1, 2, 3}
    parts = by_case[3, "partitioned", False]
    assert parts.fits(found.hardware)
    assert found.smallest is not None
    assert found.smallest.case == parts.case
    # Each measure lowers what a rank holds.
    whole = [by_case[stage, "whole", False].device for stage in (0, 1, 2, 3)]
    assert whole == sorted(whole, reverse=True)
    assert by_case[2, "whole", True].device < by_case[2, "whole", False].device
    moved = by_case[2, "whole", True].host - by_case[2, "whole", False].host
    assert (
        moved
        == by_case[2, "whole", False].parts["moments"]
        + (by_case[2, "whole", False].parts["master weights"])
    )
    assert "target" not in by_case[2, "store", False].parts
    assert found.hours is not None
    assert found.hours["in all"] > 0
    assert found.store_bytes == bytes_of(1_000_000, 3, 8192)
    assert found.flops["target forward"] == pytest.approx(2 * 69.5e9, rel=0.05)
    assert (
        found.flops["head, training"] == found.flops["head forward"] + found.flops["head backward"]
    )
    # A layer of 0.94 G weights and 0.26 G of rows, each four times, and 0.2 G of fusion once.
    assert found.rounds[0].macs == pytest.approx(4 * 1.2e9 + 0.2e9, rel=0.05)


def test_one_small_gpu_needs_more_of_its_kind_or_a_store() -> None:
    found = forecast(
        small(), llama70(), changed(parse_hardware("L40S"), 1, None, None, None), shapes=()
    )
    assert found.smallest is not None
    case = found.smallest.case
    assert case.target == "store" or case.ranks > 1
    assert found.smallest.device <= 0.95 * found.hardware.memory


def test_settings_change_the_forecast_in_their_direction() -> None:
    hardware, target = parse_hardware("8xH100"), three_layers().config
    tiny = {"type": "eagle3", "layers": LAYERS, "draft_vocab_size": 256}

    def of(**training: Any) -> Estimate:
        given = small(**training).model_dump(mode="json") | {"head": tiny}
        return forecast(RunConfig.model_validate(given), target, hardware, shapes=())

    plain, parts = of(), of(partition_target=True)
    assert parts.asked.case.stage == 3
    assert parts.hours is not None
    assert plain.hours is not None
    assert parts.hours["gathering the target"] > 0 == plain.hours["gathering the target"]
    several = of(accumulate=4)
    assert several.asked.parts["teacher states"] == 4 * plain.asked.parts["teacher states"]
    limited = of(max_steps=2)
    assert limited.hours is not None
    assert limited.hours["in all"] < plain.hours["in all"]


def test_rows_that_are_here_decide_the_largest_micro_batch(make_config: MakeConfig) -> None:
    config = make_config()
    found = data_facts(config)
    assert found is not None
    assert found.known
    assert found.largest.positions <= config.training.tokens_per_batch
    assert 0 < found.largest.unsupervised < found.largest.length
    assert found.positions is not None
    assert found.positions > found.largest.positions
    assert not assumed(config).known
    gone = config.model_copy(update={"data": config.data.model_copy(update={"train": ("no",)})})
    assert data_facts(gone) is None


def test_processes_of_a_cpu_share_its_memory() -> None:
    cpu = Hardware("CPU", 1, 10**9, 1e11, 2e10, 1e10, is_cpu=True)
    config = run_config(128, 1)
    target = three_layers().config
    one = forecast(config, target, cpu, shapes=())
    assert one.fits
    assert not forecast(config, target, cpu, ranks=20, shapes=()).fits
    assert one.asked.case == Case(1, 0, "whole", False, 128)


# What is given


@pytest.mark.parametrize(
    ("text", "devices", "memory"),
    [("8xH100-80GB", 8, 80), ("a100", 1, 80), ("64 x A100-40GB", 64, 40), ("H200", 1, 141)],
)
def test_hardware_is_known_by_its_name(text: str, devices: int, memory: int) -> None:
    found = parse_hardware(text)
    assert (found.devices, found.memory) == (devices, memory * 10**9)


@pytest.mark.parametrize("text", ["8xZ80", "0xH100", "", "H100 x 8"])
def test_unknown_hardware_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="H100-80GB"):
        parse_hardware(text)


def test_a_launcher_tells_processes_stage_and_offload(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("num_processes: 16\ndeepspeed_config:\n  zero_stage: 2\n")
    assert launch_settings(file) == (16, 2, False)
    with file.open("a") as more:
        more.write("  offload_optimizer_device: cpu\n")
    assert launch_settings(file) == (16, 2, True)
    file.write_text("a: 1\n")
    with pytest.raises(ValueError, match="num_processes"):
        launch_settings(file)


# The command


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    ).save_pretrained(tmp_path / "only-config")
    settings = run_config(256, 1).model_dump(mode="json") | {"target": {"name": "org/private"}}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def test_the_command_needs_a_config_and_no_weights(
    call: Call, config_file: Path, tmp_path: Path
) -> None:
    given = ["--config", config_file, "--target-config", tmp_path / "only-config"]
    hardware = ["--hardware", "H100", "--gpus", "2", "--gpu-memory", "10"]
    done = call("estimate", *given, *hardware, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["fits"] is True
    assert found["hardware"]["devices"] == 2
    assert found["asked"]["device"] == sum(found["asked"]["parts"].values())
    assert "fits: " in done.err
    assert "assumed: " in done.err
    chain, tree = found["rounds"]
    assert chain["macs"] < tree["macs"]
    assert chain["shape"] == {"depth": 4, "width": 1}
    assert f"a round (chain of 4, {chain['context']} tokens before): " in done.err
    assert f"{chain['bytes'] / 1e6:.4g} MB of weights read, 4 steps" in done.err
    done = call("estimate", *given, "--hardware", "H100", "--gpu-memory", "0.5")
    assert done.code == 0, "it reports; it does not judge"
    assert "does not fit" in done.out


def test_what_cannot_be_forecast_is_one_line(call: Call, config_file: Path, tmp_path: Path) -> None:
    done = call("estimate", "--config", config_file, "--hardware", "H100")
    assert_one_line(done, ["org/private", "--target-config"])
    given = ["--config", config_file, "--target-config", tmp_path / "only-config"]
    assert_one_line(call("estimate", *given, "--hardware", "Z80"), ["Z80", "H100"])
    (tmp_path / "odd.json").write_text("[]")
    odd = ["--config", config_file, "--target-config", tmp_path / "odd.json"]
    assert_one_line(call("estimate", *odd, "--hardware", "H100"), ["odd.json"])
    layers = [*given, "--hardware", "H100", "head.layers=[1,2,9]"]
    assert_one_line(call("estimate", *layers), ["head.layers", "9"])


def test_the_data_of_the_config_is_read_where_it_is_here(
    call: Call, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    write_chats(tmp_path / "train.jsonl", [8] * 20)
    path = tmp_path / "run.yaml"
    path.write_text(config.model_dump_json())
    done = call("estimate", "--config", path, "--hardware", "H100", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["data"]["known"] is True
