"""EAGLE-1 and EAGLE-3 as published, in plain torch, over a folder as a serving engine finds it.

Written from the papers' and readers' maths alone and without any part of the library: nothing is
remembered between steps, every step runs all slots again, and rotary pairs are complex numbers.

Shapes: n slots, D width, H query heads, d head width, L captured layers, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Plain:
    """A folder's config and tensors, and the layers they describe."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        loaded = load_file(folder / "model.safetensors")
        self.tensors = {name.replace("midlayer.", "layers.0."): x for name, x in loaded.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / size.sqrt() * self.tensors[f"{name}.weight"]

    def turn(self, x: Tensor) -> Tensor:
        """(H, n, d) at positions 0 .. n - 1: the pairs (j, j + d / 2) as complex numbers."""
        half = x.shape[-1] // 2
        speeds = float(self.config["rope_theta"]) ** (-torch.arange(half).double() / half)
        angles = torch.outer(torch.arange(x.shape[1]).double(), speeds)
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)

    def attend(self, x: Tensor, i: int) -> Tensor:
        """(n, inputs) → (n, D), causal."""
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        w = {k: self.tensors[f"layers.{i}.self_attn.{k}_proj.weight"] for k in "qkvo"}
        n = len(x)
        q, k, v = (
            (x @ w[name].T).view(n, count, -1).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k = self.turn(q), self.turn(k)
        k, v = k.repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ w["o"].T

    def mlp(self, x: Tensor, i: int) -> Tensor:
        gate, up, down = (self.tensors[f"layers.{i}.mlp.{k}_proj.weight"] for k in KINDS)
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T


KINDS = ("gate", "up", "down")


class PlainEagle3(Plain):
    """`chain` gives the draft logits and the target ids that they are of."""

    upper_norm = "input_layernorm"
    """As vLLM; SGLang's is `hidden_norm`."""

    def fuse(self, features: Tensor) -> Tensor:
        """(n, L * D) → (n, D)."""
        if self.config.get("norm_before_fc"):
            features = self.norm(features, "input_norm")
        if self.config.get("fc_norm"):
            parts = features.chunk(features.shape[-1] // self.config["hidden_size"], -1)
            features = torch.cat([self.norm(p, f"fc_norm.{k}") for k, p in enumerate(parts)], -1)
        return features @ self.tensors["fc.weight"].T

    def layers(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        for i in range(self.config["num_hidden_layers"]):
            if i == 0:
                e = self.norm(embedded, "layers.0.input_layernorm")
                u = self.norm(hidden, "layers.0.hidden_norm")
                x, residual = torch.cat((e, u), -1), hidden
                if self.config.get("norm_before_residual"):
                    residual = u
            else:
                x, residual = self.norm(hidden, f"layers.{i}.{self.upper_norm}"), hidden
            residual = residual + self.attend(x, i)
            hidden = residual + self.mlp(
                self.norm(residual, f"layers.{i}.post_attention_layernorm"), i
            )
        return hidden

    def chain(self, embedding: Tensor, features: Tensor, ids: Tensor, steps: int) -> Tensor:
        """features: (n, L * D) of positions 0 .. n - 1; ids: of positions 0 .. n - 1 + steps.

        Returns (steps, Vd) logits: of the token at n + 1, then with one more token each.
        """
        n, hidden, found = len(features), self.fuse(features), []
        for step in range(steps):
            out = self.layers(embedding[ids[1 : n + 1 + step]], hidden)
            normed = self.norm(out[-1], "norm")
            found.append(normed @ self.tensors["lm_head.weight"].T)
            fed = normed if self.config.get("norm_output") else out[-1]
            hidden = torch.cat((hidden, fed[None]))
        return torch.stack(found)

    def target_ids(self) -> Tensor:
        """(Vd,)"""
        size = self.config["draft_vocab_size"]
        return torch.arange(size) + self.tensors.get("d2t", torch.zeros(size, dtype=torch.int64))


class PlainEagle(Plain):
    """EAGLE-1: no norm before the layer's attention, none behind the layer."""

    def chain(
        self, embedding: Tensor, rows: Tensor, states: Tensor, ids: Tensor, steps: int
    ) -> Tensor:
        """As `PlainEagle3.chain`; states: (n, D) after the target's final norm; rows: its own."""
        n, hidden, found = len(states), states, []
        for step in range(steps):
            x = torch.cat((embedding[ids[1 : n + 1 + step]], hidden), -1)
            x = x @ self.tensors["fc.weight"].T + self.tensors["fc.bias"]
            x = x + self.attend(x, 0)
            out = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"), 0)
            found.append(out[-1] @ rows.T)
            hidden = torch.cat((hidden, out[-1:]))
        return torch.stack(found)
