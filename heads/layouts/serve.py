"""How an exported head is served: a line for each consumer that its layout suits.

Consumers are the names of the schemas that a layout is checked against, as `vllm-0.32.0-eagle3`.
It knows the commands, and nothing of what a folder holds.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from drafthead.heads.base import DraftHead
from drafthead.heads.layouts.layout import Layout

DEPTH = 3
"""Tokens of a draft, for heads that draft to any depth."""

LABELS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tgi": "TGI",
    "eagle": "SafeAILab/EAGLE",
    "medusa": "FasterDecoding/Medusa",
    "hydra": "zankner/Hydra",
    "dflash": "z-lab/dflash",
    "transformers": "transformers",
    "speculators": "speculators",
}
"""Consumers as people call them."""


@dataclass(frozen=True)
class Use:
    """One consumer, and the command or call that serves the head there."""

    consumer: str
    """Name and version."""
    command: str


def uses_of(layout: Layout, head: DraftHead, folder: str, target: str = "") -> list[Use]:
    """One for each consumer of the layout; `folder` is what was exported.

    target: where its files are, if the name that the head knows it by is not enough to load it.
    """
    found = []
    for key in layout.consumers:
        match = re.fullmatch(r"([a-z]+)-([0-9a-f][\w.]*)-(.+)", key)
        if match is None:
            raise ValueError(f"consumer {key!r}: expected NAME-VERSION-KIND")
        name, version, kind = match.groups()
        command = command_of(name, kind, head, folder, target)
        found.append(Use(f"{LABELS.get(name, name)} {version}", command))
    return found


def command_of(consumer: str, kind: str, head: DraftHead, folder: str, target: str = "") -> str:
    """The command, or the call, that serves a head of this kind (`eagle3`, `dflash`, …)."""
    named, depth = head.contract.target, head.max_depth or DEPTH
    target = target or named
    model, place = shlex.quote(target), shlex.quote(folder)  # names of folders may have spaces
    if consumer == "speculators" and "/" in named:  # the folder names the target: a Hub id
        return f"vllm serve {place}"
    if consumer in ("vllm", "speculators"):
        asked = {"method": kind, "model": folder, "num_speculative_tokens": depth}
        return f"vllm serve {model} --speculative-config {shlex.quote(json.dumps(asked))}"
    if consumer == "sglang":
        return _sglang(kind, model, depth, place)
    own = {"eagle3": ", use_eagle3=True", "eagle": ", use_eagle3=False"}.get(kind, "")
    calls: dict[str, str] = {
        "tgi": f"text-generation-launcher --model-id {place}",
        "eagle": f"EaModel.from_pretrained(base_model_path={target!r}, "
        f"ea_model_path={folder!r}{own})",
        "medusa": f"MedusaModel.from_pretrained({folder!r})",
        "hydra": f"HydraModel.from_pretrained({folder!r})",
        "dflash": f"DFlashDraftModel.from_pretrained({folder!r})",
        "transformers": "target.generate(**inputs, assistant_model=draft, "
        'speculation_type="dflash")',
    }
    return calls[consumer]


def _sglang(kind: str, target: str, depth: int, folder: str) -> str:
    """SGLang counts the block of a block head with its anchor, and the root of a chain."""
    asked: dict[str, Any] = {"speculative-draft-model-path": folder}
    if kind not in ("dflash", "dspark"):
        asked |= {"speculative-num-steps": depth, "speculative-eagle-topk": 1}
    asked["speculative-num-draft-tokens"] = depth + 1
    flags = " ".join(f"--{name} {value}" for name, value in asked.items())
    start = "python -m sglang.launch_server --model-path"
    return f"{start} {target} --speculative-algorithm {kind.upper()} {flags}"
