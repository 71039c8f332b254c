"""What is captured of a target is what the convention names, whoever runs it beside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from drafts import prompt_of
from families import SMALL
from tiny import tiny_target
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from drafthead.heads.contract import LAST
from drafthead.inference.target import Target


def hooked(model: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    """What enters each layer, and last what leaves the last one: index = layer id."""
    seen: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    handles.append(
        model.model.layers[-1].register_forward_hook(
            lambda module, args, output: seen.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    )
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("layers", [(1,), (3,), (5,), (6,), (1, 3, 6), (2, 3, 4)])
def test_f14_a_layer_id_is_the_stream_entering_that_layer(
    target32: Target, layers: tuple[int, ...]
) -> None:
    """Bit-equal to hooks in fp32; id n leaves the last layer, before the final norm."""
    assert isinstance(target32.model, LlamaForCausalLM)
    ids = torch.tensor([prompt_of(9)])
    entering = hooked(target32.model, ids)
    features, _ = target32.states(ids, layers)
    assert torch.equal(features, torch.cat([entering[layer] for layer in layers], dim=-1))
    decoded = target32.prefill(target32.open(1, 16), 0, ids[0].tolist(), layers).features
    assert decoded is not None
    torch.testing.assert_close(decoded, features, atol=1e-6, rtol=0)


def test_f14_layer_minus_one_is_what_the_output_rows_see(target32: Target) -> None:
    """In training, of a prompt, and of a verify pass; beside other layers it comes first."""
    assert isinstance(target32.model, LlamaForCausalLM)
    ids = prompt_of(9)
    features, last = target32.states(torch.tensor([ids]), (LAST, 3))
    width = last.shape[-1]
    assert torch.equal(features[..., :width], last)
    assert torch.equal(features[..., width:], target32.states(torch.tensor([ids]), (3,))[0])
    seen = target32.prefill(target32.open(1, 16), 0, ids, (LAST,))
    assert seen.features is not None
    torch.testing.assert_close(seen.features, last)
    torch.testing.assert_close(target32.unembed(seen.features[:, -1:]), seen.logits)


@pytest.mark.parametrize("layers", [(0,), (-2,), (3, -1), (7,), (2, 2), (4, 2)])
def test_f14_ids_outside_the_convention_are_refused(
    target32: Target, layers: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"must be distinct ascending ids in 1\.\.6"):
        target32.states(torch.tensor([prompt_of(4)]), layers)
    with pytest.raises(ValueError, match=r"must be distinct ascending ids in 1\.\.6"):
        target32.prefill(target32.open(1, 16), 0, prompt_of(4), layers)


def test_f14_no_hook_stays_behind(target32: Target) -> None:
    layers = target32.model.get_decoder().layers
    with pytest.raises(RuntimeError):
        target32.states(torch.zeros(1, 3), [1, 2])  # ids of a wrong type fail inside the forward
    assert all(not layer._forward_hooks for layer in layers)


def gemma(**settings: Any) -> PreTrainedModel:
    config = Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=1.5, **settings)
    return Gemma2ForCausalLM(config)


def rescaled(model: PreTrainedModel) -> PreTrainedModel:
    """Norm weights away from one and larger output rows, so that norm, scale and cap all show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.get_output_embeddings().weight.mul_(20)
    return model


MODELS = {
    "llama": lambda: tiny_target(num_layers=2),
    "llama tied": lambda: tiny_target(num_layers=2, tied=True),
    "gemma2 soft cap": lambda: rescaled(gemma(layer_types=["full_attention"] * 2)),
    "cohere logit scale": lambda: rescaled(CohereForCausalLM(CohereConfig(**SMALL))),
    "granite logits scaling": lambda: rescaled(
        GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_f16_unembedding_the_last_state_gives_the_targets_logits(name: str) -> None:
    target = Target(MODELS[name]())
    ids = torch.tensor([prompt_of(20, vocab_size=target.vocab_size)])
    logits = target.model(ids).logits
    rebuilt = target.unembed(target.states(ids, [1])[1])
    assert logits.std() > 0.1
    torch.testing.assert_close(rebuilt, logits, atol=1e-5, rtol=0)
    plain = nn.functional.linear(target.states(ids, [1])[1], target.model.lm_head.weight)
    assert torch.allclose(plain, logits, atol=1e-3) == name.startswith("llama")


def test_f17_states_are_the_same_alone_in_a_batch_in_any_order_and_twice(target32: Target) -> None:
    """Lengths 1 to 60, two of them sharing a prefix, padded on the right with any token."""
    texts = [prompt_of(n) for n in (1, 2, 7, 20, 33, 60)]
    texts += [texts[5][:30], [*texts[4][:20], *prompt_of(5)]]
    alone = [target32.states(torch.tensor([text]), (2, 4)) for text in texts]
    for order in ([0, 5, 3], [7, 6, 4], [2, 1, 5], [5, 3, 0], [0, 5, 3]):
        longest = max(len(texts[i]) for i in order)
        batch = torch.full((3, longest), 2)
        for row, i in enumerate(order):
            batch[row, : len(texts[i])] = torch.tensor(texts[i])
        features, last = target32.states(batch, (2, 4))
        for row, i in enumerate(order):
            torch.testing.assert_close(
                features[row, : len(texts[i])], alone[i][0][0], atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                last[row, : len(texts[i])], alone[i][1][0], atol=1e-5, rtol=0
            )


# Refusals by name, when a target is made: nothing was computed yet


def test_f17_states_are_not_those_of_another_threads_forward(target32: Target) -> None:
    prompt, other = prompt_of(6), torch.tensor([prompt_of(6, seed=2)])
    alone = target32.prefill(target32.open(1, 8), 0, prompt, (2, 5)).features
    assert alone is not None
    last = target32.model.get_decoder().layers[-1]

    def run_elsewhere(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: target32.model(other))
            thread.start()
            thread.join()

    handle = last.register_forward_hook(run_elsewhere)  # after the layers that are captured
    try:
        beside = target32.prefill(target32.open(1, 8), 0, prompt, (2, 5)).features
    finally:
        handle.remove()
    assert beside is not None
    assert torch.equal(beside, alone)
