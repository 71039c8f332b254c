"""Every shipped preset is validated, forecast, and trained with: only the model is another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import COMMAND
from tiny import tiny_target
from tiny_runs import events, write_chats, write_target
from transformers import AutoConfig

from drafthead.heads.load import load_head
from drafthead.inference.sibling import SiblingSettings
from drafthead.train.config import load_config
from drafthead.train.estimate import forecast
from drafthead.train.hardware import parse_hardware
from drafthead.train.planning import launch_settings, target_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HEADS = sorted(path.stem for path in (CONFIGS / "heads").glob("*.yaml"))
LAUNCHERS = sorted(path.stem for path in (CONFIGS / "accelerate").glob("*.yaml"))
VOCABULARY = 33_000
"""More than any preset's draft vocabulary."""


def first_line(path: Path) -> str:
    line = path.read_text(encoding="utf-8").splitlines()[0]
    assert line.startswith("# ")
    return line[2:]


def launched(name: str) -> tuple[str, str]:
    """A launcher's config and the head preset that its first line starts."""
    command = first_line(CONFIGS / f"accelerate/{name}.yaml")
    assert f"--config_file configs/accelerate/{name}.yaml " in command
    found = re.search(r"-m drafthead\.train --config (\S+)", command)
    assert found, command
    return name, found[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many layers as any preset asks for."""
    model = tiny_target(num_layers=12, vocab_size=VOCABULARY)
    return write_target(tmp_path_factory.mktemp("presets") / "target", model)


def overrides(root: Path, target: Path, preset: str) -> list[str]:
    """Another model, its data, two steps of an epoch each: nothing else is changed.

    But for key/value heads that a preset counts: there have to be as many as fit the model's 4.
    """
    write_chats(root / "train.jsonl", [8] * 12)
    write_chats(root / "heldout.jsonl", [8] * 4, seed=1)
    data = [f"data.train={root / 'train.jsonl'}"]
    config = load_config(preset)
    if config.data.heldout:
        data.append(f"data.heldout={root / 'heldout.jsonl'}")
    if getattr(config.head, "num_key_value_heads", None):
        data.append("head.num_key_value_heads=4")
    length = ["training.epochs=2", "training.max_steps=2"]
    return [f"target.name={target}", *data, *length, f"out={root / 'run'}"]


def run(command: list[str], root: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = events(root / "run")
    assert [event["step"] for event in steps] == [1, 2]
    assert all(event["grad_norm"] is not None for event in steps)
    settings = load_config(root / "run/config.yaml").head
    if isinstance(settings, SiblingSettings):  # a plain model
        found = AutoConfig.from_pretrained(root / "run/head")
        assert found.num_hidden_layers == settings.keep_layers
    else:
        assert load_head(root / "run/head").settings == settings


@pytest.mark.parametrize("name", HEADS)
def test_the_first_line_of_a_head_preset_runs_it(name: str) -> None:
    command = first_line(CONFIGS / f"heads/{name}.yaml")
    assert re.search(rf"--config {name}( |$)", command), command
    for launcher in re.findall(r"--config_file (\S+)", command):
        assert (CONFIGS.parent / launcher).is_file()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_first_line_of_a_launcher_runs_a_preset(name: str) -> None:
    _, preset = launched(name)
    ranks, stage, _ = launch_settings(CONFIGS / f"accelerate/{name}.yaml")
    found = re.match(r"(?:cpu|gpu-(\d+)x(\d+))-zero(\d)", name)
    assert found
    assert stage == int(found[3])
    assert found[1] is None or ranks == int(found[1]) * int(found[2])
    assert preset in HEADS
    needs_parts = load_config(preset).training.partition_target
    assert not needs_parts or stage == 3


@pytest.mark.parametrize("name", HEADS)
def test_a_head_preset_is_forecast_and_fits_where_its_first_line_starts_it(name: str) -> None:
    config = load_config(name)
    launcher = re.search(r"--config_file (\S+)", first_line(CONFIGS / f"heads/{name}.yaml"))
    ranks, stage, offload = (
        launch_settings(CONFIGS.parent / launcher[1]) if launcher else (1, 0, False)
    )
    found = forecast(
        config,
        target_config(config.target.name),
        parse_hardware(f"{ranks}xH100-80GB"),
        stage=stage,
        offload=offload,
    )
    assert found.fits, found.asked
    assert found.footprint.trained > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("smollm2")])
def test_a_preset_of_one_process_trains_two_steps(name: str, tmp_path: Path, target: Path) -> None:
    command = [*COMMAND, "train", "--config", name, *overrides(tmp_path, target, name)]
    run(command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "preset"),
    [*map(launched, LAUNCHERS), ("gpu-1x8-zero3", "qwen3-32b-eagle3")],
)
def test_a_launcher_trains_two_steps_of_its_preset(
    launcher: str, preset: str, tmp_path: Path, target: Path
) -> None:
    """On two processes of this machine, over gloo."""
    program = str(Path(sys.executable).with_name("accelerate"))
    file = str(CONFIGS / f"accelerate/{launcher}.yaml")
    here = ["--num_processes", "2", "--num_machines", "1", "--machine_rank", "0"]
    port = ["--main_process_port", "0"]
    command = [program, "launch", "--config_file", file, *here, *port, "-m", "drafthead.train"]
    run([*command, "--config", preset, *overrides(tmp_path, target, preset)], tmp_path)


def test_shipped_target_facts_build_the_model_that_their_name_says() -> None:
    sizes = {"llama31-8b": 8.03e9, "llama33-70b": 70.55e9, "qwen3-32b": 32.76e9}
    sizes |= {"llama32-1b": 1.236e9, "smollm2-135m": 134.5e6}
    found = {path.stem for path in (CONFIGS / "targets").glob("*.json")}
    assert found == set(sizes)
    for name, count in sizes.items():
        facts = json.loads((CONFIGS / f"targets/{name}.json").read_text())
        assert facts["hub_ids"]
        config = target_config(facts["hub_ids"][0], CONFIGS / f"targets/{name}.json")
        text = config.get_text_config()
        D, inner, V, n = (
            text.hidden_size,
            text.intermediate_size,
            text.vocab_size,
            text.num_hidden_layers,
        )
        wide = text.num_attention_heads * text.head_dim
        narrow = text.num_key_value_heads * text.head_dim
        layer = 2 * D * wide + 2 * D * narrow + 3 * D * inner
        tables = V * D * (1 if text.tie_word_embeddings else 2)
        assert layer * n + tables == pytest.approx(count, rel=2e-3), name
