"""Unsuitable targets are refused by name before anything is generated; others load as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafts import Oracle, ids_of, own_greedy, prompt_of
from families import FAMILIES, SMALL
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_target, tiny_tokenizer
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DoryConfig,
    DoryForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from drafthead.inference.masks import UnsupportedTargetError
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target, load_target


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MambaForCausalLM(
                MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
            ),
            "mamba: linear_attention cannot be rolled back here; "
            "use a model of full or sliding-window attention",
        ),
        (
            lambda: Llama4ForCausalLM(
                Llama4TextConfig(
                    **SMALL, head_dim=16, intermediate_size_mlp=64, num_local_experts=2
                )
            ),
            "llama4_text: chunked_attention cannot be rolled back here",
        ),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"])
            ),
            "qwen3_next: linear_attention cannot be rolled back here",
        ),
        (
            lambda: GPTNeoForCausalLM(
                GPTNeoConfig(
                    vocab_size=64,
                    hidden_size=32,
                    num_layers=2,
                    num_heads=2,
                    attention_types=[[["global", "local"], 1]],
                )
            ),
            "gpt_neo: local_attention cannot be rolled back here",
        ),
        (
            lambda: Gemma3ForCausalLM(
                Gemma3TextConfig(**SMALL, head_dim=16, use_bidirectional_attention=True)
            ),
            "gemma3_text: its attention looks ahead",
        ),
        (
            lambda: BertLMHeadModel(BertConfig(**SMALL)),
            "bert: its attention looks ahead",
        ),
        (
            lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, sliding_window=None)),
            "gemma2: sliding_window is None, which its layers use in no known way",
        ),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**SMALL, sliding_window=16)),
            "llama: sliding_window is 16, which its layers use in no known way",
        ),
        (
            lambda: OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
            ),
            "openai-gpt: its forward takes no cache, which a tree needs",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2)),
            "bloom: its forward takes no position_ids, which a tree needs",
        ),
        (
            lambda: FalconForCausalLM(FalconConfig(**SMALL, alibi=True)),
            "falcon: ALiBi counts slots",
        ),
        (
            lambda: DoryForCausalLM(
                DoryConfig(
                    **SMALL | {"num_hidden_layers": 4},
                    head_dim=16,
                    n_input_layers=1,
                    n_output_layers=1,
                )
            ),
            "dory: its forward reaches into the cache",
        ),
    ],
    ids=[
        "mamba",
        "llama4",
        "qwen3-next",
        "gpt-neo",
        "gemma3 two ways",
        "bert",
        "gemma2 no window",
        "llama window",
        "openai-gpt",
        "bloom",
        "falcon",
        "dory",
    ],
)
def test_f43_targets_that_would_decode_wrongly_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=message) as caught:
        Target(make())
    assert "\n" not in str(caught.value)


def test_f42_a_window_that_no_text_can_pass_is_none() -> None:
    for window in (None, 64):
        Target(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window)))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_known_tree_mask_is_refused(attention: str) -> None:
    model = tiny_target(num_layers=1)
    model.config._attn_implementation_internal = attention  # as where the kernels are installed
    with pytest.raises(UnsupportedTargetError, match=f"llama: attention '{attention}'.*'sdpa'"):
        Target(model)


def test_absolute_positions_are_a_full_attention_target() -> None:
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    target = Target(GPT2LMHeadModel(config))
    assert (target.num_layers, target.context, target.vocab_size) == (2, 64, 64)


def test_f43_refusal_comes_from_speculate_too_before_generating() -> None:
    from drafthead.inference.speculate import speculate

    model = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
        )
    )
    with pytest.raises(UnsupportedTargetError, match="gpt_neo: local_attention"):
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=4, custom_generate=speculate(None))


# Loading


def test_a_target_that_is_not_there_is_one_line(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder, and not a Hub id"):
        load_target(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="cannot be loaded") as caught:
        load_target(tmp_path / "empty")
    assert "\n" not in str(caught.value)


def test_a_head_is_no_target_and_says_where_it_goes(tmp_path: Any) -> None:
    tiny_head(tiny_target(num_layers=6)).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"target .*it is a draft head, .* with --head$"):
        load_target(tmp_path)


def test_a_saved_target_loads_in_the_dtype_asked_for(tmp_path: Any) -> None:
    model = tiny_target(num_layers=2)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(tmp_path, "bfloat16")
    assert target.dtype == torch.bfloat16
    assert target.config._attn_implementation == "sdpa"
    assert target.tokenizer is not None
    original = Target(model, tiny_tokenizer())
    assert target.contract([1]).fingerprint == original.contract([1]).fingerprint


def test_a_saved_target_gets_an_attention_that_its_family_has(tmp_path: Any) -> None:
    """Gemma 2 has no sdpa, for its soft cap."""
    FAMILIES["gemma2"]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert target.config._attn_implementation == "eager"
    prompt = prompt_of(20)
    text = own_greedy(target, prompt, 8)
    assert ids_of(target, [prompt], Sampler(), Oracle([text]), 8) == [text]


def test_f66_a_target_that_lacks_a_tensor_is_refused(tmp_path: Any) -> None:
    """Transformers would make it up at random and only log it."""
    tiny_target(num_layers=2).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    taken = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=f"its weights lack 1 tensors, {name} among them"):
        load_target(tmp_path)
    weights[name] = taken[:3].contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="cannot be loaded") as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_f39_a_text_ends_before_longrope_changes_its_table() -> None:
    """Beyond it a text's keys are made anew in plain decoding."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    model = Phi3ForCausalLM(
        Phi3Config(
            **SMALL,
            sliding_window=None,
            rope_parameters=rope,
            original_max_position_embeddings=32,
        )
    ).double()
    model.generation_config.eos_token_id = None
    target, prompt = Target(model), prompt_of(9, vocab_size=64)
    assert target.context == 32
    text = own_greedy(target, prompt, 23)
    assert ids_of(target, [prompt], Sampler(), Oracle([text]), 23) == [text]
