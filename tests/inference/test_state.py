"""After every round the target's store and the drafter's features are those of a fresh prefill.

All families; four ragged rows, whose accepted path is never the first branch of their trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafts import HalfRight, own_greedy, prompt_of
from families import EAGER_ONLY, FAMILIES, TOLERANCE
from torch import Tensor
from transformers import DynamicCache

from drafthead.inference.decoder import Decoder
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target

LAYERS = (1, 2)
TOKENS = 14
LENGTHS = (5, 1, 19, 12)


@torch.no_grad()
def fresh(target: Target, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Keys and values, (H, T, d) each, and states (T, L * D) of a prefill by transformers."""
    cache = DynamicCache()  # without a config it holds windowed layers in full
    out = target.model(
        torch.tensor([list(ids)]), cache=cache, use_cache=True, output_hidden_states=True
    )
    buffers = [buffer[0] for layer in cache.layers for buffer in (layer.keys, layer.values)]
    return buffers, torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_f40_f41_store_and_features_equal_a_fresh_prefill_after_every_round(
    family: str, attention: str
) -> None:
    if attention == "sdpa" and family in EAGER_ONLY:
        attention = "eager"
    model = FAMILIES[family]().double()
    model.set_attn_implementation(attention)
    target, tolerance = Target(model), TOLERANCE[attention]
    prompts = [prompt_of(n) for n in LENGTHS]
    texts = [own_greedy(target, prompt, TOKENS) for prompt in prompts]
    expected = [fresh(target, text) for text in texts]
    drafter = HalfRight(texts, [1, 0, 3, 2], tree=True, layers=LAYERS)
    decoder = Decoder(target, Sampler(), drafter, batch=4, capacity=max(LENGTHS) + TOKENS)
    rows = [Row(list(prompt), TOKENS, stop_at(())) for prompt in prompts]
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    while decoder.running:
        running = [not row.done for row in rows]
        decoder.round()
        for slot, row in enumerate(rows):
            if not running[slot]:
                continue
            length = decoder.store.lengths[slot]
            assert length == len(row.ids) - 1, "all but the root"
            assert row.ids == texts[slot][: len(row.ids)]
            buffers, states = expected[slot]
            ours = [b[slot, :, :length] for layer in decoder.store.kept for b in layer.buffers]
            for held, true in zip(ours, buffers, strict=True):
                torch.testing.assert_close(held, true[:, :length], atol=tolerance, rtol=0)
            if not row.done:
                features = torch.cat(drafter.features[slot])
                torch.testing.assert_close(features, states[:length], atol=tolerance, rtol=0)
    accepted = [r.accepted for row in rows for r in row.rounds]
    assert {0, 1, 2, 3} <= set(accepted)
