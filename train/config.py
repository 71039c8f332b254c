"""What a training run is told: one frozen tree of settings, read from YAML plus `a.b=c` overrides.

`RunConfig` only composes; a head's own settings are validated by the class its `type` names. The
module opens no data file and knows no model: it says what was asked for, not whether it works.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml import YAMLError

import drafthead.inference.sibling  # noqa: F401  (registers itself as a head)
from drafthead.data.embedded import EMBEDDED, preset_path
from drafthead.heads.base import HeadSettings, settings_class
from drafthead.train.losses import Kind

Beta = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A setting is unknown, missing or of the wrong kind; one line with its dotted path."""


class Settings(BaseModel):
    """Base of all groups: keyword-only, frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetConfig(Settings):
    """Which frozen model the head is trained for."""

    name: str = EMBEDDED
    """Hub id, folder, or `embedded`."""
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: bfloat16 when the run computes in bf16, else float32."""


class DataConfig(Settings):
    """Which conversations, and how much of them."""

    train: tuple[str, ...] = Field(min_length=1)
    """Files of conversations; `samples/NAME` is an embedded one."""
    heldout: tuple[str, ...] = ()
    """Conversations that are only evaluated. Without any, the best checkpoint is the last one."""
    strict: bool = False
    """Refuse a file for its first unusable row; otherwise such rows are skipped and counted."""
    max_length: int = Field(default=1024, ge=8)
    """Longest row, in tokens; the rest of a conversation is cut off."""
    template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, as at serving time."""
    positions: int | None = Field(default=None, ge=1)
    """Use only the first training rows with this many token positions together."""
    heldout_positions: int | None = Field(default=None, ge=1)
    """The same for held-out rows."""
    states: Path | None = None
    """Folder of the target's states, made by `drafthead extract` or `training.features=fill`."""
    states_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What states are stored in; read as stored, cast to `training.precision` in the step."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of `states`; what would come to more is refused before it begins."""
    check_space: bool = True
    """Refuse to begin a store that the disk has no room for, a reserve included."""

    @field_validator("train", "heldout", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class OptimiserConfig(Settings):
    """AdamW, fused, on fp32 master weights."""

    lr: float = Field(default=2e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm of one step."""


class ScheduleConfig(Settings):
    """The learning rate over optimiser steps, whatever the number of processes (F31)."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=20, ge=0)
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end, as a share of the peak."""


class LossSettings(Settings):
    """What a prediction costs, what it weighs, and how deep held-out chains are."""

    loss: Kind = "soft_ce"
    """See `train.losses.Kind`; `ce` and `ce_l1` learn the text's token, the others the target's
    distribution."""
    lk_eta: float = Field(default=3.0, ge=0)
    """How soon `lk` turns from divergence to overlap."""
    position_weights: Literal["decay", "exp", "dpace"] = "decay"
    """By depth: depth_decay ** depth, exp(-depth / depth_scale), or by what the head's own chances
    say about each chain (D-PACE, arXiv 2605.18810)."""
    depth_scale: float = Field(default=4.0, gt=0)
    """Of `exp`: depths after which a position weighs 1/e."""
    alive_prefix: bool = False
    """Count a depth only where the head's choice was the text's token at all before it."""
    loss_mean: Literal["supervised", "positions"] = "supervised"
    """What a step's loss is divided by: supervised tokens that can be drafted, or all positions up
    to the last supervised one of each row."""
    confidence_loss: float = Field(default=1.0, ge=0)
    """Weight of what a head's own forecast of acceptance costs, where the head makes one."""
    heldout_depth: int | None = Field(default=None, ge=1)
    """Drafts of a held-out simulated chain, at most what the head can make; None = as trained."""


class TrainingConfig(LossSettings):
    """How long, in what portions and precision."""

    epochs: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    """Wall-clock limit of steps and the evaluations between them; the first limit ends the run."""
    tokens_per_batch: int = Field(default=2048, ge=8)
    """Most positions, padding included, of one micro-batch of one process."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches of one optimiser step in each process."""
    depth_decay: float = Field(default=0.8, gt=0, le=1)
    """Of `position_weights=decay`: weight of each depth over that of the one before."""
    eval_every: int | None = Field(default=None, ge=1)
    """Optimiser steps between held-out evaluations; without it only at the end."""
    save_every: int = Field(default=200, ge=1)
    """Optimiser steps between resumable checkpoints."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """`bf16` is autocast over fp32 master weights; `auto` takes it where the device has it."""
    features: Literal["auto", "memory", "online", "store", "fill"] = "auto"
    """Where the target's states come from: `online` runs it every time, `memory` keeps them in RAM,
    `store` reads `data.states` and loads no target, `fill` writes there what is not there yet.
    `auto`: the store if one is named, else memory if they fit into `feature_bytes`, else online.
    """
    feature_bytes: int = Field(default=4 * 2**30, ge=0)
    """Most bytes of states kept in memory by one process."""
    partition_target: bool = False
    """Hold the frozen target in parts over all ranks (ZeRO stage 3), for one too large for each."""
    checkpoint_activations: bool = False
    """Compute what lies inside the head's layers again in the backward pass instead of keeping it:
    less memory, about a third more time."""
    start: Path | None = None
    """Folder of a trained head to begin from, in place of the first weights of a new one."""
    agreement_prompts: int = Field(default=8, ge=0)
    """Held-out prompts that the saved head drafts for at the end, as when it is served: what comes
    out has to be what training says of them. 0 = no such check."""
    max_skips: int = Field(default=5, ge=1)
    """Steps in a row with a loss or gradient that is not finite before the run stops."""

    @model_validator(mode="after")
    def _some_limit(self) -> TrainingConfig:
        if self.epochs is None and self.max_steps is None and self.max_minutes is None:
            object.__setattr__(self, "epochs", 1)
        return self


class RunConfig(Settings):
    """Everything a training run is told."""

    target: TargetConfig = TargetConfig()
    data: DataConfig
    head: SerializeAsAny[HeadSettings]
    optimiser: OptimiserConfig = OptimiserConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    out: Path = Path("runs/head")

    @field_validator("head", mode="before")
    @classmethod
    def _by_type(cls, value: Any) -> Any:
        if isinstance(value, HeadSettings):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise ConfigError("head.type: missing; it names the kind of head, such as 'eagle3'")
        chosen = settings_class(value["type"])
        try:
            return chosen.model_validate(dict(value))
        except ValidationError as error:
            raise ConfigError(explain(error, chosen, "head")) from None

    @model_validator(mode="after")
    def _store_named(self) -> RunConfig:
        if self.training.features in ("store", "fill") and self.data.states is None:
            raise ConfigError(
                f"data.states: missing; training.features={self.training.features} needs a folder"
            )
        return self

    @model_validator(mode="after")
    def _rows_fit(self) -> RunConfig:
        if self.training.tokens_per_batch < self.data.max_length:
            raise ConfigError(
                f"training.tokens_per_batch: {self.training.tokens_per_batch} cannot hold a row of "
                f"data.max_length={self.data.max_length}; raise the first or lower the second"
            )
        return self

    def without_effect(self) -> list[str]:
        """Settings that were given but that the others leave nothing to act on."""
        training, schedule, data = self.training, self.schedule, self.data
        one = self.head.unroll_steps == 1  # depth, which nothing is weighed against
        idle = {
            "training.eval_every": training.eval_every and not data.heldout,
            "data.heldout_positions": data.heldout_positions and not data.heldout,
            "schedule.min_ratio": schedule.min_ratio and schedule.kind == "constant",
            "data.states": data.states and training.features in ("memory", "online"),
            "training.partition_target": training.partition_target
            and data.states
            and training.features in ("auto", "store"),
            "data.max_bytes": data.max_bytes and training.features != "fill",
            "data.states_dtype": data.states_dtype != "bfloat16" and training.features != "fill",
            "training.lk_eta": training.loss != "lk" and self._given("lk_eta"),
            "training.depth_decay": (training.position_weights != "decay" or one)
            and self._given("depth_decay"),
            "training.depth_scale": (training.position_weights != "exp" or one)
            and self._given("depth_scale"),
            "training.alive_prefix": training.alive_prefix and one,
            "training.heldout_depth": training.heldout_depth and not data.heldout,
            "training.confidence_loss": self._given("confidence_loss")
            and not getattr(self.head, "confidence", False),
        }
        of_head = (f"head.{name}" for name in self.head.without_effect())
        return [*(name for name, without in idle.items() if without), *of_head]

    def _given(self, name: str) -> bool:
        """Whether a setting of `training` is not the default one."""
        value: object = getattr(self.training, name)
        return bool(value != type(self.training).model_fields[name].default)

    def identity(self) -> dict[str, str]:
        """Hashes of the parts that must not change under a checkpoint, by their names."""
        dump = self.model_dump(mode="json")
        training = dump["training"]
        for key in ("states", "max_bytes", "check_space"):  # where from, not which numbers
            del dump["data"][key]
        if self.data.states is None or self.data.states_dtype == "bfloat16":
            del dump["data"]["states_dtype"]
        parts = {part: dump[part] for part in ("target", "data", "head")}
        # Both decide which rows a micro-batch holds, and so what a place in the data means.
        parts |= {f"training.{key}": training[key] for key in ("tokens_per_batch", "seed")}
        # The best so far is the best at this depth.
        parts["training.heldout_depth"] = training["heldout_depth"]
        return {
            name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]
            for name, part in parts.items()
        }


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, or a preset by name, lay `a.b=c` overrides over it, and validate the whole.

    Raises ConfigError (one line, dotted path) for a setting, FileNotFoundError for the file.
    """
    path = config_path(source)
    try:
        loaded = OmegaConf.load(path)
        for text in overrides:
            if "=" not in text or text.startswith(("=", "-")):
                raise ConfigError(f"{text!r}: an override is written a.b=c")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: expected settings (key: value), found a list or nothing")
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from None


def config_path(source: str | Path) -> Path:
    """Find a config: a file, else a preset such as `smollm2-eagle3`."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    name = str(source).removeprefix("heads/")
    if "/" in name:
        raise FileNotFoundError(f"{source}: no such config file")
    try:
        return preset_path(f"heads/{name}")
    except ValueError as error:
        raise FileNotFoundError(f"{source}: no such config file, and {error}") from None


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names to plain values, as trackers take them."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str | int | float | bool)
            values[f"{prefix}{key}"] = value if plain else str(value)
    return values


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Put the first mistake into one line: dotted path, what is wrong, what is near."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ValueError) and (
        isinstance(inner, ConfigError) or first["loc"] in ((), ("head",))
    ):  # it names the setting itself
        return str(inner)
    loc = [str(part) for part in first["loc"]]
    where = ".".join([*([prefix] if prefix else []), *loc])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(loc[-1], _fields_at(model, loc[:-1]), n=1, cutoff=0.5)
        return f"{where}: unknown setting" + (f"; did you mean {near[0]!r}?" if near else "")
    if first["type"] == "missing":
        return f"{where}: missing"
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool | None) else ""
    return f"{where}: {message[0].lower()}{message[1:]}{shown}"


def _fields_at(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Names of the settings of the group at `loc`, or of none when it is not a group."""
    for part in loc:
        field = model.model_fields.get(part)
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)
