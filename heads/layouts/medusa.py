"""Medusa heads (arXiv 2401.10774) as vLLM 0.32.0, TGI and the reference read them.

One directory serves all three: `medusa_lm_head.safetensors` with the reference's old names, biases,
and output rows in every head. None of them borrows the target's rows, so borrowed ones are written
out, once for each head. The reference makes the blocks of one head from a single module, so it can
run several blocks only if they are equal; vLLM and TGI hold each on its own.

These readers take the order of a head's logits and nothing else of them: a target's logit scale and
soft cap, which keep it, need no place in the file (vLLM reads a scale).

Shapes: V vocabulary, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import LAST
from drafthead.heads.layouts.copies import built, count, filled, floats_in, is_copy, listed
from drafthead.heads.layouts.fields import dtype_fields
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, register
from drafthead.heads.medusa import MedusaHead, MedusaSettings

WEIGHTS = "medusa_lm_head.safetensors"

BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
ROWS = re.compile(r"(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight")
SHARED = "lm_head.weight"
PREFIXES = ("medusa_heads.", "medusa_head.")

HEADS = ("medusa_num_heads", "num_heads")
BLOCKS = ("medusa_num_layers", "num_hidden_layers", "num_layers")


class MedusaLayout:
    """Own output rows in each head, old names."""

    kind = "medusa"

    def __init__(
        self, name: str, formats: tuple[str, ...], consumers: tuple[str, ...], one_module: bool
    ) -> None:
        """`one_module`: whether a consumer makes the blocks of one head from a single module."""
        self.name, self.formats, self.consumers = name, formats, consumers
        self._one_module = one_module

    def refusals(self, head: DraftHead) -> list[str]:
        assert isinstance(head, MedusaHead)
        found = []
        if head.reduced:
            found.append(
                "no reader of Medusa heads takes a reduced vocabulary: "
                + (
                    "train with head.draft_vocab_size: null"
                    if head.settings.own_rows
                    else "write the whole one with --whole-vocabulary"
                )
            )
        if self._one_module and not _equal_blocks(head):
            found.append(
                "the reference repeats one block in each head, and those of this head differ: use "
                "--format vllm, or train with head.blocks: 1"
            )
        return found

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        """Written out with its rows: K * V * D more numbers where they are borrowed."""
        assert isinstance(head, MedusaHead)
        refusals = self.refusals(head)
        if refusals:
            raise LayoutError("; ".join(refusals))
        settings, contract = head.settings, head.contract
        tensors = {
            name.removeprefix("medusa_head."): x
            for name, x in head.state_dict().items()
            if name.startswith("medusa_head.")
        }
        if not settings.own_rows:
            rows = head.bound()[1].to(dtype).detach()
            for k in range(settings.unroll_steps):
                tensors[f"{k}.{settings.blocks}.weight"] = rows
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": contract.target,
            "hidden_size": contract.hidden_size,
            "vocab_size": contract.vocab_size,
            "medusa_num_heads": settings.unroll_steps,
            "medusa_num_layers": settings.blocks,
            "medusa_fc_bias": True,
            # Says what the tensors alone cannot: whether rows that equal the target's were trained.
            "medusa_lm_head": "own" if settings.own_rows else "target",
            **dtype_fields(dtype),
        }
        if contract.logit_scale != 1.0:
            config["logit_scale"] = contract.logit_scale
        return Stored(config, floats_in(tensors, dtype), WEIGHTS)

    def recognises(self, stored: Stored) -> bool:
        return stored.config.get("model_type") == "medusa" or "medusa_num_heads" in stored.config

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        """Either naming, with rows in each head, one set for all, or none (the target's)."""
        parts, place = Parts.of(stored), stored.place or "the checkpoint"
        parts.check(stored.config, place)
        rows = parts.own_rows(stored.config, asked, place)
        settings = MedusaSettings(
            draft_vocab_size=None,
            unroll_steps=parts.heads,
            blocks=parts.blocks,
            own_rows=rows is not None,
        )
        head = built(settings, asked.contract_of((LAST,)), asked.target, place)
        tensors = {}
        for (k, j), x in parts.weights.items():
            tensors[f"medusa_head.{k}.{j}.linear.weight"] = x
            # A missing bias is one of zeros: `check` has made sure that all of them are missing.
            bias = parts.biases.get((k, j), x.new_zeros(len(x)))
            tensors[f"medusa_head.{k}.{j}.linear.bias"] = bias
        for k, x in (rows or {}).items():
            tensors[f"medusa_head.{k}.{parts.blocks}.weight"] = x
        return filled(head, tensors, place)


@dataclass
class Parts:
    """The tensors of a folder by head and block, whichever names they had."""

    weights: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(D, D) by head and block."""
    biases: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(D,), all or none."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    """(V, D) by head, all or none."""
    behind: set[int] = field(default_factory=set)
    """Number of blocks that output rows stand behind, by their names."""
    shared: Tensor | None = None
    """(V, D) one set for all heads."""

    @classmethod
    def of(cls, stored: Stored) -> Parts:
        """LayoutError for a name that belongs to no Medusa head."""
        parts, unknown, seen = cls(), [], set()
        for full, x in stored.tensors.items():
            name = full
            for prefix in PREFIXES:
                name = name.removeprefix(prefix)
            if match := BLOCK.fullmatch(name):
                k, j, kind = match[1] or match[3], match[2] or match[4], match[5]
                kept = parts.weights if kind == "weight" else parts.biases
                kept[int(k), int(j)] = x
                meant = f"{k}.{j}.linear.{kind}"
            elif match := ROWS.fullmatch(name):
                k, j = match[1] or match[3], match[2]
                parts.rows[int(k)] = x
                parts.behind |= {int(j)} if j else set()
                meant = f"{k}.weight"
            elif name == SHARED:
                parts.shared = x
                meant = SHARED
            else:
                unknown.append(full)
                continue
            if meant in seen:
                raise LayoutError(f"{stored.place}: two tensors are what {full} is")
            seen.add(meant)
        if unknown:
            raise LayoutError(f"{stored.place}: not of a Medusa head: {listed(sorted(unknown))}")
        if not parts.weights:
            raise LayoutError(f"{stored.place}: no blocks of Medusa heads (0.0.linear.weight)")
        return parts

    @property
    def heads(self) -> int:
        return 1 + max(k for k, _ in self.weights)

    @property
    def blocks(self) -> int:
        return 1 + max(j for _, j in self.weights)

    def check(self, config: Mapping[str, Any], place: str) -> None:
        """LayoutError where the config says another layout than the tensors have."""
        width = len(next(iter(self.weights.values())))
        said = {
            "heads": (_said(config, HEADS, place), self.heads),
            "blocks in each head": (_said(config, BLOCKS, place), self.blocks),
            "as hidden width": (config.get("hidden_size"), width),
        }
        for what, (number, there) in said.items():
            if number is not None and number != there:
                raise LayoutError(
                    f"{place}: config.json says {number} {what}, the tensors have {there}: "
                    "one of the two belongs to another checkpoint"
                )
        if config.get("token_map") is not None or config.get("truncated_vocab_size") not in (
            None,
            config.get("vocab_size"),
        ):
            raise LayoutError(f"{place}: a truncated vocabulary (token_map) cannot be read")
        every = ((k, j) for k in range(self.heads) for j in range(self.blocks))
        hole = next((key for key in every if key not in self.weights), None)
        if hole is not None:
            raise LayoutError(f"{place}: no weight of block {hole[0]}.{hole[1]}")
        if self.behind - {self.blocks}:
            raise LayoutError(
                f"{place}: output rows are behind {max(self.behind)} blocks, of which there are "
                f"{self.blocks}"
            )
        if self.biases and self.biases.keys() != self.weights.keys():
            raise LayoutError(f"{place}: only some of the blocks have a bias")
        with_bias = config.get("medusa_fc_bias")
        if with_bias is not None and bool(with_bias) != bool(self.biases):
            has = "the blocks have biases" if self.biases else "no block has a bias"
            raise LayoutError(f"{place}: medusa_fc_bias is {with_bias}, but {has}")

    def own_rows(
        self, config: Mapping[str, Any], asked: Asked, place: str
    ) -> dict[int, Tensor] | None:
        """(V, D) by head, or None where all of them are the target's."""
        rows, one = dict(self.rows), bool(config.get("original_lm_head"))
        if one:
            # vLLM's name for a shared copy is lm_head; it also takes that of the first head.
            first = self.shared if self.shared is not None else rows.get(0)
            if first is None or rows.keys() - {0} or (rows and self.shared is not None):
                raise LayoutError(
                    f"{place}: original_lm_head is true, but the heads do not share one lm_head"
                )
            rows = dict.fromkeys(range(self.heads), first)
        elif self.shared is not None:
            raise LayoutError(f"{place}: it holds one {SHARED}, but original_lm_head is not true")
        whose = config.get("medusa_lm_head")
        if not rows:
            if whose == "own":
                raise LayoutError(f"{place}: medusa_lm_head is 'own', but no head has output rows")
            return None
        if rows.keys() != set(range(self.heads)):
            raise LayoutError(f"{place}: only heads {sorted(rows)} have output rows")
        borrowed = all(is_copy(x, asked.rows) for x in rows.values())
        if whose == "target" and not borrowed:
            raise LayoutError(
                f"{place}: medusa_lm_head is 'target', but the output rows are not the target's"
            )
        return None if borrowed and whose != "own" else rows


class Medusa2Layout:
    """No layout at all: it says why, where a Medusa-2 head is asked for in Medusa's formats."""

    kind = "medusa2"
    name = "medusa2"
    formats: tuple[str, ...] = ("medusa", "sglang", "vllm")
    consumers: tuple[str, ...] = ()

    def refusals(self, head: DraftHead) -> list[str]:
        return [
            "a Medusa-2 head drafts for its target as its own adapter changes it, and Medusa's "
            "format holds heads alone: train one of type medusa"
        ]

    def write(self, head: DraftHead, dtype: torch.dtype) -> Stored:
        raise LayoutError(self.refusals(head)[0])

    def recognises(self, stored: Stored) -> bool:
        return False

    def read(self, stored: Stored, asked: Asked) -> DraftHead:
        raise LayoutError(f"{stored.place}: no folder is of this layout")


def _said(config: Mapping[str, Any], names: tuple[str, ...], place: str) -> int | None:
    """The first of these fields that a config has."""
    for name in names:
        if name in config:
            return count(config[name], name, place)
    return None


def _equal_blocks(head: MedusaHead) -> bool:
    """Whether all blocks of each head hold the same numbers."""
    for sequence in head.medusa_head:
        blocks = list(cast(torch.nn.Sequential, sequence))[: head.settings.blocks]
        first = blocks[0].state_dict()
        for block in blocks[1:]:
            if not all(torch.equal(x, first[name]) for name, x in block.state_dict().items()):
                return False
    return True


VLLM = "vllm-0.32.0-medusa"
register(
    MedusaLayout(
        "medusa", ("medusa", "vllm"), (VLLM, "tgi-db931fcf-medusa", "medusa-e2a5d20c-medusa"), True
    )
)
register(MedusaLayout("medusa-vllm", ("vllm",), (VLLM, "tgi-db931fcf-medusa"), False))
register(Medusa2Layout())
