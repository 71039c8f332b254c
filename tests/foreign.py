"""What tests of checkpoint layouts share: what is known of a target, and a way through a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.contract import describe
from drafthead.heads.layouts.layout import Asked


def asked_of(
    target: LlamaForCausalLM, layers: tuple[int, ...] | None = None, producer: str | None = None
) -> Asked:
    """What `import` knows of a live target."""
    return Asked(
        contract_of=lambda ids: describe(target, None, ids, {}),
        target=target.config,
        embedding=target.get_input_embeddings().weight.detach(),
        rows=target.get_output_embeddings().weight.detach(),
        layers=layers,
        producer=producer,
    )


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A foreign folder by hand."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 4) -> dict[str, Tensor]:
    """Norms near 1, the rest of a size at which every part shows."""
    made, draw = {}, torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        made[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * 1.5 * shape[-1] ** -0.5
    return made
