"""The block head's closed-form start: it says what the regression says, and adds no tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import greedy_batches, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockHead, BlockSettings
from drafthead.heads.block_start import fading
from drafthead.heads.blocks import Rotary, rotate
from drafthead.heads.contract import describe
from drafthead.heads.warm_start import MODESTY

LAYERS = (2, 4, 5)

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "whole": {"num_key_value_heads": 4, "markov_rank": 64},
    "one key/value head": {"num_key_value_heads": 1},
    "no correction": {"markov_rank": 0},
    "masks alone": {"anchor_predicts": False, "mask_token_id": 5, "markov_rank": 0},
    "raw states": {"norm_features": False},
}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """Its embeddings have a direction in common, as those of trained models do."""
    made = tiny_target()
    with torch.no_grad():
        made.model.embed_tokens.weight += made.model.embed_tokens.weight.std()
    return made


@pytest.fixture(scope="module")
def batches(target: LlamaForCausalLM) -> list[TeacherBatch]:
    return greedy_batches(target, 12, LAYERS)


def block(target: LlamaForCausalLM, **settings: Any) -> BlockHead:
    torch.manual_seed(0)
    asked = BlockSettings(draft_vocab_size=None, unroll_steps=3, layers=LAYERS, **settings)
    head = asked.build(describe(target, None, LAYERS, {}), target.config, None)
    head.bind(target)
    head.train(False)
    return head


def overlaps(head: BlockHead, batches: list[TeacherBatch]) -> Tensor:
    """(2,) mean sum of min(p, q) of the first two depths."""
    totals = torch.zeros(2)
    with torch.no_grad():
        for batch in batches:
            for depth, prediction in enumerate(head.unroll(batch, 2)):
                truth = head.teacher_logits(batch.last_hidden.flatten(0, 1)[prediction.teacher])
                both = torch.minimum(prediction.logits.softmax(-1), truth.softmax(-1))
                totals[depth] += both.sum(-1).mean() / len(batches)
    return totals


@pytest.mark.parametrize("name", VARIANTS)
def test_it_beats_a_random_start_on_unseen_text_and_adds_no_tensor(
    name: str, target: LlamaForCausalLM, batches: list[TeacherBatch]
) -> None:
    head = block(target, **VARIANTS[name])
    before, names = overlaps(head, batches[10:]), list(head.state_dict())
    head.warm_start(batches[:10])
    assert list(head.state_dict()) == names
    after = overlaps(head, batches[10:])
    assert after[0] > before[0] + 0.02
    assert after[1] > before[1]


def test_its_first_guess_is_the_regression(
    target: LlamaForCausalLM, batches: list[TeacherBatch]
) -> None:
    """Held against a least-squares fit of states and token, made here."""
    head = block(target, num_key_value_heads=4, markov_rank=64)
    head.warm_start(batches[:10])
    embedding, rows = head.bound()

    def slots(batch: TeacherBatch) -> tuple[Tensor, Tensor]:
        parts = [F.rms_norm(x, x.shape[-1:]) for x in batch.features[:, :-2].chunk(3, -1)]
        token = F.rms_norm(embedding[batch.ids[:, 1:-1]], embedding.shape[-1:])
        goal = batch.last_hidden[:, 1:-1]
        return torch.cat([*parts, token], -1).flatten(0, 1), goal.flatten(0, 1)

    inputs, goals = (torch.cat(x) for x in zip(*map(slots, batches[:10]), strict=True))
    law = torch.linalg.lstsq(inputs, goals).solution
    with torch.no_grad():
        prediction = next(iter(head.unroll(batches[11], 1)))
        expected = MODESTY * slots(batches[11])[0] @ law @ rows.T
    cosine = F.cosine_similarity(prediction.logits, expected, dim=-1)
    assert cosine.mean() > 0.98
    shuffled = F.cosine_similarity(prediction.logits, expected.flip(0), dim=-1)
    assert shuffled.mean() < 0.9


@pytest.mark.parametrize(("theta", "width"), [(1e4, 64), (1e5, 64), (5e5, 128)])
def test_the_nearest_state_is_looked_at_from_every_place_of_a_block(
    theta: float, width: int
) -> None:
    rotary, length = Rotary(width, {"rope_theta": theta}), 8192
    look = fading(rotary.frequencies)
    cos, sin = rotary.tables(length, torch.device("cpu"), torch.float32)
    turned = rotate(look.expand(1, 1, length, width), cos[:length], sin[:length])
    product = turned[0, 0] @ look
    assert product[0] == pytest.approx(1.0, abs=1e-5)
    for distance in range(10):  # the nearest state's, and all that are further
        assert product[distance] - product[distance + 1 :].max() > 0.01


def test_geometry_and_batches_that_do_not_fit_are_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"head\.num_key_value_heads: 3 does not divide"):
        block(target, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"head\.warm_start: no supervised position"):
        block(target).warm_start([])
