"""Targets and tokenizers made in memory, small enough for a CPU in seconds; no network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template SmolLM2 ships but for its system text: no generation markers."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CORPUS = (
    "You are a small assistant, and the user would like an answer that is short and right.",
    "The quick brown fox jumps over the lazy dog while seven wizards quietly mix poisonous brews.",
    "Write a function that returns the sum of two numbers, then explain every line of it.",
    "What is the capital of France? The capital of France is Paris, which lies on the river Seine.",
    "Please translate this sentence into German and tell me whether anything was difficult.",
    "Photosynthesis turns light, water and carbon dioxide into sugar, oxygen and living matter.",
    "Three apples and four pears make seven pieces of fruit; take away two and five remain.",
    "Memory fades slowly, but a careful notebook keeps what happened before and after.",
    "Summarise the following paragraph without losing the names, places or important dates.",
    "Nobody expected the weather to change quickly, yet heavy clouds gathered over mountains.",
)


def tiny_tokenizer(
    vocab_size: int = 512,
    template: str | None = CHATML,
    corpus: Sequence[str] = CORPUS,
    split: pre_tokenizers.PreTokenizer | None = None,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` tokens (259 or more).

    `<|im_end|>` is both eos and pad, as in SmolLM2. `split` replaces the usual split into words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the corpus has too few words for this size"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    )


def tiny_target(
    num_layers: int = 8,
    vocab_size: int = 512,
    head_dim: int = 16,
    tied: bool = False,
    rope_theta: float = 10_000.0,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Make a Llama-type target in fp32: hidden 64, 4 heads, 2 key/value heads, random norm weights.

    `vocab_size` may exceed the tokenizer's (padded); `head_dim` 32 is not hidden / heads.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    # Away from 1, so that a missing or doubled norm shows.
                    parameter.uniform_(0.7, 1.3)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def tiny_batch(
    model: LlamaForCausalLM, ids: Tensor, mask: Tensor, layers: Sequence[int]
) -> TeacherBatch:
    """The teacher's states of (B, T) ids, straight from transformers; mask: (B, T) bool."""
    out = model.model(ids, output_hidden_states=True)
    states = [out.hidden_states[layer] for layer in layers]  # index n would be post-norm
    return TeacherBatch(
        ids=ids,
        mask=mask,
        features=torch.cat(states, dim=-1),
        last_hidden=out.last_hidden_state,
        top=model.lm_head(out.last_hidden_state).argmax(-1),
    )


def tiny_head(
    target: LlamaForCausalLM,
    settings: Eagle3Settings | None = None,
    draft_ids: Tensor | None = None,
    layers: Sequence[int] = (2, 4, 5),
    seed: int = 1,
) -> Eagle3Head:
    """Make a bound EAGLE-3 head with random weights, large enough that every part of it shows."""
    size = None if draft_ids is None else len(draft_ids)
    settings = settings or Eagle3Settings(draft_vocab_size=size)
    contract = describe(target, None, layers, {})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = settings.build(contract, target.config, draft_ids)
        head.bind(target)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if "norm" in name:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                elif "lm_head" not in name:
                    parameter.mul_(8)
    return head


def greedy_batches(
    target: LlamaForCausalLM, count: int, layers: tuple[int, ...]
) -> list[TeacherBatch]:
    """Rows that the target continued greedily, so that its states say what comes next."""
    torch.manual_seed(3)
    batches = []
    for _ in range(count):
        ids = target.generate(torch.randint(3, 512, (16, 2)), do_sample=False, max_new_tokens=30)
        mask = torch.ones_like(ids, dtype=torch.bool)
        batches.append(tiny_batch(target, ids, mask, layers))
    return batches
