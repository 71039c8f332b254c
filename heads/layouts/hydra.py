"""Hydra heads (arXiv 2402.05109) as the reference reads them (zankner/Hydra); no engine does.

The archive is the state dict of its `hydra_head`, tensors alone: grounded MLPs, output rows with a
bias for every depth, and the target's embedding, which is a module of the head there. Blocks after
the first of an MLP are one module repeated, so they can be run only if they are equal.

Hydra++ (`prefix-mlp`) is not the same there: its layer over the context is a whole Llama model of
one layer, whose final norm comes after it, and ours has no norm in that place.

Shapes: V vocabulary, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import LAST
from drafthead.heads.hydra import HydraHead, HydraSettings
from drafthead.heads.layouts.copies import built, count, filled, floats_in, is_copy
from drafthead.heads.layouts.fields import dtype_fields
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register

WEIGHTS = "hydra_lm_head.pt"
EMBEDDING = "input_embed_fn.weight"
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.")
ROWS = re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)")


class HydraLayout:
    """`hydra_head_arch` mlp, grounded."""

    kind = "hydra"
    name = "hydra"
    formats: tuple[str, ...] = ("hydra",)
    consumers: tuple[str, ...] = ("hydra-3f39fbd2-hydra",)

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, HydraHead)
        found = []
        if head.reduced:
            found.append(
                "the reference takes no reduced vocabulary: "
                + (
                    "train with head.draft_vocab_size: null"
                    if head.settings.own_rows
                    else "write the whole one with --whole-vocabulary"
                )
            )
        if head.settings.prefix_attention:
            found.append(
                "the reference norms what its layer over the context gives, and this head's does "
                "not: train with head.prefix_attention: false"
            )
        if not _equal_blocks(head):
            found.append(
                "the reference repeats one block after the first, and those of this head differ: "
                "train with head.mlp_layers of at most 2"
            )
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        """Written out with rows where they are borrowed, and with the target's embedding."""
        assert isinstance(head, HydraHead)
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        settings = head.settings
        embedding, rows = head.bound()
        tensors = {EMBEDDING: embedding, **head.state_dict()}
        if not settings.own_rows:
            rows = rows.to(dtype)
            for k in range(settings.unroll_steps):
                tensors[f"hydra_lm_head.{k}.weight"] = rows
                tensors[f"hydra_lm_head.{k}.bias"] = rows.new_zeros(len(rows))
        config: dict[str, Any] = {
            "hydra_num_heads": settings.unroll_steps,
            "hydra_num_layers": settings.mlp_layers,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": head.contract.target,
            "hidden_size": head.contract.hidden_size,
            "vocab_size": head.contract.vocab_size,
            # Says what the tensors alone cannot: whether rows that equal the target's were trained.
            "hydra_lm_head": "own" if settings.own_rows else "target",
            **dtype_fields(dtype),
        }
        return Stored(config, floats_in(tensors, dtype), WEIGHTS)

    def recognises(self, stored: Stored) -> bool:
        return "hydra_num_heads" in stored.config

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        place, config = stored.place or "the checkpoint", stored.config
        _check_kind(config, place)
        tensors = dict(stored.tensors)
        embedding = tensors.pop(EMBEDDING, None)
        if embedding is not None and not is_copy(embedding, asked.embedding):
            raise LayoutError(
                f"{place}: {EMBEDDING} is not the target's: Hydra heads here borrow it"
            )
        heads, blocks = _counted(tensors, config, place)
        own = _own_rows(tensors, config, asked, heads, place)
        if not own:
            tensors = {name: x for name, x in tensors.items() if not ROWS.fullmatch(name)}
        settings = HydraSettings(
            draft_vocab_size=None, unroll_steps=heads, mlp_layers=blocks, own_rows=own
        )
        head = built(settings, asked.contract_of((LAST,)), asked.target, place)
        return filled(head, tensors, place)


def _check_kind(config: Mapping[str, Any], place: str) -> None:
    """LayoutError for the heads of the reference that are computed otherwise."""
    kind = config.get("hydra_head_arch", "mlp")
    if kind != "mlp":
        raise LayoutError(f"{place}: hydra_head_arch is {kind!r}; only 'mlp' can be read")
    if not config.get("grounded_heads", False):
        raise LayoutError(f"{place}: heads that are not grounded see no tokens, and cannot be read")
    if config.get("hidden_state_offset", 0):
        raise LayoutError(
            f"{place}: hidden_state_offset is {config['hidden_state_offset']}; only heads of the "
            "last state can be read"
        )


def _counted(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], place: str
) -> tuple[int, int]:
    """Depths and blocks of each MLP; LayoutError where config and tensors disagree."""
    found = [match for name in tensors if (match := BLOCK.match(name))]
    if not found:
        raise LayoutError(f"{place}: no blocks of Hydra heads (hydra_mlp.0.0.linear.weight)")
    if 1 + max(int(match[1]) for match in found) > len(found):
        raise LayoutError(f"{place}: not every Hydra head has blocks")
    there = {
        "hydra_num_heads": 1 + max(int(match[1]) for match in found),
        "hydra_num_layers": 1 + max(int(match[2]) for match in found),
    }
    for name, number in there.items():
        said = config.get(name)
        if said is not None and count(said, name, place) != number:
            raise LayoutError(
                f"{place}: {name} is {said}, the tensors have {number}: one of the two belongs to "
                "another checkpoint"
            )
    return there["hydra_num_heads"], there["hydra_num_layers"]


def _own_rows(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    asked: Asked,
    heads: int,
    place: str,
) -> bool:
    """Whether any depth has output rows or a bias that are not the target's."""
    rows = {name: x for name, x in tensors.items() if ROWS.fullmatch(name)}
    expected = {f"hydra_lm_head.{k}.{part}" for k in range(heads) for part in ("weight", "bias")}
    if rows and rows.keys() != expected:
        raise LayoutError(f"{place}: output rows and biases are there for some depths only")
    borrowed = all(
        is_copy(x, asked.rows) if name.endswith("weight") else not bool(x.any())
        for name, x in rows.items()
    )
    whose = config.get("hydra_lm_head")
    if (whose == "target" and not borrowed) or (whose == "own" and not rows):
        has = "none" if not rows else "others than the target's"
        raise LayoutError(f"{place}: hydra_lm_head is {whose!r}, but there are output rows: {has}")
    return bool(rows) and (whose == "own" or not borrowed)


def _equal_blocks(head: HydraHead) -> bool:
    """Whether all blocks after the first of each MLP hold the same numbers."""
    for mlp in head.hydra_mlp:
        later = [block.state_dict() for block in list(cast(nn.ModuleList, mlp))[1:]]
        if not all(torch.equal(x, later[0][name]) for own in later[1:] for name, x in own.items()):
            return False
    return True


register(HydraLayout())
