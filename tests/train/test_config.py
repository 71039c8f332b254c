"""Settings: presets load, typos are named with their path, overrides pass the same checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

import drafthead.heads  # noqa: F401  registers the built-in heads
from drafthead import configs
from drafthead.heads.base import settings_class
from drafthead.train.config import ConfigError, RunConfig, load_config

PRESETS = sorted((Path(configs.__file__).parent / "heads").rglob("*.yaml"))
TEXT = """
data:
  train: chats.jsonl
head:
  type: eagle3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_there_are_presets() -> None:
    assert len(PRESETS) >= 1


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_every_preset_loads_by_path_and_by_name_and_starts_with_its_command(path: Path) -> None:
    assert load_config(path) == load_config(path.stem)
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert path.stem in first


def test_defaults_and_overrides(file: Path) -> None:
    config = load_config(file, ["optimiser.lr=1e-3", "training.max_steps=7", "data.heldout=[a,b]"])
    assert config.optimiser.lr == 1e-3
    assert config.training.max_steps == 7
    assert config.training.epochs is None
    assert config.data.train == ("chats.jsonl",)
    assert config.data.heldout == ("a", "b")
    assert type(config.head) is settings_class("eagle3")
    assert load_config(file).training.epochs == 1


def test_a_number_in_yaml_1_1_scientific_notation_is_a_number(file: Path) -> None:
    file.write_text(TEXT + "optimiser:\n  lr: 3e-4\n")
    assert load_config(file).optimiser.lr == 3e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.unrol_steps=2", "head.unrol_steps: unknown setting; did you mean 'unroll_steps'?"),
        ("training.max_step=2", "training.max_step: unknown setting; did you mean 'max_steps'?"),
        ("optimizer.lr=1", "optimizer: unknown setting; did you mean 'optimiser'?"),
        ("zzz=1", "zzz: unknown setting"),
        ("head.type=eagel3", "head.type: unknown head 'eagel3'; did you mean 'eagle3'?"),
        ("training.accumulate=two", "training.accumulate: input should be a valid integer"),
        ("training.precision=fp8", "training.precision: input should be 'auto', 'bf16' or 'fp32'"),
        ("training.loss=l2", "training.loss: input should be 'soft_ce', 'ce', 'kl', 'reverse_kl'"),
        ("training.heldout_depth=0", "training.heldout_depth: input should be greater than or"),
        ("optimiser.lr=-1", "optimiser.lr: input should be greater than 0, not -1"),
        ("optimiser.lr=nan", "optimiser.lr: input should be a finite number"),
        ("optimiser.betas=[1.5,0]", "optimiser.betas.0: input should be less than 1, not 1.5"),
        ("head.unroll_steps=many", "head.unroll_steps: input should be a valid integer"),
        ("training.max_steps", "'training.max_steps': an override is written a.b=c"),
        ("head=eagle3", "head.type: missing"),
    ],
)
def test_mistakes_are_one_line_with_the_dotted_path(
    file: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_several_settings_of_a_head_is_named_once(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^head\.intermediate_size: only head\.prefix_attention"):
        load_config(file, ["head.type=hydra", "head.intermediate_size=5"])


def test_a_missing_field_a_missing_file_and_broken_yaml_are_one_line(
    file: Path, tmp_path: Path
) -> None:
    file.write_text("head:\n  type: eagle3\ndata:\n  max_length: 100\n")
    with pytest.raises(ConfigError, match=r"^data\.train: missing$"):
        load_config(file)
    file.write_text("head: [\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: .+") as caught:
        load_config(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml: no such config file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(FileNotFoundError, match=r"no such config file.*known: "):
        load_config("no-such-preset")


def test_settings_are_frozen_and_round_trip_through_their_dump(file: Path) -> None:
    config = load_config(file)
    with pytest.raises(ValidationError):
        config.training.seed = 3  # type: ignore[misc]
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["training.eval_every=3"], ["training.eval_every"]),
        (["data.heldout_positions=3"], ["data.heldout_positions"]),
        (["training.eval_every=3", "data.heldout_positions=3", "data.heldout=a"], []),
        (["schedule.kind=constant", "schedule.min_ratio=0.1"], ["schedule.min_ratio"]),
        (["training.lk_eta=2"], ["training.lk_eta"]),
        (["training.lk_eta=2", "training.loss=lk"], []),
        (["training.position_weights=exp", "training.depth_decay=0.7"], ["training.depth_decay"]),
        (["training.depth_scale=2"], ["training.depth_scale"]),
        (["training.position_weights=exp", "training.depth_scale=2"], []),
        (["training.alive_prefix=true", "head.unroll_steps=1"], ["training.alive_prefix"]),
        (["training.alive_prefix=true"], []),
        (["training.heldout_depth=5"], ["training.heldout_depth"]),
        (["training.heldout_depth=5", "data.heldout=a"], []),
        (["training.depth_decay=0.5", "head.unroll_steps=1"], ["training.depth_decay"]),
        (["training.confidence_loss=0.5"], ["training.confidence_loss"]),
        (["training.confidence_loss=0.5", "head.type=block"], []),
        (
            ["head.type=block", "head.unroll_steps=1", "head.causal=true", "head.mask_token_id=4"],
            ["head.mask_token_id", "head.causal"],
        ),
        (["head.type=block", "head.unroll_steps=2", "head.causal=true"], []),
        (["head.type=eagle", "head.detach_passes=false"], ["head.detach_passes"]),
        (["head.type=eagle", "head.detach_passes=false", "head.unroll_steps=2"], []),
        ([], []),
    ],
)
def test_settings_without_effect_are_named(
    file: Path, overrides: list[str], idle: list[str]
) -> None:
    assert load_config(file, overrides).without_effect() == idle


def test_identity_changes_with_the_head_but_not_with_the_length_of_training(file: Path) -> None:
    base = load_config(file).identity()
    assert load_config(file, ["training.max_steps=9"]).identity() == base
    assert load_config(file, ["head.unroll_steps=2"]).identity()["head"] != base["head"]


def test_a_changed_loss_goes_on_as_a_changed_decay_does_but_another_best_does_not(
    file: Path,
) -> None:
    """What held-out depth chose the best so far cannot be compared with what another one finds."""
    base = load_config(file).identity()
    for override in ("depth_decay=0.5", "loss=ce", "position_weights=dpace", "alive_prefix=true"):
        assert load_config(file, [f"training.{override}"]).identity() == base
    deep = load_config(file, ["training.heldout_depth=5"]).identity()
    assert {name for name in base if deep[name] != base[name]} == {"training.heldout_depth"}
