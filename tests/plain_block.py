"""Block heads for tests, and their plain twin: one block at a time, every attention written out."""

from __future__ import annotations

import torch
from ladder import ladder_batch, ladder_head
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockHead, BlockSettings
from drafthead.heads.contract import describe


def block_head(name: str, target: LlamaForCausalLM) -> BlockHead:
    head = ladder_head(name, target)
    assert isinstance(head, BlockHead)
    return head


def built(target: LlamaForCausalLM, settings: BlockSettings) -> BlockHead:
    layers = settings.captured(target.config.num_hidden_layers)
    torch.manual_seed(2)
    head = settings.build(describe(target, None, layers, {}), target.config, None)
    head.to(target.dtype)  # type: ignore[arg-type]
    head.bind(target)
    return head.eval()  # type: ignore[no-any-return]


def some_batch(head: BlockHead, target: LlamaForCausalLM, B: int = 2, T: int = 20) -> TeacherBatch:
    ids = torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :3] = False
    mask[0, T - 5 :] = mask[-1, 9] = False
    return ladder_batch(head, target, ids, mask)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_turn(x: Tensor, positions: Tensor) -> Tensor:
    """(n, H, d), half-split pairs."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def plain_block(
    head: BlockHead, features: Tensor, ids: Tensor, slot: int
) -> tuple[Tensor, Tensor | None]:
    """One sequence, (T, L * D) and (T,) → logits (K, Vd) and confidence logits (K,) of a slot."""
    w, s, ids = head.state_dict(), head.settings, torch.cat((ids, torch.zeros(9, dtype=torch.long)))
    K, S, d = s.unroll_steps, s.unroll_steps + (not s.anchor_predicts), 16
    parts = features[: slot + 1].chunk(len(head.contract.layers), dim=-1)
    if s.norm_features:
        parts = tuple(plain_norm(p, w[f"fc_norm.{k}.weight"]) for k, p in enumerate(parts))
    context = plain_norm(torch.cat(parts, -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    assert head.embedding is not None
    assert head.rows is not None
    mask = w["mask_embedding.weight"][0] if s.mask_token_id is None else head.embedding[9]
    x = torch.stack([head.embedding[ids[slot + 1]]] + [mask] * (S - 1))
    place = torch.arange(slot + 1 + S, dtype=torch.float64)
    for k in range(s.num_layers):
        layer = {n.removeprefix(f"layers.{k}."): t for n, t in w.items() if f"layers.{k}." in n}
        normed = plain_norm(x, layer["input_layernorm.weight"])
        both = torch.cat((context, normed))
        q, key, value = (
            (y @ layer[f"self_attn.{n}_proj.weight"].T).unflatten(1, (-1, d))
            for n, y in (("q", normed), ("k", both), ("v", both))
        )
        q = plain_turn(plain_norm(q, layer["self_attn.q_norm.weight"]), place[slot + 1 :])
        key = plain_turn(plain_norm(key, layer["self_attn.k_norm.weight"]), place)
        out = torch.zeros_like(q)
        for j in range(S):
            seen = slot + 1 + (j + 1 if s.causal else S)
            for h in range(q.shape[1]):
                kv = h * key.shape[1] // q.shape[1]
                weights = (key[:seen, kv] @ q[j, h] / d**0.5).softmax(0)
                out[j, h] = weights @ value[:seen, kv]
        x = x + out.flatten(1) @ layer["self_attn.o_proj.weight"].T
        normed = plain_norm(x, layer["post_attention_layernorm.weight"])
        gate, up = (normed @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    hidden = plain_norm(x, w["norm.weight"])[S - K :]
    logits, chance = hidden @ head.rows.T, None
    before = [w["markov_in.weight"][ids[slot + 1 + i]] for i in range(K)] if s.markov_rank else []
    if before:
        logits = logits + torch.stack(before) @ w["markov_out.weight"].T
        hidden = torch.cat((hidden, torch.stack(before)), dim=-1)
    if s.confidence:
        chance = hidden @ w["confidence_head.weight"][0] + w["confidence_head.bias"]
    return logits, chance
