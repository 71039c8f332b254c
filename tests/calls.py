"""Calls of `generate`, drafted and not, on batches padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target

OURS = ("tree", "rule", "lossy", "seed", "streams", "streamer", "tokenizer")


def batch_of(prompts: Sequence[Sequence[int]], pads: int = 0, pad: int = 0) -> dict[str, Tensor]:
    """Prompts padded on the left to the longest, and by `pads` more."""
    width = max(map(len, prompts)) + pads
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def own(target: Target, prompts: Sequence[Sequence[int]], **settings: Any) -> Any:
    """What transformers' own loop makes of it."""
    asked = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **settings}
    pads = asked.pop("pads", 0)
    return target.model.generate(**batch_of(prompts, pads, asked["pad_token_id"] or 0), **asked)


def generate(
    target: Target, drafter: Any, prompts: Sequence[Sequence[int]], **settings: Any
) -> Any:
    """The same drafted for; `speculate` takes its settings by name."""
    ours = {name: settings.pop(name) for name in OURS if name in settings}
    return own(target, prompts, custom_generate=speculate(drafter, **ours), **settings)
