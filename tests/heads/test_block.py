"""The block head: what a block sees, in training and in decoding, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ladder import LADDER
from plain_block import block_head, plain_block, some_batch
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads import block_layer
from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockHead

CLOSE = {"atol": 2e-6, "rtol": 0.0}  # norms and rotary tables are made in fp32
BLOCKS = [name for name in LADDER if name.startswith("block")]
every_block = pytest.mark.parametrize("name", BLOCKS)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


@every_block
def test_f36_unroll_is_the_plain_block(name: str, target: LlamaForCausalLM) -> None:
    """In packed rows as well; the first slot and the last of each sequence among them."""
    head = block_head(name, target)
    assert head.config.rms_norm_eps == 1e-6
    batch, T = some_batch(head, target), 20
    packed = batch.packed()
    assert packed.starts is not None
    begins = packed.starts.unique().tolist()
    with torch.no_grad():
        depths = [list(head.unroll(b, head.settings.unroll_steps)) for b in (batch, packed)]
    compared = 0
    for i in range(head.settings.unroll_steps):
        apart, together = (d[i] for d in depths)
        for row, slot in ((0, 1), (1, 2), (1, 7 - i), (0, T - 8 - i), (1, T - 3 - i)):
            logits, chance = plain_block(head, batch.features[row], batch.ids[row], slot)
            for prediction, start in ((apart, row * T), (together, begins[row])):
                found = (prediction.teacher == start + slot + 1 + i).nonzero()
                if not batch.mask[row, slot + 2 + i]:
                    assert len(found) == 0
                    continue
                compared += 1
                at = int(found.item())
                torch.testing.assert_close(prediction.logits[at], logits[i], **CLOSE)
                if chance is not None:
                    assert prediction.confidence is not None
                    torch.testing.assert_close(prediction.confidence[at], chance[i], **CLOSE)
    assert compared >= 7 * head.settings.unroll_steps


@every_block
def test_f36_decoding_is_the_plain_block_and_knows_its_chances(
    name: str, target: LlamaForCausalLM
) -> None:
    """A tree: every node's logits and chance are those of a text with its path."""
    head = block_head(name, target)
    batch = some_batch(head, target)
    state, n = head.open(1, 32), 6
    if head.settings.confidence:
        head.calibration.copy_(torch.linspace(0.5, 2.0, head.settings.unroll_steps))
    first = head.extend(state, batch.features[:1, :n], batch.ids[:1, 1 : n + 1], torch.tensor([n]))
    texts: list[list[int]] = [[]]
    calls = [(first[None], head.confidence(state), [0])]
    for tokens, parents in (([5, 6], [-1, -1]), ([7, 8, 9], [1, 0, 1]), ([10], [3])):
        logits = head.expand(state, torch.tensor([tokens]), torch.tensor([parents]))
        new = range(len(texts), len(texts) + len(tokens))
        texts += [[*texts[p + 1], t] for t, p in zip(tokens, parents, strict=True)]
        calls.append((logits, head.confidence(state), list(new)))
    for logits, chances, nodes in calls:
        for at, node in enumerate(nodes):
            text = torch.cat((batch.ids[0, : n + 1], torch.tensor(texts[node]).long()))
            expected, chance = plain_block(head, batch.features[0], text, n - 1)
            depth = len(texts[node])
            torch.testing.assert_close(logits[0, at], expected[depth], **CLOSE)
            assert (chances is None) == (chance is None)
            if chances is not None and chance is not None:
                shown = (chance[depth] / head.calibration[depth]).sigmoid()
                torch.testing.assert_close(chances[0, at], shown, atol=1e-5, rtol=0)


def test_control_a_bidirectional_block_is_not_a_causal_one(target: LlamaForCausalLM) -> None:
    head = block_head("block-causal", target)
    batch = some_batch(head, target)
    logits = [p.logits for p in head.unroll(batch, 4)]
    head.settings = head.settings.model_copy(update={"causal": False})
    for causal, both in zip(logits[:-1], head.unroll(batch, 4), strict=False):
        assert not torch.allclose(causal, both.logits, atol=1e-3)


def test_what_a_block_drafts_does_not_depend_on_how_much_is_asked_for(
    target: LlamaForCausalLM,
) -> None:
    head = block_head("block", target)
    batch = some_batch(head, target)
    whole = list(head.unroll(batch, 99))
    assert len(whole) == 5
    for few, all_of_them in zip(head.unroll(batch, 2), whole[:2], strict=True):
        torch.testing.assert_close(few.logits, all_of_them.logits)


# Memory of the unroll


def gradients(head: BlockHead, batch: TeacherBatch) -> Iterator[Tensor]:
    head.zero_grad()
    total = sum(p.logits.logsumexp(-1).sum() for p in head.unroll(batch, 5))
    assert isinstance(total, Tensor)
    total.backward()
    yield total.detach()
    yield from (p.grad.clone() for p in head.parameters() if p.grad is not None)


def test_masks_and_scores_of_few_blocks_exist_at_one_time(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many anchors there are, and with the same logits and gradients."""
    head = block_head("block", target)
    batch = some_batch(head, target, T=40)
    whole = list(gradients(head, batch))
    sizes: list[int] = []
    attention = block_layer.masked_attention

    def watched(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        sizes.append(mask[0].numel())
        return attention(q, keys, values, mask)

    monkeypatch.setattr(block_layer, "masked_attention", watched)
    monkeypatch.setattr(block_layer, "CHUNK", 24)
    in_parts = list(gradients(head, batch))
    assert len(sizes) > 2 * 8, "38 anchors, 4 at a time, in two layers"
    assert max(sizes) <= 24 * (24 + 40)
    head.gradient_checkpointing = True
    again = list(gradients(head, batch))
    for mine, parts, anew in zip(whole, in_parts, again, strict=True):
        torch.testing.assert_close(parts, mine)
        torch.testing.assert_close(anew, mine)


# Anchors


def test_anchors_are_drawn_in_training_only(target: LlamaForCausalLM) -> None:
    head = block_head("block", target)
    batch = some_batch(head, target, T=60)

    def slots(seed: int) -> list[set[int]]:
        torch.manual_seed(seed)
        found = [set((p.teacher - 1 - i).tolist()) for i, p in enumerate(head.unroll(batch, 5))]
        slots.state = torch.get_rng_state()  # type: ignore[attr-defined]
        return found

    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    every = slots(1)
    assert slots.state.equal(untouched)  # type: ignore[attr-defined]
    logits = list(head.unroll(batch, 5))
    head.train()
    first = slots(1)
    assert first == slots(1) != slots(2)
    for i, (some, all_of_them) in enumerate(zip(first, every, strict=True)):
        assert some < all_of_them
        assert some == first[0] & all_of_them | some - first[0], "one draw for all depths"
        assert 0.3 < len(some) / len(all_of_them) < 0.7, i
    torch.manual_seed(1)
    for i, prediction in enumerate(head.unroll(batch, 5)):
        at = torch.isin(logits[i].teacher, prediction.teacher)
        torch.testing.assert_close(prediction.logits, logits[i].logits[at])
    head.settings = head.settings.model_copy(update={"anchor_share": 1.0})
    assert slots(1) == every
    assert slots.state.equal(untouched)  # type: ignore[attr-defined]
