"""One tiny model of each family of targets, made from its config; no network.

All are fp32, of vocabulary 512, without an end token, with norm weights away from 1, and, where
the family has windows, with one of 16 positions, which short texts pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_target
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WINDOW = 16
PADDED = 544
"""Rows of the padded vocabulary; the tokenizer's has 512."""

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Settings of the smallest models, for tests of one family that is not decoded."""

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {**COMMON, **SIZES, "num_key_value_heads": 2}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def _qwen2() -> PreTrainedModel:
    """Full attention first, windows above it."""
    config = Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    )
    return Qwen2ForCausalLM(config)


def _qwen3() -> PreTrainedModel:
    config = Qwen3Config(
        **GROUPED,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
    )
    return Qwen3ForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=5.0,
    )
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    """Each kind of layer turns by a base of its own."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        rope_parameters=rope,
    )
    return Gemma3ForCausalLM(config)


def _gpt2() -> PreTrainedModel:
    """Learned absolute positions."""
    settings = {k: v for k, v in COMMON.items() if k != "max_position_embeddings"}
    return GPT2LMHeadModel(GPT2Config(**settings, n_positions=256, n_embd=64, n_layer=3, n_head=4))


def _mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        **GROUPED, sliding_window=None, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"  # the grouped kernel knows no fp64
    return MixtralForCausalLM(config)


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32
    )
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_target(num_layers=3),
    "llama odd heads": lambda: tiny_target(num_layers=3, head_dim=32),
    "padded": lambda: tiny_target(num_layers=3, vocab_size=PADDED),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=WINDOW)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi": lambda: PhiForCausalLM(PhiConfig(**COMMON, **SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, sliding_window=WINDOW)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, **SIZES)),
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3_moe,
}


def _made(maker: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = maker()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and ("norm" in name or ".ln_" in name):
                    # Shifted, not set: Gemma's norms have the weight 0 where others have 1.
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    name: lambda maker=maker: _made(maker) for name, maker in _MAKERS.items()
}
"""Name → function that makes the same model each time."""

TOLERANCE = {"sdpa": 1e-9, "eager": 3e-6}
"""Of fp64 models: transformers' eager attention takes its softmax in fp32."""

EAGER_ONLY = ("gemma2",)
"""Those whose soft cap inside the attention sdpa cannot do."""

WINDOWED = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3")
"""Those of the families that have sliding windows."""
