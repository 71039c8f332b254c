"""EAGLE-3 for others: plain torch over the written folder drafts the same, and so do we again."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import asked_of
from ladder import rollout
from plain_eagle import PlainEagle3
from tiny import tiny_batch, tiny_head, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads import load_head
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings
from drafthead.heads.layouts.files import load_foreign, read_folder, write_folder
from drafthead.heads.layouts.layout import LayoutError, layout_of, layouts_for
from drafthead.heads.layouts.schema import check, check_folder, load_schema

REDUCED = torch.arange(0, 512, 3)
SMALL: dict[str, Any] = {"draft_vocab_size": len(REDUCED)}
BARE = SMALL | {"norm_features": False}
# name: (how the target differs, the head's settings, captured layers, formats that load it)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], str]] = {
    "published": ({}, BARE, (2, 4, 5), "vllm sglang eagle"),
    "whole": ({"tied": True}, {"draft_vocab_size": None}, (2, 4, 5), "vllm sglang"),
    "own-rows": ({"head_dim": 32}, SMALL | {"own_rows": True}, (2, 4, 5), "vllm sglang"),
    "post-norm": ({"rope_theta": 5e5}, SMALL | {"norm_output": True}, (2, 4, 5), "vllm sglang"),
    "layers": ({}, SMALL | {"num_layers": 3}, (1, 3, 6, 7), "vllm sglang"),
    "before-fc": ({}, BARE | {"norm_before_fc": True}, (3, 6), "vllm sglang"),
    "residual": ({}, SMALL | {"norm_before_residual": True}, (2, 4, 8), "vllm"),
}
FORMATS = ("vllm", "sglang", "eagle")
IDS = "eagle_aux_hidden_state_layer_ids"


def made(name: str) -> tuple[LlamaForCausalLM, Eagle3Head]:
    kind, options, layers, _ = VARIANTS[name]
    target, settings = tiny_target(**kind), Eagle3Settings(**options)
    ids = None if settings.draft_vocab_size is None else REDUCED
    head = tiny_head(target, settings, ids, layers)
    if settings.own_rows:  # else they are still the target's, and are taken for them
        torch.nn.init.normal_(head.lm_head.weight, std=0.2)
    return target, head


def chains(
    head: Eagle3Head, target: LlamaForCausalLM, folder: Path, steps: int = 4
) -> tuple[Tensor, Tensor]:
    """The head's draft logits along a text, and those of plain torch over the folder."""
    torch.manual_seed(5)
    ids, n = torch.randint(0, 512, (1, 16)), 8
    batch = tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), head.contract.layers)
    if head.contract.num_layers in head.contract.layers:  # that is before the final norm
        batch = replace(batch, features=torch.randn(batch.features.shape))
    plain = PlainEagle3(folder)
    embedding = target.get_input_embeddings().weight
    assert plain.target_ids().equal(head.draft_ids)
    other = plain.chain(embedding, batch.features[0, :n], ids[0], steps)
    return rollout(head, batch, 0, n - 1, steps), other


@pytest.mark.parametrize("name", VARIANTS)
def test_f65_f68_written_folders_draft_as_the_head(name: str, tmp_path: Path) -> None:
    target, head = made(name)
    formats = VARIANTS[name][3].split()
    folders = {}
    for format in FORMATS:
        if format not in formats:
            with pytest.raises(LayoutError, match=r"^--format \w+: "):
                layout_of(format, head)
            continue
        layout = layout_of(format, head)
        folder = write_folder(layout.write(head, torch.float32), tmp_path / format)
        for consumer in layout.consumers:
            stored = read_folder(folder)
            assert check_folder(folder, stored, load_schema(consumer)) == []
        folders[format] = folder
    ours, plain = chains(head, target, folders["vllm"])
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)
    assert ours.std() > 0.1
    for folder in folders.values():  # one folder for all of them
        for file in ("config.json", "model.safetensors"):
            assert (folder / file).read_bytes() == (folders["vllm"] / file).read_bytes()
    again = load_foreign(folders["vllm"], asked_of(target))
    same_head(head, again, target, tmp_path / "ours")


def same_head(head: Eagle3Head, read: Any, target: LlamaForCausalLM, folder: Path) -> None:
    """What was read, once saved by itself and loaded, is the head that was written."""
    read.save_pretrained(folder)
    loaded = load_head(folder)
    assert loaded.contract == head.contract
    switches = ("norm_features", "norm_output", "norm_before_residual", "norm_before_fc")
    for key in (*switches, "own_rows", "num_layers"):
        assert getattr(loaded.settings, key) == getattr(head.settings, key), key
    state = head.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(tensor.equal(state[key]) for key, tensor in loaded.state_dict().items())
    assert loaded.positions == head.positions


def test_upper_layers_are_the_same_under_either_name(tmp_path: Path) -> None:
    target, head = made("layers")
    folder = write_folder(layout_of("sglang", head).write(head, torch.float32), tmp_path / "out")
    plain, torch_ids = PlainEagle3(folder), torch.randint(0, 512, (12,))
    features, embedding = torch.randn(6, 256), target.get_input_embeddings().weight
    logits = plain.chain(embedding, features, torch_ids, 3)
    plain.upper_norm = "hidden_norm"
    assert plain.chain(embedding, features, torch_ids, 3).equal(logits)
    config = plain.config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6, 7]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5, 6]
    assert config["num_aux_hidden_states"] == 4


def test_targets_that_scale_and_cap_their_logits(tmp_path: Path) -> None:
    """The scale is in the rows; a cap leaves the ranking, and is told to those that read it."""
    target = tiny_target()
    head = tiny_head(target, Eagle3Settings(**SMALL), REDUCED)
    head.contract = head.contract.model_copy(update={"logit_scale": 0.3, "logit_softcap": 5.0})
    folder = write_folder(layout_of("vllm", head).write(head, torch.float32), tmp_path / "out")
    ours, plain = chains(head, target, folder)
    torch.testing.assert_close(ours, torch.tanh(plain / 5) * 5, atol=2e-5, rtol=0)
    assert json.loads((folder / "config.json").read_text())["final_logit_softcapping"] == 5.0
    asked = asked_of(target)
    asked = replace(
        asked,
        contract_of=lambda ids: (
            asked_of(target)
            .contract_of(ids)
            .model_copy(update={"logit_scale": 0.3, "logit_softcap": 5.0})
        ),
    )
    assert "lm_head.weight" not in load_foreign(folder, asked).state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_f69_dtype_is_the_one_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    target, head = made("published")
    folder = write_folder(layout_of("vllm", head).write(head, dtype), tmp_path / "out")
    stored = read_folder(folder)
    name = str(dtype).removeprefix("torch.")
    assert stored.config["torch_dtype"] == stored.config["dtype"] == name
    kinds = {key: tensor.dtype for key, tensor in stored.tensors.items()}
    assert (kinds.pop("d2t"), kinds.pop("t2d")) == (torch.int64, torch.bool)
    assert set(kinds.values()) == {dtype}
    size = sum(t.numel() * t.element_size() for t in stored.tensors.values())
    assert size < (folder / "model.safetensors").stat().st_size < size + 5000
    read = load_foreign(folder, asked_of(target))
    assert read.dtype == dtype
    assert not read.settings.own_rows  # type: ignore[attr-defined]


def test_f67_a_tied_target_does_not_tie_the_head(tmp_path: Path) -> None:
    target, head = made("whole")
    stored = layout_of("vllm", head).write(head, torch.float32)
    assert stored.config["tie_word_embeddings"] is False
    read = load_foreign(write_folder(stored, tmp_path / "out"), asked_of(target))
    assert read.config.tie_word_embeddings is False


# Faults that the readers would not say a word about


def _moved(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["eagle_config"][IDS] = [1, 2, 3, 4]


FAULTS: dict[str, tuple[str, Any, str]] = {
    "missing": ("published", lambda c, t: t.pop("norm.weight"), "norm.weight is missing"),
    "map-of-all": (
        "whole",
        lambda c, t: t.update(d2t=torch.zeros(512, dtype=torch.int64)),
        "d2t is there without",
    ),
    "no-map": ("published", lambda c, t: t.pop("d2t"), "d2t is missing"),
    "no-rows": ("published", lambda c, t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "prefix": (
        "published",
        lambda c, t: t.update({"model.norm.weight": t.pop("norm.weight")}),
        "model.norm.weight is nothing that it reads",
    ),
    "ids": ("layers", _moved, "mean other layers"),
    "ids-unordered": (
        "layers",
        lambda c, t: c.update({IDS: [3, 1, 6, 7]}),
        "not ascending",
    ),
    "count": ("layers", lambda c, t: c.pop("num_aux_hidden_states"), "num_aux_hidden_states is m"),
    "dtype": ("published", lambda c, t: c.update(torch_dtype="bfloat16"), "disagree"),
    "fp32": (
        "published",
        lambda c, t: c.update(torch_dtype="bfloat16", dtype="bfloat16"),
        "dtype is bfloat16, tensors are float32",
    ),
    "path": ("published", lambda c, t: c.update(model_type="/root/x"), "a place of this machine"),
    "field": ("published", lambda c, t: c.update(_name_or_path="x"), "_name_or_path is nothing"),
    "architecture": ("published", lambda c, t: c.update(architectures=["Other"]), "none of"),
    "transposed": (
        "published",
        lambda c, t: t.update({"fc.weight": t["fc.weight"].T}),
        r"fc.weight has shape \(192, 64\), not \(64, 192\)",
    ),
    "rope": ("published", lambda c, t: c.update(rope_theta=1e6), "rope_parameters disagree"),
    "target-width": ("published", lambda c, t: c.update(target_hidden_size=64), "another"),
    "map-dtype": ("published", lambda c, t: t.update(d2t=t["d2t"].int()), "int32, not int64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_f68_f71_a_planted_fault_is_caught(name: str) -> None:
    variant, plant, message = FAULTS[name]
    _, head = made(variant)
    stored = layout_of("vllm", head).write(head, torch.float32)
    schema = load_schema("vllm-0.32.0-eagle3")
    assert check(stored, schema) == []
    config, tensors = json.loads(json.dumps(stored.config)), dict(stored.tensors)
    plant(config, tensors)
    problems = check(replace(stored, config=config, tensors=tensors), schema)
    assert any(re.search(message, line) for line in problems), problems


def test_refusals_say_what_to_do() -> None:
    _, head = made("residual")
    (sglang,) = layouts_for("sglang", "eagle3")
    reasons = sglang.refusals(head)
    assert len(reasons) == 2
    assert all("use --format vllm" in reason for reason in reasons)
    (published,) = layouts_for("eagle", "eagle3")
    assert "SafeAILab/EAGLE has no norm_features" in published.refusals(head)[0]
    with pytest.raises(LayoutError, match="did you mean 'sglang'"):
        layouts_for("sglan", "eagle3")


def test_states_that_readers_count_otherwise() -> None:
    """SGLang takes ids inside `eagle_config` as they are for some targets, but not after a 1."""
    target = tiny_target()
    for layers, nested in (((3, 5, 6), [3, 5, 6]), ((2, 5, 6), [1, 4, 5]), ((1, 3, 6), None)):
        head = tiny_head(target, Eagle3Settings(**SMALL), REDUCED, layers)
        head.contract = head.contract.model_copy(update={"model_type": "deepseek_v3"})
        if nested is None:
            with pytest.raises(LayoutError, match="reads the layers of deepseek_v3 targets other"):
                layout_of("sglang", head)
            continue
        layout = layout_of("sglang", head)
        stored = layout.write(head, torch.float32)
        assert stored.config["eagle_config"][IDS] == nested
        assert check(stored, load_schema(layout.consumers[0])) == []


def test_ids_in_the_other_convention_are_caught() -> None:
    _, head = made("layers")
    stored, schema = (
        layout_of("sglang", head).write(head, torch.float32),
        load_schema("sglang-0.5.23-eagle3"),
    )
    config = {**stored.config, "eagle_config": {IDS: [1, 3, 6, 7]}}
    assert check(replace(stored, config=config), schema) == [
        "the two lists of layer ids mean other layers"
    ]
    twice = stored.tensors | {"midlayer.hidden_norm.weight": torch.ones(64)}
    (problem,) = check(replace(stored, tensors=twice), schema)
    assert problem == "tensor midlayer.hidden_norm.weight is nothing that it reads"


def test_shallow_targets_name_their_states(tmp_path: Path) -> None:
    """Below seven layers the default states collide, so they are always listed."""
    target = tiny_target(num_layers=5)
    head = tiny_head(target, Eagle3Settings(**SMALL), REDUCED, (1, 2, 4))
    folder = write_folder(layout_of("sglang", head).write(head, torch.float32), tmp_path / "out")
    assert read_folder(folder).config[IDS] == [1, 2, 4]
    assert load_foreign(folder, asked_of(target)).contract.layers == (1, 2, 4)


def test_states_that_no_reader_or_only_some_capture() -> None:
    target = tiny_target()
    last = tiny_head(target, Eagle3Settings(**SMALL), REDUCED, (-1, 2, 4))
    for format in FORMATS:
        with pytest.raises(LayoutError, match="captures no state after the final norm"):
            layout_of(format, last)
    one = tiny_head(target, Eagle3Settings(**SMALL), REDUCED, (4,))
    with pytest.raises(LayoutError, match="passes over fc where one state is captured"):
        layout_of("sglang", one)
    assert layout_of("vllm", one).name == "eagle3-vllm"


def test_a_norm_before_fc_is_said_twice() -> None:
    """At the top for vLLM and SGLang, inside `eagle_config` for TensorRT-LLM."""
    _, head = made("before-fc")
    config = layout_of("vllm", head).write(head, torch.float32).config
    assert config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True
