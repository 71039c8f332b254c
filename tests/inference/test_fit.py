"""Goodness of fit through the whole path: a real model, a head, `generate`."""

from __future__ import annotations

import itertools

import pytest
import torch
from chi_square import p_value
from tiny import tiny_head
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from drafthead.inference.speculate import speculate


def letters() -> LlamaForCausalLM:
    """A real model of eight tokens, with laws that depend on the text and are far from flat."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.8,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def joint_law(model: LlamaForCausalLM, prompt: list[int]) -> Tensor:
    """(8, 8, 8) exact law of the first three tokens."""
    texts = torch.tensor([[*prompt, *x] for x in itertools.product(range(8), repeat=3)])
    laws = model(texts).logits.double().softmax(-1)
    steps = [laws[range(512), len(prompt) - 1 + k, texts[:, len(prompt) + k]] for k in range(3)]
    return (steps[0] * steps[1] * steps[2]).view(8, 8, 8)


@pytest.mark.parametrize(
    ("rule", "tree", "runs"),
    [
        ("coupled", "chain:2", 1000),
        ("rejection", "chain:2", 4000),
        ("rejection", "static:0,1,0.0,0.1", 4000),
        ("block", "chain:2", 4000),
    ],
)
def test_f50_joint_law_of_successive_tokens_through_the_real_path(
    rule: str, tree: str, runs: int
) -> None:
    """A head's drafts, sampled at T = 1: chi-square of tokens (1, 2) and (2, 3) jointly.

    Token 1 is the prefill's, 2 and 3 come from rounds (drafted, recovered or bonus).
    """
    model, prompt = letters(), [1, 5]
    head = tiny_head(model, layers=(1,))
    drawn: list[Tensor] = []
    for start in range(0, runs, 1000):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 2, dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=4,
            num_return_sequences=1000,
            pad_token_id=0,
            custom_generate=speculate(
                head, tree=tree, rule=rule, seed=1, streams=range(start, start + 1000)
            ),
        )
        drawn.append(out[:, 2:5])
    tokens = torch.cat(drawn)
    law = joint_law(model, prompt)
    for first, pair in ((0, law.sum(2)), (1, law.sum(0))):
        cells = 8 * tokens[:, first] + tokens[:, first + 1]
        assert p_value(torch.bincount(cells, minlength=64), runs * pair.flatten()) > 1e-3
    mode = int(law.sum((0, 2)).argmax())
    assert float((tokens[:, 1] != mode).double().mean()) > 0.02, "not the mode every time"
