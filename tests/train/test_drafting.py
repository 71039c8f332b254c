"""A round's cost, held against torch's own counts of real heads and against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ladder import LADDER, ladder_head
from tiny import tiny_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from drafthead.heads.base import DraftHead, HeadSettings
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.medusa import MedusaSettings
from drafthead.inference.sibling import SiblingSettings
from drafthead.train.config import RunConfig
from drafthead.train.drafting import DraftCost, DraftShape, WeightReads, draft_calls, draft_costs

CONTEXT, WORDS = 24, 256
CHAIN, TREE = DraftShape(4), DraftShape(3, 3)
KINDS = ("block", "block-dflash", "eagle-hass", "eagle3", "hydra++", "medusa-own-rows")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def told(settings: HeadSettings, bf16: bool = False) -> tuple[DraftCost, ...]:
    """The costs of the chain and of the tree."""
    config: Any = {"data": {"train": "no-such-file.jsonl"}, "head": settings}
    target = tiny_target().config
    return draft_costs(RunConfig.model_validate(config), target, bf16, [CHAIN, TREE], CONTEXT)


def counted(head: DraftHead, shape: DraftShape) -> int:
    """Operations of the matrix products of a real round, as torch's profiler counts them."""
    calls = draft_calls(head, shape, CONTEXT)
    # The products inside attention are counted only where they are products of their own.
    with sdpa_kernel(SDPBackend.MATH):
        next(calls)
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as seen:
            for _ in calls:
                pass
    return int(sum(event.flops for event in seen.key_averages() if event.key in PRODUCTS))


@pytest.mark.parametrize("name", KINDS)
def test_the_operations_are_those_that_torch_counts_in_a_real_head(name: str) -> None:
    head = ladder_head(name, tiny_target())
    chain, tree = told(LADDER[name])
    assert 2 * chain.macs == counted(head, CHAIN)
    assert 2 * tree.macs == counted(head, TREE)
    assert chain.shape.depth == min(CHAIN.depth, head.max_depth or CHAIN.depth)


def test_a_sibling_is_counted_like_a_head() -> None:
    target, settings = tiny_target(), SiblingSettings(keep_layers=2)
    head = settings.build(describe(target, None, (), {}), target.config, None)
    head.bind(target)
    chain, tree = told(settings)
    assert (2 * chain.macs, 2 * tree.macs) == (counted(head, CHAIN), counted(head, TREE))


def test_an_eagle3_round_is_the_sum_of_its_parts() -> None:
    settings = Eagle3Settings(draft_vocab_size=WORDS)
    target = tiny_target().config
    D, inner, d = target.hidden_size, target.intermediate_size, target.head_dim
    heads, kv_heads = target.num_attention_heads, target.num_key_value_heads
    captured = len(settings.captured(target.num_hidden_layers))
    fused = captured * D * D
    layer = 2 * D * (heads + 2 * kv_heads) * d + heads * d * D + 3 * D * inner
    rows = WORDS * D
    for cost, shape in zip(told(settings, bf16=True), (CHAIN, TREE), strict=True):
        levels, width = range(1, shape.depth), shape.width
        seen = [(1, CONTEXT + 1), *((width, CONTEXT + 1 + level * width) for level in levels)]
        attention = sum(2 * heads * d * queries * slots for queries, slots in seen)
        nodes = 1 + width * len(levels)
        assert cost.macs == fused + nodes * (layer + rows) + attention

        norms, looked_up = (captured + 4 * shape.depth) * D, nodes * D
        read = fused + shape.depth * (layer + rows) + norms + looked_up
        assert cost.bytes == 2 * read, "two bytes in bfloat16"
        assert (cost.steps, cost.small_steps) == (shape.depth, 0)


def test_a_medusa_round_runs_one_of_its_heads_for_each_level_however_wide_it_is() -> None:
    costs = told(MedusaSettings(draft_vocab_size=WORDS, unroll_steps=4))
    D = tiny_target().config.hidden_size
    for cost, shape in zip(costs, (CHAIN, TREE), strict=True):
        # A residual block, and the borrowed rows behind it.
        assert cost.macs == shape.depth * (D * D + WORDS * D)
        assert cost.bytes == 4 * shape.depth * (D * D + D + WORDS * D)
        assert cost.steps == shape.depth


def test_a_view_of_a_weight_reads_nothing_and_its_use_reads_all_of_it() -> None:
    head = ladder_head("eagle3", tiny_target())
    weight = next(p for p in head.parameters() if p.dim() == 2)
    with WeightReads(head) as reads, torch.no_grad():
        view = weight.t()[:, :3]
        assert reads.numbers == 0
        torch.ones(1, view.shape[0]) @ view
        assert reads.numbers == view.numel()
        torch.ones(4) * 2
        assert reads.numbers == view.numel(), "not a weight"
