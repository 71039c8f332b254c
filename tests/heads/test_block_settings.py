"""The block head: how it starts, how its chances come true, and the layout of DFlash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plain_block import block_head, built, some_batch
from tiny import tiny_target
from transformers import LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockHead, BlockSettings, spread_layers
from drafthead.heads.calibration import acceptance, fit_temperatures
from drafthead.heads.contract import describe
from drafthead.heads.load import load_head


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


# Start, correction


def test_the_start_is_modest_and_its_correction_is_none(target: LlamaForCausalLM) -> None:
    head = built(target, BlockSettings(draft_vocab_size=None, unroll_steps=3))
    torch.testing.assert_close(head.norm.weight, 0.3 * target.model.norm.weight)
    state, batch = head.open(1, 9), some_batch(head, target)
    first = head.extend(state, batch.features[:1, :4], batch.ids[:1, 1:5], torch.tensor([4]))
    assert first.logsumexp(-1) < torch.tensor(512.0).log() + 0.5, "near chance"
    after = head.expand(state, torch.tensor([[3, 400]]), torch.tensor([[-1, -1]]))
    assert after[0, 0].equal(after[0, 1])
    table = head.markov_in.weight
    torch.testing.assert_close(table.norm(dim=-1), torch.ones(512, dtype=torch.float64))
    with torch.no_grad():
        head.markov_out.weight.normal_()
    after = head.expand(state, torch.tensor([[3, 400]]), torch.tensor([[-1, -1]]))
    expected = (table[3] - table[400]) @ head.markov_out.weight.T
    torch.testing.assert_close(after[0, 0] - after[0, 1], expected)


def test_tokens_that_are_alike_are_corrected_alike_from_the_start() -> None:
    target = tiny_target()
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight
        embedding[7] = embedding[8] + 0.02 * torch.randn(64)
    table = built(target, BlockSettings(draft_vocab_size=None)).markov_in.weight
    alike = table @ table.T
    assert alike[7, 8] > 0.95
    assert alike[7, 9:].abs().mean() < 0.3


def test_a_vocabulary_smaller_than_the_target_is_wide_starts_too() -> None:
    """As that of a target that reads bytes may be: 40 tokens, 64 wide."""
    head = built(tiny_target(vocab_size=40), BlockSettings(draft_vocab_size=None, markov_rank=8))
    torch.testing.assert_close(head.markov_in.weight.norm(dim=-1), torch.ones(40))


def test_a_logit_transform_comes_after_the_correction(target: LlamaForCausalLM) -> None:
    """Softcapped targets: the sum is capped, so no draft logit leaves the bound."""
    head = block_head("block", target)
    head.contract = head.contract.model_copy(update={"logit_softcap": 0.5})
    assert all(p.logits.abs().max() <= 0.5 for p in head.unroll(some_batch(head, target), 5))


# Calibration


def test_temperatures_are_found_again_in_sequence() -> None:
    """Depth by depth, though only the chances of whole chains are matched."""
    torch.manual_seed(3)
    logits, truth = 2 * torch.randn(3, 2000), torch.tensor([0.4, 1.0, 3.7])
    chances = (logits / truth[:, None]).sigmoid()
    logits[2, 500:] = chances[2, 500:] = torch.nan  # chains that end
    logits[0, :10] = torch.nan
    torch.testing.assert_close(fit_temperatures(logits, chances).float(), truth, rtol=0.02, atol=0)
    assert fit_temperatures(logits[:, :0], chances[:, :0]).tolist() == [1.0] * 3
    wrong = chances.clone()
    wrong[0] = chances[0] * 0.5  # over-confident at depth 0 alone: later ones keep theirs
    fitted = fit_temperatures(logits, wrong)
    assert fitted[0] > 0.5
    torch.testing.assert_close(acceptance(torch.zeros(2, 4), torch.zeros(2, 4)), torch.ones(2))


def cross_entropy(head: BlockHead, batch: TeacherBatch) -> list[float]:
    """Of the chances that the first 1, 2, … drafts are all accepted, from definitions alone."""
    T, K = batch.ids.shape[1], head.settings.unroll_steps
    told, true = torch.ones(2, batch.ids.numel()), torch.ones(2, batch.ids.numel())
    told, true = told[0], true[0]
    losses = []
    for i, prediction in enumerate(head.unroll(batch, K)):
        slots = prediction.teacher - 1 - i
        p = head.teacher_logits(batch.last_hidden.flatten(0, 1)[prediction.teacher]).softmax(-1)
        taken = 1 - (prediction.logits.softmax(-1) - p).abs().sum(-1) / 2
        taken *= head.in_vocabulary(batch.top.flatten()[prediction.teacher])
        assert prediction.confidence is not None
        for table, factor in (
            (told, (prediction.confidence / head.calibration[i]).sigmoid()),
            (true, taken),
        ):
            new = torch.full_like(table, torch.nan)
            new[slots] = table[slots] * factor.to(table)
            table.copy_(new)
        c, t = told[told.isfinite()].double(), true[told.isfinite()].double()
        losses.append(float(F.binary_cross_entropy(c.clamp(0, 1), t.clamp(0, 1))))
    assert T
    return losses


@torch.no_grad()
def test_calibration_lowers_the_cross_entropy_of_chains_and_is_stored(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = block_head("block", target)
    head.norm.weight.mul_(0.05)  # so flat a draft that chains have a chance
    head.markov_out.weight.mul_(0.05)
    head.confidence_head.weight.mul_(8.0)  # too sure of itself
    head.confidence_head.bias.sub_(3.0)
    batch = some_batch(head, target, T=60)
    before = cross_entropy(head, batch)
    head.train()
    head.calibrate([batch])
    assert head.training
    head.eval()
    after, fitted = cross_entropy(head, batch), head.calibration.clone()
    assert (fitted != 1).all()
    assert after[0] < before[0] - 0.01
    likely = [depth for depth in range(5) if after[depth] > 0.01]
    assert len(likely) > 1
    for depth in likely:  # each is a minimum, given those before it
        for factor in (0.9, 1.1):
            head.calibration.copy_(fitted)
            head.calibration[depth] *= factor
            assert cross_entropy(head, batch)[depth] > after[depth]
    head.calibration.copy_(fitted)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    assert isinstance(loaded, BlockHead)
    assert loaded.calibration.equal(fitted)
    halves = [replace(batch, **{n: getattr(batch, n)[b : b + 1] for n in PARTS}) for b in (0, 1)]
    head.calibrate(halves)
    torch.testing.assert_close(head.calibration, fitted)
    plain = block_head("block-dflash", target)
    plain.calibrate([])
    assert plain.confidence(plain.open(1, 3)) is None


PARTS = ("ids", "mask", "features", "last_hidden", "top")


# Layout


def test_the_default_layers_are_spread_as_dflash_does() -> None:
    assert [layer - 1 for layer in spread_layers(36)] == [1, 9, 17, 25, 33], "Qwen3-8B's"
    assert spread_layers(30) == (2, 9, 15, 21, 28)
    for few in range(1, 12):
        layers = spread_layers(few)
        assert list(layers) == sorted(set(layers))
        assert layers[0] >= 1
        assert layers[-1] <= few


DFLASH = BlockSettings(
    draft_vocab_size=None,
    unroll_steps=7,
    num_layers=5,
    anchor_predicts=False,
    norm_features=False,
    markov_rank=0,
    confidence=False,
    mask_token_id=9,
)


def test_f68_dflash_settings_give_the_tensors_that_servers_load(target: LlamaForCausalLM) -> None:
    head = built(target, DFLASH)
    shapes = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    expected = {"fc.weight": (64, 5 * 64), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for k in range(5):
        layer = {
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": (128, 64),
            "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
        }
        expected |= {f"layers.{k}.{name}.weight": shape for name, shape in layer.items()}
    assert shapes == expected
    assert head.size == 8, "block_size: anchor and masks"
    assert head.max_depth == 7, "num_speculative_tokens"


def test_parameters_are_as_many_as_the_formula_says(target: LlamaForCausalLM) -> None:
    D, inner, kv, d, V, r = 64, 128, 32, 16, 512, 16
    layer = 2 * D * D + 2 * D * kv + 3 * D * inner + 2 * D + 2 * d
    dflash = 5 * layer + 5 * D * D + 2 * D
    own = 2 * layer + 5 * D * D + 2 * D + 5 * D + D + V * r + r * V + (D + r + 1)
    for settings, expected in (
        (DFLASH, dflash),
        (BlockSettings(draft_vocab_size=None, markov_rank=r), own),
    ):
        assert sum(p.numel() for p in built(target, settings).parameters()) == expected


def test_f74_a_layout_and_the_settings_of_another_are_refused(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("dflash", "own")]
    built(target, DFLASH).save_pretrained(folders[0])
    built(target, BlockSettings(draft_vocab_size=None, num_layers=5)).save_pretrained(folders[1])
    configs = [(folder / "config.json").read_text() for folder in folders]
    for folder, config in zip(folders, reversed(configs), strict=True):
        (folder / "config.json").write_text(config)
        with pytest.raises(ValueError, match=r"do not match config.*(missing|surplus)"):
            load_head(folder)


def test_f56_rotary_base_is_the_drafts_own() -> None:
    target = tiny_target(rope_theta=1e6)
    for theta, expected in ((None, 1e6), (500.0, 500.0)):
        settings = BlockSettings(draft_vocab_size=None, unroll_steps=3, rope_theta=theta)
        head = built(target, settings)
        assert head.config.rope_parameters == {"rope_type": "default", "rope_theta": expected}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mask_token_id": 512}, r"head\.mask_token_id: 512 is not below .* 512"),
        ({"layers": (1, 2)}, r"head\.layers: \(1, 2\) asked for"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changed: dict[str, object], said: str, target: LlamaForCausalLM
) -> None:
    contract = describe(target, None, (2, 4, 5), {})
    with pytest.raises(ValueError, match=said):
        DFLASH.model_copy(update=changed).build(contract, target.config, None)


def test_f58_no_node_below_the_blocks_last_depth_and_no_slot_past_the_memory(
    target: LlamaForCausalLM,
) -> None:
    head = block_head("block-dflash", target)
    batch, state, one = some_batch(head, target), head.open(1, 5), torch.tensor([[4]])
    head.extend(state, batch.features[:1, :4], batch.ids[:1, 1:5], torch.tensor([4]))
    for parent in (-1, 0, 1):
        head.expand(state, one, torch.tensor([[parent]]))
    with pytest.raises(ValueError, match="node of depth 4: the block drafts 4 tokens at most"):
        head.expand(state, one, torch.tensor([[2]]))
    with pytest.raises(ValueError, match="has 3 nodes"):
        head.expand(state, one, torch.tensor([[3]]))
    with pytest.raises(ValueError, match="6 slots needed, 5 held"):
        head.extend(state, batch.features[:1, :2], batch.ids[:1, :2], torch.tensor([2]))


def test_half_precision_trains_under_autocast() -> None:
    target = tiny_target()
    head = built(target, BlockSettings(draft_vocab_size=None, unroll_steps=3))
    batch = some_batch(head, target)
    with torch.autocast("cpu", torch.bfloat16):
        head.bind(target)
        total = torch.zeros(())
        for prediction in head.unroll(batch, 3):
            assert prediction.confidence is not None
            total = total + prediction.logits.float().logsumexp(-1).sum()
            total = total + prediction.confidence.float().sum()
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    head.to(torch.bfloat16)
    head.bind(target)
    state = head.open(1, 9)
    logits = head.extend(state, batch.features[:1, :4], batch.ids[:1, 1:5], torch.tensor([4]))
    assert logits.dtype == torch.bfloat16
    assert head.expand(state, torch.tensor([[3]]), torch.tensor([[-1]])).isfinite().all()
