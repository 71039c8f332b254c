"""A target below PEFT's wrapper, or spread over disk and memory, decodes as it does plainly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from drafts import HalfRight, endless, ids_of, own_greedy, prompt_of
from families import FAMILIES
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import nn

from drafthead.inference.masks import UnsupportedTargetError
from drafthead.inference.sampling import Sampler
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree

PROMPTS = [prompt_of(n) for n in (5, 1, 23)]
TOKENS = 16


def adapted(seed: int = 3) -> PeftModel:
    """A target in fp64 with LoRA layers that change what it says."""
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj", "up_proj"]
    )
    model = get_peft_model(endless(num_layers=3).double(), config)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model.double().eval()


def texts_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The model's own greedy texts, through its own `generate`."""
    return [
        model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )[0].tolist()
        for prompt in prompts
    ]


# PEFT


def test_an_adapted_target_decodes_to_the_adapted_models_text() -> None:
    model = adapted()
    texts = texts_of(model, PROMPTS)
    with model.disable_adapter():
        plain = texts_of(model, PROMPTS)
    assert all(a != b for a, b in zip(texts, plain, strict=True)), "the adapter must show"
    target = Target(model)
    drafter = HalfRight(texts, [1, 3, 2], tree=True)
    assert ids_of(target, PROMPTS, Sampler(), drafter, TOKENS) == texts
    with model.disable_adapter():
        assert ids_of(target, PROMPTS, Sampler(), None, TOKENS) == plain


def test_an_adapted_model_generates_with_drafts() -> None:
    model = adapted()
    texts = texts_of(model, PROMPTS)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        drafter = HalfRight([text], 2, tree=True)
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=TOKENS,
            custom_generate=speculate(drafter),
        )
        assert out[0].tolist() == text
        assert drafter.ids, "the drafter was asked"


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_f43_adapters_of_prompts_are_refused_by_name(kind: type) -> None:
    """Their virtual tokens would be missing from every forward of the decoder's own."""
    config = kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    model = get_peft_model(endless(num_layers=2), config)
    message = "adapter 'default' .* acts on prompts, not on weights"
    with pytest.raises(UnsupportedTargetError, match=message):
        Target(model)
    with pytest.raises(UnsupportedTargetError, match=message):
        model.generate(
            input_ids=torch.tensor([[4, 5]]), max_new_tokens=4, custom_generate=speculate(None)
        )


def test_what_is_not_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="Linear: not a transformers model"):
        Target(nn.Linear(2, 2))


# Offloading


def spread(model: nn.Module, folder: Path) -> nn.Module:
    """First layer on disk, second in memory, the last offloaded to memory, the ends on disk."""
    places: dict[str, str | int] = {
        "model.embed_tokens": "disk",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.layers.2": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    spread: nn.Module = dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, force_hooks=True
    )
    return spread


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_offloaded_target_is_the_same_target(family: str, tmp_path: Path) -> None:
    """Prefill, verify, features and texts; what is on disk is on `meta` between forwards."""
    plain = Target(FAMILIES[family]())
    target = Target(spread(FAMILIES[family](), tmp_path))
    assert target.model.get_input_embeddings().weight.is_meta
    assert target.device == torch.device("cpu")
    tree = Tree([10, 11, 12], [-1, -1, 1])
    outs = []
    for one in (plain, target):
        store = one.open(2, 40)
        first = one.prefill(store, 0, prompt_of(19), (1, 3))
        second = one.prefill(store, 1, prompt_of(4), (1, 3))
        outs.append([first, second, one.verify(store, [9, 8], [tree, tree], (1, 3))])
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours.logits, theirs.logits)
        assert ours.features is not None
        assert theirs.features is not None
        assert torch.equal(ours.features, theirs.features)
    texts = [own_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    drafter = HalfRight(texts, [1, 0, 2], tree=True)
    assert ids_of(target, PROMPTS, Sampler(), drafter, TOKENS) == texts
    features, last = target.states(torch.tensor([PROMPTS[2]]), (1, 3))
    expected = plain.states(torch.tensor([PROMPTS[2]]), (1, 3))
    assert torch.equal(features, expected[0])
    assert torch.equal(last, expected[1])
    ids = torch.tensor([PROMPTS[2]])
    drafter = HalfRight(texts, [1, 0, 2], tree=True)
    out = target.model.generate(
        ids, do_sample=False, max_new_tokens=TOKENS, custom_generate=speculate(drafter)
    )
    assert out[0].tolist() == texts[2]
