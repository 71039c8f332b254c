"""Medusa-2: the adapter is the head's, acts in the live target, and is exactly W + scale B A."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from calls import generate
from drafts import own_greedy, prompt_of
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from tiny import tiny_batch, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.adapter import acting
from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import LAST, ContractError, describe, fingerprint
from drafthead.heads.load import load_head
from drafthead.heads.medusa2 import Medusa2Head, Medusa2Settings
from drafthead.inference.target import Target

TARGETS = ("q_proj", "v_proj", "down_proj")
WIDTHS = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (128, 64)}
RANK, ALPHA, LAYERS, STEPS = 4, 6.0, 3, 3
REDUCED = torch.arange(0, 512, 2)


def base(seed: int = 0) -> LlamaForCausalLM:
    return tiny_target(num_layers=LAYERS, seed=seed).double()  # type: ignore[no-any-return]


def medusa2(target: LlamaForCausalLM, *, fresh: bool = False) -> Medusa2Head:
    """A bound head, not yet put into the target; random, its adapter included, unless fresh."""
    settings = Medusa2Settings(
        unroll_steps=STEPS,
        draft_vocab_size=len(REDUCED),
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_targets=TARGETS,
        distillation=2.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = settings.build(describe(target, None, (LAST,), {}), target.config, REDUCED)
        head.to(target.dtype)  # type: ignore[arg-type]
        head.bind(target)
        if not fresh:
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.normal_(std=0.2)
    return head


def merged(target: LlamaForCausalLM, head: Medusa2Head) -> LlamaForCausalLM:
    """A plain copy of the target with the adapter's product added to its weights."""
    plain, stored = copy.deepcopy(target), head.state_dict()
    with torch.no_grad():
        for name in {n.rsplit(".", 2)[0] for n in stored if n.startswith("adapter.")}:
            down, up = (stored[f"{name}.lora_{side}.weight"] for side in "AB")
            weight = plain.get_parameter(f"{name.removeprefix('adapter.')}.weight")
            weight.add_(ALPHA / RANK * up @ down)
    return plain


def batch_of(target: LlamaForCausalLM) -> TeacherBatch:
    ids = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(12) >= 4).expand(2, 12).clone()
    mask[1, 9:] = False
    return tiny_batch(target, ids, mask, (LAST,))


def gap(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def test_an_adapted_target_is_the_sum_and_a_resting_one_is_as_it_was() -> None:
    target, before = base(), base()
    head, ids = medusa2(target), torch.arange(5, 15)[None]
    added = merged(before, head)
    head.adapt(target)
    assert gap(target(ids).logits, added(ids).logits) < 1e-12
    assert gap(added(ids).logits, before(ids).logits) > 0.1
    head.adapt(target, resting=True)
    assert torch.equal(target(ids).logits, before(ids).logits)
    with acting(target):
        assert gap(target(ids).logits, added(ids).logits) < 1e-12
    assert torch.equal(target(ids).logits, before(ids).logits)
    head.adapt(target)  # to be decoded, after training
    assert gap(target(ids).logits, added(ids).logits) < 1e-12


def test_a_fresh_adapter_changes_nothing_and_nothing_has_drifted() -> None:
    target, before = base(), base()
    head = medusa2(target, fresh=True).train()
    head.adapt(target)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(target(ids).logits, before(ids).logits)
    head.adapt(target, resting=True)
    batch = batch_of(before)
    adapted, drift = head.live(batch)
    assert drift.item() == 0.0
    assert torch.equal(adapted.features, batch.last_hidden)
    assert torch.equal(adapted.top[batch.supervised(1)], batch.top[batch.supervised(1)])


def test_the_batch_is_the_adapted_targets_and_its_drift_is_the_divergence() -> None:
    target = base()
    batch, head = batch_of(target), medusa2(target).train()
    added = merged(target, head)
    head.adapt(target, resting=True)
    adapted, drift = head.live(batch)
    truth = batch_of(added)
    needed = batch.supervised(1)
    assert needed.sum() == 8 + 5
    for mine, theirs in (
        (adapted.features, truth.features),
        (adapted.last_hidden, truth.last_hidden),
    ):
        assert gap(mine[0], theirs[0]) < 1e-12
    assert torch.equal(adapted.top[needed], truth.top[needed])
    p, q = (model(batch.ids).logits[needed].log_softmax(-1) for model in (target, added))
    expected = 2.0 * (p.exp() * (p - q)).sum()
    assert drift.item() == pytest.approx(expected.item(), rel=1e-9)
    assert drift.item() > 1.0
    assert not adapted.last_hidden.requires_grad
    assert head.eval().live(batch)[1].item() == 0.0  # not asked for in evaluation


def test_gradients_are_those_of_the_sum_and_reach_nothing_else_of_the_target() -> None:
    """By finite differences, of heads and adapter together."""
    target = base()
    batch, head = batch_of(target), medusa2(target).train()
    head.adapt(target, resting=True)

    def loss() -> Tensor:
        adapted, drift = head.live(batch)
        total = drift
        for prediction in head.unroll(adapted.packed(), STEPS):
            labels = prediction.teacher % len(REDUCED)
            total = total + F.cross_entropy(prediction.logits, labels, reduction="sum")
        return total

    loss().backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    own = {id(p) for p in head.parameters()}
    others = [p for p in target.parameters() if id(p) not in own]
    assert len(others) == len(list(base().parameters()))
    assert all(p.grad is None and not p.requires_grad for p in others)
    for name in (
        "adapter.model.layers.0.self_attn.q_proj.lora_A.weight",
        "adapter.model.layers.2.mlp.down_proj.lora_B.weight",
        "medusa_head.1.0.linear.weight",
    ):
        parameter = head.get_parameter(name)
        with torch.no_grad():
            values = []
            for step in (1e-3, -2e-3):  # norms of the target are fp32
                parameter[1, 2] += step
                values.append(loss().item())
            parameter[1, 2] += 1e-3
        assert parameter.grad is not None
        slope = (values[0] - values[1]) / 2e-3
        assert abs(slope) > 0.05
        assert parameter.grad[1, 2].item() == pytest.approx(slope, rel=2e-3)


def test_rows_with_nothing_to_learn_from_are_not_run() -> None:
    """They may be those that were dropped; a token the target does not have would show."""
    target = base()
    batch, head = batch_of(target), medusa2(target).train()
    head.adapt(target, resting=True)
    ids, mask = batch.ids.clone(), batch.mask.clone()
    ids[0], mask[0] = 10**6, False
    alone, drift = head.live(replace(batch, ids=ids, mask=mask))
    whole, _ = head.live(batch)
    assert torch.equal(alone.features[1], whole.features[1])
    assert drift.item() > 0
    nothing, drift = head.live(replace(batch, mask=torch.zeros_like(mask)))
    (nothing.features.sum() * 0 + drift).backward()
    trained = [p for name, p in head.named_parameters() if name.startswith("adapter.")]
    assert all(p.grad is not None for p in trained), "F27: every rank sums the same gradients"


def test_the_file_holds_the_adapter_and_none_of_the_targets_weights(tmp_path: Path) -> None:
    target = base()
    head = medusa2(target)
    head.adapt(target)
    head.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in stored} == {"adapter", "medusa_head", "d2t", "t2d"}
    adapter = {n: t for n, t in stored.items() if n.startswith("adapter.")}
    assert {n.rsplit(".", 2)[0].removeprefix("adapter.") for n in adapter} == {
        f"model.layers.{i}.{part}" for i in range(LAYERS) for part in WIDTHS
    }
    count = LAYERS * RANK * sum(map(sum, WIDTHS.values()))
    assert sum(t.numel() for t in adapter.values()) == count
    # PEFT reads it by its own names.
    theirs = get_peft_model(
        base(), LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=list(TARGETS))
    )
    prefix = "base_model.model."
    renamed = {n.replace("adapter.", prefix, 1): t for n, t in adapter.items()}
    told = set_peft_model_state_dict(theirs, renamed)
    assert not told.unexpected_keys
    ids = torch.arange(5, 15)[None]
    assert gap(theirs(ids).logits, target(ids).logits) < 1e-6  # PEFT holds the maps in fp32


def test_text_of_a_loaded_head_is_the_adapted_targets_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a freshly loaded target: chain and tree, greedy and seeded; said once."""
    trained = medusa2(base())
    trained.save_pretrained(tmp_path)
    added, before = Target(merged(base(), trained)), Target(base())
    target, head = Target(base()), load_head(tmp_path, torch.float64)
    head.bind(target.model)
    flags = [p.requires_grad_() for p in target.model.parameters()]
    prompts = [prompt_of(1), prompt_of(7)]
    with caplog.at_level(logging.WARNING, "drafthead"):
        for tree in (f"chain:{STEPS}", f"tree:{STEPS}x3:6"):
            for prompt in prompts:
                text = generate(target, head, [prompt], tree=tree, max_new_tokens=12)[0].tolist()
                assert text == own_greedy(added, prompt, 12)
    assert [r.message for r in caplog.records if "adapts its target" in r.message] == [
        "the head adapts its target in memory: text is, without loss, that of 'unnamed llama' as "
        "adapted, not as published"
    ]
    assert not [r.message for r in caplog.records if "was made for" in r.message]
    assert own_greedy(before, prompts[1], 12) != own_greedy(added, prompts[1], 12)
    drawn = {"do_sample": True, "seed": 5, "max_new_tokens": 12}
    assert generate(target, head, prompts, tree="chain:2", **drawn).equal(
        generate(added, None, prompts, **drawn)
    )
    assert all(p.requires_grad for p in flags), "what was the user's stays so"


def test_contract_and_fingerprint_are_those_of_the_target_below(tmp_path: Path) -> None:
    target = base()
    head = medusa2(target)
    mark, facts = fingerprint(target), describe(target, None, (LAST,), {})
    weights = Target(target).num_weights
    head.save_pretrained(tmp_path)
    head.adapt(target)
    head.adapt(target)
    assert fingerprint(target) == mark
    assert describe(target, None, (LAST,), {}) == facts
    assert Target(target).num_weights == weights
    again = load_head(tmp_path)
    again.bind(target)
    again.adapt(target)  # the same values: it is there already
    with pytest.raises(ContractError, match="fingerprint"):
        again.bind(base(seed=1))


def test_targets_that_cannot_be_adapted_are_refused(tmp_path: Path) -> None:
    target = base()
    head, other = medusa2(target), medusa2(target, fresh=True)
    with pytest.raises(ValueError, match=r"call adapt\(target\) first"):
        head.live(batch_of(target))
    head.adapt(target)
    with pytest.raises(ContractError, match="carries another adapter already"):
        other.adapt(target)
    tuned = base()
    get_peft_model(tuned, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ContractError, match="carries another adapter already"):
        head.adapt(tuned)
    with pytest.raises(ContractError, match=r"has no layer model\.layers\.2\.self_attn\.q_proj"):
        head.adapt(tiny_target(num_layers=2))
    wide = r"q_proj is of shape \(64, 128\), the head adapts \(64, 64\)"
    with pytest.raises(ContractError, match=wide):
        head.adapt(tiny_target(num_layers=LAYERS, head_dim=32))
    contract = describe(base(), None, (LAST,), {})
    settings = Medusa2Settings(draft_vocab_size=None, lora_targets=("q_proj", "c_attn"))
    with pytest.raises(ValueError, match=r"head\.lora_targets: no linear layer .* 'c_attn'"):
        settings.build(contract, target.config, None)
    with pytest.raises(ValueError, match=r"no linear layer of a llama is called 'lm_head'"):
        Medusa2Settings(draft_vocab_size=None, lora_targets=("lm_head",)).build(
            contract, target.config, None
        )
