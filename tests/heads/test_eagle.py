"""EAGLE-1 and HASS against a twin written out step by step; what only training adds; the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import naive_layer
from tiny import tiny_batch, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.heads import eagle as module
from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import LAST, describe
from drafthead.heads.eagle import EagleHead, EagleSettings
from drafthead.heads.load import load_head

REDUCED = torch.arange(0, 512, 3)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # statistics of norms and scores are fp32
WHOLE: dict[str, Any] = {"draft_vocab_size": None}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def build(target: LlamaForCausalLM, ids: Tensor | None = None, **options: Any) -> EagleHead:
    """A bound head with random weights of which every part shows."""
    settings = EagleSettings(draft_vocab_size=None if ids is None else len(ids), **options)
    torch.manual_seed(1)
    head = settings.build(describe(target, None, (LAST,), {}), target.config, ids)
    head.to(target.dtype)  # type: ignore[arg-type]
    head.bind(target)
    with torch.no_grad():
        for parameter in (*head.parameters(), head.fc.bias):
            spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()


def batch_of(target: LlamaForCausalLM, B: int = 2, T: int = 12) -> TeacherBatch:
    ids = torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(5))
    return tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), (LAST,))


def twin(
    head: EagleHead, target: LlamaForCausalLM, batch: TeacherBatch, row: int, slot: int, steps: int
) -> Tensor:
    """(steps, V) logits of one rollout: true states up to the slot, then the head's own."""
    weights = dict(head.named_parameters()) | {"fc.bias": head.fc.bias}
    inner = {n.removeprefix("layers.0."): w for n, w in weights.items() if "layers.0." in n}
    table, ids = target.model.embed_tokens.weight, batch.ids[row]
    detach = head.settings.detach_passes

    def fuse(token: int, state: Tensor) -> Tensor:
        return weights["fc.weight"] @ torch.cat((table[ids[token]], state)) + weights["fc.bias"]

    streams = [fuse(t + 1, batch.features[row, t]) for t in range(slot + 1)]
    outputs = []
    for i in range(steps):
        if i:
            streams.append(fuse(slot + 1 + i, outputs[-1].detach() if detach else outputs[-1]))
        outputs.append(naive_layer(inner, head.config, streams, range(slot + 1 + i)))
    return torch.stack(outputs) @ target.lm_head.weight.T


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied, wide heads, own base": ({"tied": True, "head_dim": 32}, {"rope_theta": 500.0}),
    "other width and bias": ({"rope_theta": 1e6}, {"intermediate_size": 96, "fc_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_f36_unroll_is_the_twins_rollout(name: str) -> None:
    kind, options = VARIANTS[name]
    target: LlamaForCausalLM = tiny_target(**kind).double()  # type: ignore[assignment]
    head, batch, steps = build(target, **options), batch_of(tiny_target(**kind).double()), 3
    with torch.no_grad():
        depths = list(head.unroll(batch, steps))
        for row, slot in ((0, 0), (1, 4), (0, 12 - 2 - steps)):
            expected = twin(head, target, batch, row, slot, steps)
            assert expected.std() > 0.1
            for depth, prediction in enumerate(depths):
                at = (prediction.teacher == row * 12 + slot + 1 + depth).nonzero().item()
                torch.testing.assert_close(prediction.logits[int(at)], expected[depth], **CLOSE)


def test_f36_a_later_pass_of_hass_trains_what_decoding_runs(target: LlamaForCausalLM) -> None:
    """Its gradient is the rollout's, with what it was fed held fixed; control: let loose."""
    gradients: dict[tuple[str, bool], list[Tensor]] = {}
    for detach in (True, False):
        head, batch = build(target, detach_passes=detach), batch_of(target)
        prediction = list(head.unroll(batch, 3))[2]
        at = int((prediction.teacher == 12 + 4 + 1 + 2).nonzero())  # row 1, slot 4
        unrolled, rolled = prediction.logits[at], twin(head, target, batch, 1, 4, 3)[2]
        for name, logits in (("unroll", unrolled), ("twin", rolled)):
            value = F.cross_entropy(logits[None], batch.ids[1, 4 + 2 + 2][None])
            gradients[name, detach] = list(torch.autograd.grad(value, list(head.parameters())))
    for detach in (True, False):
        for mine, expected in zip(
            gradients["unroll", detach], gradients["twin", detach], strict=True
        ):
            torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)
    fc = gradients["unroll", True][0], gradients["unroll", False][0]
    assert (fc[0] - fc[1]).norm() > 0.05 * fc[1].norm()


def test_recomputed_activations_give_the_same_gradients(target: LlamaForCausalLM) -> None:
    head, batch = build(target, topk_loss=0.5).train(), batch_of(target)
    found = []
    for recompute in (False, True):
        if recompute:
            head.activation_checkpointing_enable({"use_reentrant": False})
        assert head.gradient_checkpointing == recompute
        torch.manual_seed(0)
        value = torch.zeros(())
        for prediction in head.unroll(batch, 3):
            value = value + prediction.logits.logsumexp(-1).sum()
            value = value + sum(extra.sum() for extra in prediction.auxiliary.values())
        found.append(torch.autograd.grad(value, list(head.parameters())))
    for kept, made in zip(*found, strict=True):
        torch.testing.assert_close(kept, made)


# What only training adds


def test_noise_is_on_the_targets_states_alone_and_in_training_alone(
    target: LlamaForCausalLM,
) -> None:
    head, batch = build(target, feature_noise=0.25), batch_of(target, T=40)
    seen: list[Tensor] = []
    head.fc.register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0].detach()))

    def unroll(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        seen.clear()
        return [p.hidden.detach() for p in head.unroll(batch, 2)]

    clean = unroll(0)
    width = head.config.hidden_size
    assert seen[0][..., width:].equal(batch.features[:, : seen[0].shape[1]])
    embedded = seen[0][..., :width]
    head.train()
    noisy = unroll(0)
    off = seen[0][..., width:] - batch.features[:, : seen[0].shape[1]]
    assert 0.24 < off.max() <= 0.25
    assert -0.25 <= off.min() < -0.24
    assert off.mean().abs() < 0.02
    assert off.std() == pytest.approx(0.25 / 3**0.5, rel=0.05)
    assert seen[0][..., :width].equal(embedded)
    # The second pass reads the first one's outputs as they are: slots 0 .. T - 4 of each row.
    assert seen[1].shape[1] == noisy[0].shape[0] // 2
    assert seen[1][0, :, width:].equal(noisy[0][: seen[1].shape[1]])
    assert not torch.allclose(noisy[0], clean[0], atol=1e-3)
    assert all(map(torch.equal, noisy, unroll(0)))
    assert not torch.equal(noisy[0], unroll(1)[0])
    # Decoding has none, in whatever mode the head was left.
    drafts = []
    for mode in (True, False):
        head.train(mode)
        state = head.open(1, 8)
        counts = torch.tensor([4])
        drafts.append(head.extend(state, batch.features[:1, :4], batch.ids[:1, 1:5], counts))
        drafts.append(head.expand(state, batch.ids[:1, 5:6], torch.tensor([[-1]]))[0])
    assert drafts[0].equal(drafts[2])
    assert drafts[1].equal(drafts[3])


def test_regression_compares_with_the_state_that_predicts_the_same_token(
    target: LlamaForCausalLM,
) -> None:
    head, batch = build(target), batch_of(target)
    for depth, prediction in enumerate(head.unroll(batch, 3)):
        labels = batch.ids.flatten()[prediction.teacher + 1]
        expected = torch.cat([row[2 + depth :] for row in batch.ids])
        assert labels.equal(expected)
        truth = torch.cat([row[1 + depth : -1] for row in batch.last_hidden])
        error = (prediction.hidden - truth).abs()
        smooth = torch.where(error < 1, error.square() / 2, error - 0.5).mean(-1)
        torch.testing.assert_close(
            prediction.auxiliary["regression"].double(), 10 * smooth, atol=1e-4, rtol=1e-4
        )
        assert set(prediction.auxiliary) == {"regression"}
    silent = build(target, feature_loss=0.0)
    assert next(iter(silent.unroll(batch, 1))).auxiliary == {}


@pytest.mark.parametrize("ids", [None, REDUCED])
def test_top_loss_is_the_cross_entropy_over_the_targets_ten(
    target: LlamaForCausalLM, ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In portions as in one piece, with its gradient; none where the choice cannot be drafted."""
    monkeypatch.setattr(module, "TOP_ROWS", 7)
    head, batch = build(target, ids, topk_loss=0.5, feature_loss=0.0), batch_of(target)
    prediction = next(iter(head.unroll(batch, 1)))
    rows = target.lm_head.weight if ids is None else target.lm_head.weight[ids]
    expected = []
    for hidden, at in zip(prediction.hidden, prediction.teacher.tolist(), strict=True):
        state = batch.last_hidden.flatten(0, 1)[at]
        q, p = (rows @ state).softmax(0), (rows @ hidden).softmax(0)
        likeliest = sorted(range(len(rows)), key=lambda token: -float(q[token]))[:10]
        loss = -sum(q[token] * p[token].log() for token in likeliest)
        choice = int((target.lm_head.weight @ state).argmax())
        expected.append(0.5 * loss * (ids is None or choice in ids))
    truth = torch.stack(expected)
    found = prediction.auxiliary["top"].double()
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    assert (found == 0).any() == (ids is not None)
    mine = torch.autograd.grad(found.sum(), head.fc.weight, retain_graph=True)[0]
    torch.testing.assert_close(
        mine, torch.autograd.grad(truth.sum(), head.fc.weight)[0], atol=1e-4, rtol=1e-4
    )


def test_warm_start_finds_the_linear_map_that_there_is(target: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    head = EagleSettings(**WHOLE).build(describe(target, None, (LAST,), {}), target.config, None)
    head.bind(target)
    ids = torch.randint(0, 512, (30, 40))
    true = torch.randn(64, 128) / 8
    states = torch.randn(30, 40, 64)
    following = torch.zeros_like(states)
    token = target.model.embed_tokens.weight[ids].float()
    following[:, 1:] = torch.cat((token[:, 1:] * 8, states[:, :-1]), -1) @ true.T
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = TeacherBatch(ids, mask, states, following, top=ids)
    head.warm_start([batch])
    scaled = torch.cat((8 * true[:, :64], true[:, 64:]), -1)
    assert (head.fc.weight - scaled).norm() < 0.02 * scaled.norm()
    head.eval()
    made = next(iter(head.unroll(batch, 1)))  # the layer's branches are silent at first
    truth = following.flatten(0, 1)[made.teacher]
    assert (made.hidden - truth).norm() < 0.02 * truth.norm()
    with pytest.raises(ValueError, match=r"head\.warm_start: no supervised position"):
        head.warm_start([])


# The published layout


SIZES = {"7B": (4096, 11008, 32, 32, 0.24), "13B": (5120, 13824, 40, 40, 0.37)}
SIZES["70B"] = (8192, 28672, 64, 8, 0.99)


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size: str, target: LlamaForCausalLM) -> None:
    """The paper's .24B, .37B and .99B for Llama 2, to the last weight of the formula."""
    D, inner, heads, kv_heads, billions = SIZES[size]
    config = LlamaConfig(
        hidden_size=D,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    facts = {"hidden_size": D, "vocab_size": 32000}
    contract = describe(target, None, (LAST,), {}).model_copy(update=facts)
    with torch.device("meta"):
        head = EagleSettings(fc_bias=True, **WHOLE).build(contract, config, None)
    attention = 2 * D * D + 2 * D * D * kv_heads // heads
    found = sum(p.numel() for p in head.parameters())
    assert found == (2 * D * D + D) + attention + 3 * D * inner + D
    assert round(found / 1e9, 2) == billions


def test_stored_tensors_are_the_published_ones(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """The bias is stored even where it is not trained, and one that came with a file is used."""
    attention = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norm = "layers.0.post_attention_layernorm.weight"
    for trained in (False, True):
        head = build(target, fc_bias=trained)
        assert set(head.state_dict()) == {"fc.weight", "fc.bias", *attention, *mlp, norm}
        assert ("fc.bias" in dict(head.named_parameters())) == trained
        head.save_pretrained(tmp_path)
        loaded = load_head(tmp_path)
        loaded.bind(target)
        assert isinstance(loaded, EagleHead)
        assert loaded.fc.bias.equal(head.fc.bias)
        assert loaded.fc.bias.any()
        batch = batch_of(target)
        with torch.no_grad():
            made, mine = (next(iter(h.unroll(batch, 1))).logits for h in (loaded, head))
        assert made.equal(mine)
    fresh = EagleSettings(**WHOLE).build(describe(target, None, (LAST,), {}), target.config, None)
    assert not fresh.fc.bias.any()
