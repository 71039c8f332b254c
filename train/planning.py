"""What `forecast` needs, found without a network: the target's config, the rows, the launcher's."""

from __future__ import annotations

import json
import logging
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoConfig, PreTrainedConfig

from drafthead.data.batches import plan
from drafthead.data.embedded import EMBEDDED, data_path, default_target
from drafthead.train.config import RunConfig
from drafthead.train.placing import DataFacts, facts_of

logger = logging.getLogger(__name__)

MOST_DATA = 64 * 2**20
"""Bytes of training files that are read and tokenised for a forecast."""


def target_config(name: str, given: Path | None = None) -> PreTrainedConfig:
    """A target's config, from what is given, its own folder, the shipped facts, or the hub.

    Raises OSError or ValueError, one line, where there is none of them.
    """
    folder = given or Path(default_target() if name == EMBEDDED else name)
    if folder.is_dir():
        folder = folder / "config.json"
    if folder.is_file():
        return _read(folder)
    if given is not None:
        raise FileNotFoundError(f"--target-config {given}: no such file, and no folder with one")
    for path in sorted(Path(str(resources.files("drafthead.configs"))).glob("targets/*.json")):
        if name in json.loads(path.read_text())["hub_ids"]:
            return _read(path)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(
            f"target {name!r}: its config cannot be had; give it with --target-config FILE.json"
        ) from error
    return found


def _read(path: Path) -> PreTrainedConfig:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        facts.pop("hub_ids", None)
        config: PreTrainedConfig = AutoConfig.for_model(facts.pop("model_type"), **facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not the config of a model ({reason})") from error
    return config


def data_facts(config: RunConfig) -> DataFacts | None:
    """Facts of the training rows; None where they, or the tokenizer, are not here or are large."""
    name = config.target.name
    folder = default_target() if name == EMBEDDED else Path(name)
    try:
        files = [data_path(file) for file in config.data.train]
        if not (folder / "tokenizer.json").is_file():
            return None
        if not files or not all(Path(file).is_file() for file in files):
            return None
        size = sum(Path(file).stat().st_size for file in files)
    except (OSError, ValueError):
        return None
    if size > MOST_DATA:
        logger.info("data: %d MB are not read for a forecast", size >> 20)
        return None
    from drafthead.data.chat import ChatFormat
    from drafthead.inference.target import load_tokenizer
    from drafthead.train.assemble import read_rows

    chat = ChatFormat(load_tokenizer(folder), config.data.template_kwargs)
    rows = read_rows(config.data.train, config.data, chat, config.data.positions)
    lengths = [len(row.ids) for row in rows]
    starts = [sum(1 for _ in takewhile(lambda seen: not seen, row.mask)) for row in rows]
    training = config.training
    return facts_of(lengths, starts, plan(lengths, training.tokens_per_batch, training.seed))


def launch_settings(path: Path) -> tuple[int, int, bool]:
    """Processes, ZeRO stage and whether the optimiser is offloaded, from accelerate's config."""
    if not path.is_file():
        raise FileNotFoundError(f"--accelerate {path}: no such file")
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(found, dict) or "num_processes" not in found:
        raise ValueError(f"--accelerate {path}: no config of accelerate (num_processes is missing)")
    deepspeed = found.get("deepspeed_config") or {}
    offload = str(deepspeed.get("offload_optimizer_device", "none")) != "none"
    return int(found["num_processes"]), int(deepspeed.get("zero_stage", 0)), offload
