"""Heads of any settings, what is known of their target, and plain readers of exported folders.

The readers share no code with the library: they open config.json and the tensors' file, and compute
draft logits as the engines' documents and papers say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from foreign import asked_of as asked_of
from plain_block import plain_norm, plain_turn
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import DraftHead
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import describe
from drafthead.heads.layouts.files import load_foreign, read_folder, write_folder
from drafthead.heads.layouts.layout import Layout, Stored


def made(
    settings: BorrowingSettings, target: LlamaForCausalLM, ids: Tensor | None = None
) -> BorrowingHead:
    """A bound head in the target's dtype whose weights are random and large enough to show."""
    layers = settings.captured(target.config.num_hidden_layers)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = settings.build(describe(target, None, layers, {}), target.config, ids)
        assert isinstance(head, BorrowingHead)
        head.to(target.dtype)  # type: ignore[arg-type]
        head.bind(target)
        with torch.no_grad():
            for parameter in head.parameters():
                spread = 0.3 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
                parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()  # type: ignore[no-any-return]


def written(layout: Layout, head: BorrowingHead, out: Path) -> Path:
    """The folder of a head in a layout, its tensors in the head's own dtype."""
    assert layout.refusals(head) == []
    return write_folder(layout.write(head, head.dtype), out)


def returned(folder: Path, target: LlamaForCausalLM) -> DraftHead:
    """The head that a folder is read as, bound."""
    head = load_foreign(folder, asked_of(target))
    head.bind(target)
    return head


def assert_same(first: DraftHead, second: DraftHead) -> None:
    """Every tensor and what decides the forward pass are equal."""
    one, two = first.state_dict(), second.state_dict()
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    drop = {"anchor_share", "start_logit_scale", "rope_theta", "dropout"}
    drop |= {"intermediate_size", "num_key_value_heads", "layers"}  # null stands for the target's
    assert first.settings.model_dump(exclude=drop) == second.settings.model_dump(exclude=drop)
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "rope_parameters"):
        assert getattr(first.config, name) == getattr(second.config, name), name
    assert first.contract == second.contract


def changed(stored: Stored, config: dict[str, Any] | None = None, **tensors: Tensor) -> Stored:
    """With other fields (None takes one away) and tensors (`__` stands for a dot)."""
    fields = {**stored.config, **(config or {})}
    renamed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return replace(
        stored,
        config={name: value for name, value in fields.items() if value is not None},
        tensors={**stored.tensors, **renamed},
    )


def without(stored: Stored, *names: str) -> Stored:
    """With these tensors taken away."""
    return replace(stored, tensors={n: t for n, t in stored.tensors.items() if n not in names})


def opened(folder: Path) -> Stored:
    return read_folder(folder)


def served_block(
    folder: Path, target: LlamaForCausalLM, ids: Tensor, slot: int, depths: int
) -> tuple[Tensor, Tensor | None]:
    """What an engine drafts after text ids[: slot + 2], its drafts being the text's own tokens.

    Returns (K, V) logits, -inf where nothing can be proposed, and (K,) logits of the chance.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    w = load_file(folder / "model.safetensors")
    size, d = config["block_size"], config["head_dim"]
    anchor = config.get("sample_from_anchor", False)
    states = _outputs_of(target, ids[None, : slot + 1], config["target_layer_ids"])
    context = plain_norm(torch.cat(states, -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    table = w.get("embed_tokens.weight", target.get_input_embeddings().weight)
    x = table[[int(ids[slot + 1]), *[config["mask_token_id"]] * (size - 1)]]
    place = torch.arange(slot + 1 + size, dtype=torch.float64)
    for k in range(config["num_hidden_layers"]):
        x = _served_layer(w, f"layers.{k}.", x, context, place, d, config["is_causal"])
    hidden = plain_norm(x, w["norm.weight"])[0 if anchor else 1 :]
    logits, chance = hidden @ w.get("lm_head.weight", target.lm_head.weight).T, None
    if "markov_rank" in config:
        rows = w["markov_head.markov_w1.weight"][ids[slot + 1 : slot + 1 + depths]]
        logits = logits + rows @ w["markov_head.markov_w2.weight"].T
        if config["enable_confidence_head"]:
            both = torch.cat((hidden, rows), -1)
            chance = both @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    if "d2t" in w:
        whole = logits.new_full((len(logits), target.config.vocab_size), -torch.inf)
        whole[:, torch.arange(len(w["d2t"])) + w["d2t"]] = logits
        logits = whole
    return logits, chance


def _outputs_of(target: LlamaForCausalLM, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """(T, D) what these layers of the target give out, caught at the layers themselves."""
    caught: dict[int, Tensor] = {}
    hooks = [
        target.model.layers[i].register_forward_hook(
            lambda _m, _a, out, i=i: caught.__setitem__(i, out[0] if out.dim() == 3 else out)
        )
        for i in layers
    ]
    target(ids)
    for hook in hooks:
        hook.remove()
    return [caught[i] for i in layers]


def _served_layer(
    w: dict[str, Tensor],
    prefix: str,
    x: Tensor,
    context: Tensor,
    place: Tensor,
    d: int,
    causal: bool,
) -> Tensor:
    """One layer of a block (S, D) that sees the context (n, D) and itself."""
    own = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
    normed, n = plain_norm(x, own["input_layernorm.weight"]), len(context)
    seen = torch.cat((context, normed))
    q, key, value = (
        (y @ own[f"self_attn.{part}_proj.weight"].T).unflatten(1, (-1, d))
        for part, y in (("q", normed), ("k", seen), ("v", seen))
    )
    q = plain_turn(plain_norm(q, own["self_attn.q_norm.weight"]), place[n:])
    key = plain_turn(plain_norm(key, own["self_attn.k_norm.weight"]), place)
    group = q.shape[1] // key.shape[1]
    key, value = (y.repeat_interleave(group, dim=1) for y in (key, value))
    scores = torch.einsum("qhd,khd->hqk", q, key) / d**0.5
    if causal:
        ahead = torch.arange(len(place)) > torch.arange(n, len(place))[:, None]
        scores = scores.masked_fill(ahead, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    x = x + out @ own["self_attn.o_proj.weight"].T
    normed = plain_norm(x, own["post_attention_layernorm.weight"])
    gate, up = (normed @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
