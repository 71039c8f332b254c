"""Targets that say what they are told: each token decides the next one, whatever came before."""

from __future__ import annotations

import itertools

import torch
from tiny import tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM


def scripted(text: str, *, endless: bool = False) -> LlamaForCausalLM:
    """A target of `tiny_tokenizer` that answers `text` to everything, over and over if `endless`.

    No token may be in the text twice, as each one has one successor; nor a lone line break, which
    stands before every answer.
    """
    tokenizer = tiny_tokenizer()
    said = tokenizer(text, add_special_tokens=False).input_ids
    (opening,) = tokenizer("\n", add_special_tokens=False).input_ids
    assert len({opening, *said}) == 1 + len(said), "a token comes twice"
    path = [opening, *said, said[0] if endless else tokenizer.eos_token_id]
    model = tiny_target(num_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:  # nothing is added to what a token is embedded as
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.zero_()
        embedded = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
        model.model.embed_tokens.weight.copy_(embedded)
        for token, after in itertools.pairwise(path):
            model.lm_head.weight[after] += embedded[token]
    return model
