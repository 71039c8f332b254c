"""EAGLE-1 for others and from others: plain torch over the written folder drafts the same."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import asked_of, random_tensors, write
from ladder import rollout
from plain_eagle import PlainEagle
from tiny import tiny_batch, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads import load_head
from drafthead.heads.contract import LAST, describe
from drafthead.heads.eagle import EagleHead, EagleSettings
from drafthead.heads.layouts.files import load_foreign, read_folder, write_folder
from drafthead.heads.layouts.layout import LayoutError, Stored, layout_of
from drafthead.heads.layouts.schema import check, check_folder, load_schema

FORMATS = ("vllm", "sglang", "eagle")
ARCHITECTURES = {
    "vllm": "LlamaForCausalLM",
    "sglang": "LlamaForCausalLMEagle",
    "eagle": "LlamaForCausalLM",
}


def made(target: LlamaForCausalLM, ids: Tensor | None = None, **options: Any) -> EagleHead:
    """A bound head with random weights, large enough that every part of it shows."""
    size = None if ids is None else len(ids)
    settings = EagleSettings(draft_vocab_size=size, **options)
    torch.manual_seed(1)
    head = settings.build(describe(target, None, (LAST,), {}), target.config, ids)
    head.bind(target)
    with torch.no_grad():
        for parameter in head.parameters():
            spread = 0.3 if parameter.dim() < 2 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()  # type: ignore[no-any-return]


def chains(head: EagleHead, target: LlamaForCausalLM, folder: Path) -> tuple[Tensor, Tensor]:
    """The head's draft logits along a text, and those of plain torch over the folder."""
    torch.manual_seed(5)
    ids, n, steps = torch.randint(0, 512, (1, 16)), 8, 4
    batch = tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), (2, 4))
    batch = replace(batch, features=batch.last_hidden)
    embedding = target.get_input_embeddings().weight
    rows = target.get_output_embeddings().weight
    other = PlainEagle(folder).chain(embedding, rows, batch.features[0, :n], ids[0], steps)
    return rollout(head, batch, 0, n - 1, steps), other


@pytest.mark.parametrize("kind", [{}, {"tied": True, "rope_theta": 5e5}, {"head_dim": 32}])
def test_f65_f68_written_folders_draft_as_the_head(kind: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_target(**kind)
    head = made(target)
    for format in FORMATS:
        if format == "eagle" and "head_dim" in kind:
            with pytest.raises(LayoutError, match="joins heads to the width 64 only, not 128"):
                layout_of(format, head)
            continue
        layout = layout_of(format, head)
        folder = write_folder(layout.write(head, torch.float32), tmp_path / format)
        for consumer in layout.consumers:
            stored = read_folder(folder)
            assert check_folder(folder, stored, load_schema(consumer)) == []
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [ARCHITECTURES[format]]
        assert config["bias"] is False
        ours, plain = chains(head, target, folder)
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=0)
        assert ours.std() > 1
        read = load_foreign(folder, asked_of(target))
        read.save_pretrained(tmp_path / f"ours-{format}")
        loaded = load_head(tmp_path / f"ours-{format}")
        assert loaded.contract == head.contract
        assert loaded.state_dict().keys() == head.state_dict().keys()
        assert all(x.equal(head.state_dict()[k]) for k, x in loaded.state_dict().items())


def test_f68_a_trained_bias_goes_where_it_is_read(tmp_path: Path) -> None:
    target = tiny_target()
    head = made(target, fc_bias=True)
    with pytest.raises(LayoutError, match=r"vLLM drops the bias of fc; train with head\.fc_bias"):
        layout_of("vllm", head)
    for format, said in (("sglang", False), ("eagle", True)):
        folder = write_folder(layout_of(format, head).write(head, torch.float32), tmp_path / format)
        assert json.loads((folder / "config.json").read_text())["bias"] is said
        ours, plain = chains(head, target, folder)
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=0)
        read = load_foreign(folder, asked_of(target))
        assert read.settings.fc_bias  # type: ignore[attr-defined]


def test_a_reduced_vocabulary_is_refused_with_the_way_out() -> None:
    head = made(tiny_target(), torch.arange(0, 512, 3))
    for format in FORMATS:
        with pytest.raises(LayoutError, match="from 171 of them; add --whole-vocabulary"):
            layout_of(format, head)


def theirs(config: dict[str, Any], **more: tuple[int, ...]) -> Stored:
    """A published EAGLE-1 head of a width-64 target, as SafeAILab's code trains it."""
    layer = "layers.0."
    shapes = {
        "fc.weight": (64, 128),
        f"{layer}self_attn.q_proj.weight": (64, 64),
        f"{layer}self_attn.k_proj.weight": (32, 64),
        f"{layer}self_attn.v_proj.weight": (32, 64),
        f"{layer}self_attn.o_proj.weight": (64, 64),
        f"{layer}mlp.gate_proj.weight": (96, 64),
        f"{layer}mlp.up_proj.weight": (96, 64),
        f"{layer}mlp.down_proj.weight": (64, 96),
        f"{layer}post_attention_layernorm.weight": (64,),
        **{name.replace("__", "."): shape for name, shape in more.items()},
    }
    usual = {
        "architectures": ["LlamaForCausalLM"],
        "bias": False,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
    }
    return Stored({**usual, **config}, random_tensors(shapes))


def test_a_foreign_head_drafts_as_its_maker_does(tmp_path: Path) -> None:
    """Without a base for its rotary embedding (10,000 then), and with the target's embedding."""
    target, stored = tiny_target(), theirs({"rope_theta": 10000.0}, fc__bias=(64,))
    tensors = stored.tensors | {"embed_tokens.weight": target.get_input_embeddings().weight.data}
    folder = write(tmp_path / "theirs", stored.config, tensors)
    head = load_foreign(folder, asked_of(target))
    assert isinstance(head, EagleHead)
    head.bind(target)
    ours, plain = chains(head, target, folder)
    torch.testing.assert_close(ours, plain, atol=2e-4, rtol=0)
    with pytest.raises(LayoutError, match="last state alone; drop --layers"):
        load_foreign(folder, asked_of(target, (1, 2)))
    del stored.config["rope_theta"]
    again = load_foreign(write(tmp_path / "bare", stored.config, tensors), asked_of(target))
    assert again.rotary_base == 10000.0  # type: ignore[attr-defined]


OTHERS: dict[str, tuple[Any, str]] = {
    "rows": (lambda t: t.update({"lm_head.weight": torch.ones(512, 64)}), "EAGLE-1 drafts"),
    "missing": (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "missing layers.0.mlp.up_proj"),
    "normed": (
        lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
        "no draft head is known to look like this",
    ),
    "two-layers": (
        lambda t: t.update({"layers.1.input_layernorm.weight": torch.ones(64)}),
        "num_hidden_layers is 1, the tensors have 2",
    ),
    "qkv-bias": (
        lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "surplus layers.0.self_attn.q_proj.bias",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_f66_what_is_not_such_a_head_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = OTHERS[name]
    stored = theirs({})
    tensors = dict(stored.tensors)
    change(tensors)
    with pytest.raises(LayoutError, match=message):
        load_foreign(write(tmp_path / "in", stored.config, tensors), asked_of(tiny_target()))


FAULTS: dict[str, tuple[str, Any, str]] = {
    "rows": (
        "vllm",
        lambda c, t: t.update({"lm_head.weight": torch.ones(512, 64)}),
        "lm_head.weight is nothing that it reads",
    ),
    "bias": ("vllm", lambda c, t: t["fc.bias"].add_(1), "fc.bias is not zeros"),
    "no-bias": ("sglang", lambda c, t: t.pop("fc.bias"), "fc.bias is missing"),
    "attention-bias": ("sglang", lambda c, t: c.update(bias=True), "bias = True, not False"),
    "architecture": ("sglang", lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "not"),
    "input-norm": (
        "vllm",
        lambda c, t: t.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
        "layers.0.input_layernorm.weight is nothing",
    ),
    "scaling": ("eagle", lambda c, t: c.update(rope_scaling={"type": "linear"}), "base of 10,000"),
    "vocabulary": ("vllm", lambda c, t: c.update(draft_vocab_size=64), "all of the target's rows"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_f68_a_planted_fault_is_caught(name: str) -> None:
    format, plant, message = FAULTS[name]
    head = made(tiny_target())
    layout = layout_of(format, head)
    stored, schema = layout.write(head, torch.float32), load_schema(layout.consumers[0])
    assert check(stored, schema) == []
    config = json.loads(json.dumps(stored.config))
    tensors = {key: tensor.clone() for key, tensor in stored.tensors.items()}
    plant(config, tensors)
    problems = check(replace(stored, config=config, tensors=tensors), schema)
    assert any(re.search(message, line) for line in problems), problems


def test_scales_and_caps_of_the_target_are_told() -> None:
    head = made(tiny_target())
    head.contract = head.contract.model_copy(update={"logit_scale": 0.3, "logit_softcap": 5.0})
    for format in FORMATS:
        layout = layout_of(format, head)
        stored = layout.write(head, torch.float32)
        assert (stored.config["logit_scale"], stored.config["final_logit_softcapping"]) == (
            0.3,
            5.0,
        )
        assert check(stored, load_schema(layout.consumers[0])) == []


def test_scaled_turns_go_where_they_are_read(tmp_path: Path) -> None:
    target = tiny_target()
    head = made(target)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    head.config.rope_parameters = yarn | {"rope_theta": 1e4}
    layout = layout_of("vllm", head)
    stored = layout.write(head, torch.float32)
    assert stored.config["rope_scaling"] == yarn
    assert check(stored, load_schema(layout.consumers[0])) == []
    read = load_foreign(write_folder(stored, tmp_path / "out"), asked_of(target))
    assert read.config.rope_parameters == yarn | {"rope_theta": 1e4}
    with pytest.raises(LayoutError, match="SafeAILab/EAGLE ignores the rotary scaling 'yarn'"):
        layout_of("eagle", head)


def test_layers_that_no_reader_loads() -> None:
    head = made(tiny_target())
    head.config.hidden_act, head.config.num_attention_heads = "gelu", 3
    for format in ("vllm", "sglang"):
        with pytest.raises(LayoutError, match=r"3 heads do not divide its width 64.*act 'gelu'"):
            layout_of(format, head)
