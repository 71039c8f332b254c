"""Hydra and Hydra++ against a twin written out step by step; their start, dropout and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive import naive_layer
from pydantic import ValidationError
from tiny import tiny_batch, tiny_target
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import LAST, describe
from drafthead.heads.hydra import HydraHead, HydraSettings
from drafthead.heads.load import load_head

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # statistics of norms and scores are fp32
T = 12


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target(head_dim=32).double()  # type: ignore[no-any-return]


def fresh(target: LlamaForCausalLM, **options: Any) -> HydraHead:
    settings = HydraSettings(draft_vocab_size=None, **options)
    torch.manual_seed(1)
    head = settings.build(describe(target, None, (LAST,), {}), target.config, None)
    head.to(target.dtype)  # type: ignore[arg-type]
    head.bind(target)
    return head.eval()


def build(target: LlamaForCausalLM, **options: Any) -> HydraHead:
    """A bound head with random weights of which every part shows."""
    head = fresh(target, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(spread * torch.randn_like(parameter))
    return head


def batch_of(target: LlamaForCausalLM, B: int = 2) -> TeacherBatch:
    ids = torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(5))
    return tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), (LAST,))


def twin(
    head: HydraHead, target: LlamaForCausalLM, states: Tensor, slot: int, ids: list[int]
) -> Tensor:
    """(V,) logits after these tokens, the first of which comes right after the slot's state."""
    weights, settings = head.state_dict(), head.settings
    state = states[slot]
    if settings.prefix_attention:
        inner = {n.removeprefix("prefix."): w for n, w in weights.items() if "prefix." in n}
        state = naive_layer(inner, head.config, list(states[: slot + 1]), range(slot + 1))
    table, mlp = target.model.embed_tokens.weight, f"hydra_mlp.{len(ids) - 1}"
    x = torch.cat([state, *(table[token] for token in ids)])
    for j in range(settings.mlp_layers):
        bend = weights[f"{mlp}.{j}.linear.weight"] @ x + weights[f"{mlp}.{j}.linear.bias"]
        if j == 0:
            straight = weights[f"{mlp}.0.res_connection.weight"] @ x
            x = straight + weights[f"{mlp}.0.res_connection.bias"]
        x = x + bend * torch.sigmoid(bend)
    if not settings.own_rows:
        return target.lm_head.weight @ x
    rows = f"hydra_lm_head.{len(ids) - 1}"
    return weights[f"{rows}.weight"] @ x + weights[f"{rows}.bias"]


VARIANTS: dict[str, dict[str, Any]] = {
    "hydra": {},
    "own-rows": {"own_rows": True, "unroll_steps": 3},
    "hydra++": {"mlp_layers": 4, "prefix_attention": True, "dropout": 0.2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_f36_unroll_is_the_twin(name: str, target: LlamaForCausalLM) -> None:
    head, batch = build(target, **VARIANTS[name]), batch_of(target)
    steps = head.settings.unroll_steps
    with torch.no_grad():
        for depth, prediction in enumerate(head.unroll(batch, steps)):
            for row, slot in ((0, 0), (1, 4), (0, T - 3 - depth)):  # first and last included
                ids = batch.ids[row, slot + 1 : slot + 2 + depth].tolist()
                expected = twin(head, target, batch.features[row], slot, ids)
                assert expected.std() > 0.1
                at = (prediction.teacher == row * T + slot + 1 + depth).nonzero().item()
                torch.testing.assert_close(prediction.logits[int(at)], expected, **CLOSE)
    with pytest.raises(ValueError, match=rf"{steps + 1} depths asked of a head of {steps}"):
        next(iter(head.unroll(batch, steps + 1)))


@pytest.mark.parametrize("name", ["hydra", "hydra++"])
def test_f36_nodes_of_several_depths_are_drafted_together(
    name: str, target: LlamaForCausalLM
) -> None:
    """In one call, two rows of other lengths and other trees: each node sees its own path."""
    head, batch = build(target, **VARIANTS[name]), batch_of(target)
    state, counts = head.open(2, 32), torch.tensor([7, 3])
    logits = head.extend(state, batch.features[:, :7], batch.ids[:, 1:8], counts)
    calls = [
        ([[11, 12], [13, 14]], [[-1, -1], [-1, -1]]),
        ([[21, 22, 23], [24, 25, 26]], [[0, -1, 1], [-1, 1, 0]]),
        ([[31, 32, 33], [34, 35, 36]], [[2, 3, -1], [-1, -1, 3]]),
    ]
    tokens: list[list[int]] = [[], []]
    parents: list[list[int]] = [[], []]
    found: list[list[Tensor]] = [[], []]
    for new, below in calls:
        made = head.expand(state, torch.tensor(new), torch.tensor(below))
        for row in range(2):
            tokens[row] += new[row]
            parents[row] += below[row]
            found[row] += list(made[row])
    for row, count in enumerate(counts.tolist()):
        root = int(batch.ids[row, count])
        states = batch.features[row]
        expected = twin(head, target, states, count - 1, [root])
        torch.testing.assert_close(logits[row], expected, **CLOSE)
        for node, result in enumerate(found[row]):
            path, at = [], node
            while at >= 0:
                path.insert(0, tokens[row][at])
                at = parents[row][at]
            expected = twin(head, target, states, count - 1, [root, *path])
            torch.testing.assert_close(result, expected, **CLOSE)
    with pytest.raises(ValueError, match=r"parents 0\.\.8: this round has 8 nodes; -1 is the root"):
        head.expand(state, torch.tensor([[1], [1]]), torch.tensor([[0], [8]]))
    deepest = head.expand(state, torch.tensor([[1], [1]]), torch.tensor([[3], [4]]))
    assert deepest.isfinite().all()
    with pytest.raises(ValueError, match="a node of depth 4: the head drafts 4 tokens at most"):
        head.expand(state, torch.tensor([[1], [1]]), torch.tensor([[8], [8]]))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fresh_head_starts_at_the_targets_own_choice(name: str, target: LlamaForCausalLM) -> None:
    """At every depth, and modestly: its logits are the target's at the slot, times a scale."""
    head, batch = fresh(target, start_logit_scale=0.5, **VARIANTS[name]), batch_of(target)
    own = batch.last_hidden @ target.lm_head.weight.T  # (B, T, V)
    for depth, prediction in enumerate(head.unroll(batch, head.settings.unroll_steps)):
        expected = 0.5 * torch.cat([row[: T - 2 - depth] for row in own])
        torch.testing.assert_close(prediction.logits, expected, **CLOSE)


def test_dropout_is_in_training_alone(target: LlamaForCausalLM) -> None:
    options = {"mlp_layers": 2, "prefix_attention": True, "unroll_steps": 2}
    head, batch = build(target, dropout=0.4, **options), batch_of(target)

    def unroll(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [p.hidden.detach() for p in head.unroll(batch, 2)]

    def draft() -> list[Tensor]:
        state, one = head.open(1, 8), torch.tensor([[5]])
        first = head.extend(state, batch.features[:1, :4], batch.ids[:1, 1:5], torch.tensor([4]))
        return [first, head.expand(state, one, torch.tensor([[-1]]))[0]]

    clean, drafts = unroll(0), draft()
    assert all(map(torch.equal, clean, unroll(1)))
    plain = build(target, **options)
    assert all(p.hidden.equal(c) for p, c in zip(plain.unroll(batch, 2), clean, strict=True))
    head.train()
    seen: list[Tensor] = []
    for depth in head.hydra_mlp:
        for block in depth:  # type: ignore[attr-defined]
            block.register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0].detach()))
    noisy = unroll(0)
    assert len(seen) == 4
    for x in (*seen, *noisy):
        assert (x == 0).double().mean() == pytest.approx(0.4, abs=0.05)
    embedded = F.embedding(batch.ids[0, 1], target.model.embed_tokens.weight)
    kept = seen[0][0, 64:] != 0  # slot 0 of the first row, its token's half
    torch.testing.assert_close(seen[0][0, 64:][kept], (embedded / 0.6)[kept])
    assert all(map(torch.equal, noisy, unroll(0)))
    assert not torch.equal(noisy[0], unroll(1)[0])
    assert all(map(torch.equal, drafts, draft()))  # decoding, left in training mode


def test_f38_each_depth_trains_its_own_part(target: LlamaForCausalLM) -> None:
    head, batch = build(target, prefix_attention=True, own_rows=True), batch_of(target)
    for depth, prediction in enumerate(head.unroll(batch, 4)):
        labels = batch.ids.flatten()[prediction.teacher + 1]
        assert labels.equal(torch.cat([row[2 + depth :] for row in batch.ids]))
        head.zero_grad()
        F.cross_entropy(prediction.logits, labels).backward(retain_graph=True)
        moved = {n for n, p in head.named_parameters() if p.grad is not None and p.grad.any()}
        own = (f"hydra_mlp.{depth}.", f"hydra_lm_head.{depth}.", "prefix.")
        assert moved == {n for n, _ in head.named_parameters() if n.startswith(own)}


# The layout


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes_by_formula(name: str, target: LlamaForCausalLM) -> None:
    head = fresh(target, **VARIANTS[name])
    K, blocks, D, V = head.settings.unroll_steps, head.settings.mlp_layers, 64, 512
    # Depth i reads i + 2 vectors, through a bent and a straight map; later blocks have one map.
    expected = sum(2 * ((i + 2) * D * D + D) + (blocks - 1) * (D * D + D) for i in range(K))
    expected += K * (V * D + V) * head.settings.own_rows
    attention = 2 * D * (4 * 32) + 2 * D * (2 * 32)
    expected += (attention + 3 * D * 128 + 2 * D) * head.settings.prefix_attention
    assert sum(p.numel() for p in head.parameters()) == expected
    assert head.positions == (256 if head.settings.prefix_attention else None)


def test_f29_only_the_heads_own_tensors_are_trained_and_stored(target: LlamaForCausalLM) -> None:
    blocks = {
        f"hydra_mlp.{i}.0.{part}.{kind}"
        for i in range(3)
        for part in ("linear", "res_connection")
        for kind in ("weight", "bias")
    }
    rows = {f"hydra_lm_head.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    for own in (False, True):
        head = build(target, unroll_steps=3, own_rows=own)
        names = blocks | (rows if own else set())
        assert set(dict(head.named_parameters())) == set(head.state_dict()) == names
    first = head.get_parameter("hydra_lm_head.0.weight")
    assert first.data_ptr() != head.get_parameter("hydra_lm_head.1.weight").data_ptr()
    assert first.data_ptr() != target.lm_head.weight.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        {"own_rows": True},
        {"mlp_layers": 2},
        {"unroll_steps": 3},
        {"prefix_attention": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_f74_a_config_of_another_layout_is_refused(
    other: dict[str, Any], target: LlamaForCausalLM, tmp_path: Path
) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder, options in zip(folders, ({}, other), strict=True):
        build(target, **options).save_pretrained(folder)
        assert isinstance(load_head(folder), HydraHead)
    configs = [(folder / "config.json").read_text() for folder in folders]
    assert json.loads(configs[0])["settings"] != json.loads(configs[1])["settings"]
    for folder, swapped in zip(folders, reversed(configs), strict=True):
        (folder / "config.json").write_text(swapped)
        with pytest.raises(ValueError, match=r"tensors do not match config\.json: (miss|surpl)"):
            load_head(folder)


def test_a_config_that_contradicts_itself_is_one_line(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    build(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["settings"]["intermediate_size"] = 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: head\.intermediate_size: only [^\n]+$"):
        load_head(tmp_path)


def test_a_target_of_no_single_inner_width() -> None:
    target = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=8, n_head=2))
    contract = describe(target, None, (LAST,), {})
    head = HydraSettings(draft_vocab_size=None).build(contract, target.config, None)
    head.bind(target)
    state = head.open(1, 4)
    logits = head.extend(state, torch.randn(1, 1, 32), torch.tensor([[3]]), torch.tensor([1]))
    assert logits.shape == (1, 96)
    plus = {"draft_vocab_size": None, "prefix_attention": True}
    with pytest.raises(ValueError, match=r"head\.intermediate_size: target gpt2"):
        HydraSettings(**plus).build(contract, target.config, None)
    HydraSettings(intermediate_size=48, **plus).build(contract, target.config, None).bind(target)
    with pytest.raises(ValidationError, match=r"only head\.prefix_attention has a layer"):
        HydraSettings(intermediate_size=48)
