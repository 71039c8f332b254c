"""Folders that are odd in every way: each is refused in one line that names what is wrong."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import asked_of, changed, made
from foreign import write
from ladder import REDUCED, SIZE
from safetensors.torch import save_file
from tiny import tiny_target

from drafthead.heads.block import BlockSettings
from drafthead.heads.blocks import Rotary
from drafthead.heads.borrowing import BorrowingSettings
from drafthead.heads.eagle import EagleSettings
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.hydra import HydraSettings
from drafthead.heads.layouts.files import load_foreign, read_folder
from drafthead.heads.layouts.kinds import check_kinds
from drafthead.heads.layouts.layout import LayoutError, Stored, layout_of
from drafthead.heads.layouts.schema import check, load_schema
from drafthead.heads.layouts.serve import command_of
from drafthead.heads.medusa import MedusaSettings

ALL: dict[str, Any] = {"draft_vocab_size": None}
BLOCK = {**ALL, "unroll_steps": 4, "norm_features": False, "mask_token_id": 9}
PLAIN = {**BLOCK, "anchor_predicts": False, "markov_rank": 0, "confidence": False}
HEADS: dict[str, tuple[str, BorrowingSettings]] = {
    "eagle": ("vllm", EagleSettings(**ALL)),
    "eagle3": ("vllm", Eagle3Settings(draft_vocab_size=SIZE, norm_features=False)),
    "eagle3-other-states": ("sglang", Eagle3Settings(layers=(1, 3, 6), **ALL)),
    "medusa": ("medusa", MedusaSettings(unroll_steps=2, **ALL)),
    "hydra": ("hydra", HydraSettings(unroll_steps=2, **ALL)),
    "dflash": ("dflash", BlockSettings(**PLAIN)),
    "dspark": ("sglang", BlockSettings(**{**BLOCK, "markov_rank": 8})),
}
TARGET = tiny_target()


def stored_as(name: str) -> Stored:
    format, settings = HEADS[name]
    head = made(settings, TARGET, None if settings.draft_vocab_size is None else REDUCED)
    return layout_of(format, head).write(head, torch.float32)


def refused(stored: Stored, message: str, folder: Path) -> None:
    """By a LayoutError of one line."""
    out = write(folder, stored.config, {n: t.clone() for n, t in stored.tensors.items()})
    with pytest.raises(LayoutError, match=message) as caught:
        load_foreign(out, asked_of(TARGET))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": [64]}, r"hidden_size is \[64\], not a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"head_dim": True}, "head_dim is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
        ({"norm_before_residual": "false"}, "is 'false', not true or false"),
        ({"rope_parameters": "llama3"}, "rope_parameters is 'llama3', not an object"),
        ({"dflash_config": {"target_layer_ids": [1, "a"]}}, "target_layer_ids is .* list of whole"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2]}, "list of whole numbers"),
        ({"architectures": "DFlashDraftModel"}, "not a list of texts"),
        ({"confidence_temperatures": [0.0]}, "not a list of positive numbers"),
    ],
)
def test_fields_of_another_kind_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=f"^x: .*{message}"):
        check_kinds(config, "x")
    check_kinds(dict.fromkeys(config), "x")  # null is no value


O_PROJ = "midlayer.self_attn.o_proj.weight"
ODD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "int8": (lambda t: {O_PROJ: t[O_PROJ].char()}, {}, "o_proj.weight is torch.int8: quantised"),
    "fp8": (lambda t: {O_PROJ: t[O_PROJ].to(torch.float8_e4m3fn)}, {}, "float8_e4m3fn: quantised"),
    "int8-rows": (lambda t: {"lm_head.weight": t["lm_head.weight"].char()}, {}, "torch.int8: quan"),
    "int8-embedding": (
        lambda t: {"embed_tokens.weight": TARGET.get_input_embeddings().weight.char()},
        {},
        "embed_tokens.weight differs",
    ),
    "nan": (lambda t: {O_PROJ: t[O_PROJ] * torch.nan}, {}, "o_proj.weight .* not finite"),
    "infinite": (lambda t: {"norm.weight": t["norm.weight"] / 0}, {}, "norm.weight .* not finite"),
    "number": (lambda t: {"norm.weight": torch.tensor(1.0)}, {}, "norm.weight is a single number"),
    "vector": (lambda t: {"fc.weight": torch.ones(192)}, {}, r"fc.weight has shape \(192,\)"),
    "empty": (
        lambda t: {"midlayer.mlp.gate_proj.weight": torch.ones(0, 64)},
        {},
        r"gate_proj.weight has shape \(0, 64\)",
    ),
    "half-map": (lambda t: {"d2t": t["d2t"].half()}, {}, "d2t is torch.float16 .* no map"),
    "square-map": (lambda t: {"d2t": t["d2t"][None].repeat(2, 1)}, {}, "d2t is .* no map"),
    "square-mask": (lambda t: {"t2d": t["t2d"][None]}, {}, "t2d is .* no map"),
    "wider-mask": (lambda t: {"t2d": t["t2d"] | True}, {}, "t2d keeps other tokens"),
    "stray-layer": (lambda t: {"layers.x.weight": torch.ones(2)}, {}, "surplus layers.x.weight"),
    "head-dim": (lambda t: {}, {"head_dim": 32}, "head_dim is 32, the tensors have 16"),
    "layers": (lambda t: {}, {"num_hidden_layers": 2}, "num_hidden_layers is 2, the tensors have"),
    "window": (lambda t: {}, {"layer_types": ["sliding_attention"]}, "layers with sliding_attent"),
    "rope-kinds": (
        lambda t: {},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters differ between",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_eagle3_heads(name: str, tmp_path: Path) -> None:
    change, config, message = ODD[name]
    stored = stored_as("eagle3")
    tensors = {**stored.tensors, **change(stored.tensors)}
    refused(replace(changed(stored, config), tensors=tensors), message, tmp_path / "in")


BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"num_target_layers": 28}, "num_target_layers is 28, the target has 8"),
    "vocabulary": ({"vocab_size": 500}, "vocab_size is 500, that of the target 512"),
    "reduced": ({"draft_vocab_size": 100}, "draft_vocab_size is 100, the tensors are for 512"),
    "layers": ({"num_hidden_layers": 2**24}, "num_hidden_layers is 16777216, the tensors have"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads_of_another_target(name: str, tmp_path: Path) -> None:
    config, message = BLOCKS[name]
    refused(changed(stored_as("dflash"), config), message, tmp_path / "in")


def test_numbers_in_names_make_nothing_large(tmp_path: Path) -> None:
    """A head's number is believed only where all tensors up to it are there."""
    square = torch.ones(64, 64)
    heads = stored_as("medusa")
    few = {"medusa_num_heads": None, "medusa_num_layers": None}
    for i, (name, message) in enumerate(
        [
            ("999999999999.0.linear.weight", r"no weight of block 2\.0"),
            ("0.999999999999.linear.weight", r"no weight of block 0\.1"),
            ("blocks.0.layers.0.weight", "two tensors are what"),
            ("0.5.weight", "two tensors are what 0.5.weight is"),
        ]
    ):
        odd = replace(heads, tensors={**heads.tensors, name: square})
        refused(changed(odd, few), message, tmp_path / str(i))
    behind = {n.replace("0.1.weight", "0.5.weight"): t for n, t in heads.tensors.items()}
    refused(replace(heads, tensors=behind), "rows are behind 5 blocks", tmp_path / "behind")
    archive = stored_as("hydra")
    tensors = {**archive.tensors, "hydra_mlp.999999999999.0.linear.weight": square}
    config = {**archive.config, "hydra_num_heads": None, "hydra_num_layers": None}
    refused(Stored(config, tensors), "not every Hydra head", tmp_path / "hydra")


def test_odd_files(tmp_path: Path) -> None:
    def odd(name: str, config: str = "{}") -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        return tmp_path / name

    folder = odd("text")
    (folder / "head.bin").write_text("hello world\n")
    with pytest.raises(LayoutError, match=r"head\.bin: holds more than tensors, or is damaged"):
        read_folder(folder)
    folder = odd("nothing")
    (folder / "model.safetensors").mkdir()
    (folder / "other.safetensors").symlink_to("nowhere")
    with pytest.raises(LayoutError, match="no tensors"):
        read_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "c.safetensors"}}')
    (folder / "c.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(LayoutError, match=r"c\.safetensors: not a safetensors file"):
        read_folder(folder)
    with pytest.raises(LayoutError, match=r"config\.json: no JSON"):
        read_folder(odd("deep", '{"a":' + "[" * 10**5 + "]" * 10**5 + "}"))
    folder = odd("twice")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"fc.weight": torch.ones(2, 2)}, folder / name)
    index = {"weight_map": {"fc.weight": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LayoutError, match=r"fc\.weight is in b\.safetensors and in a file before"):
        read_folder(folder)


@pytest.mark.parametrize("name", HEADS)
def test_f68_schemas_find_every_field_that_is_lost_or_odd(name: str) -> None:
    format, settings = HEADS[name]
    stored = stored_as(name)
    head = made(settings, TARGET, None if settings.draft_vocab_size is None else REDUCED)
    for consumer in layout_of(format, head).consumers:
        schema = load_schema(consumer)
        assert check(stored, schema) == []
        for field, rule in schema["config"].items():
            if field not in stored.config:
                continue
            for value in ({}, [1, "a"], "a", 2.5):
                kinds = {"list": list, "dict": dict, "str": str, "float": int | float, "int": int}
                if "type" in rule and isinstance(value, kinds.get(rule["type"], ())):
                    continue
                assert check(changed(stored, {field: value}), schema), (consumer, field, value)
            if not rule.get("optional"):
                lost = check(changed(stored, {field: None}), schema)
                assert f"config.{field} is missing" in lost, (consumer, field)


def test_f71_a_machine_may_be_called_as_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_as("medusa")
    for host in ("medusa", "target", "bfloat16"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert check(stored, load_schema("vllm-0.32.0-medusa")) == []


def test_rotary_scalings_name_what_they_lack() -> None:
    base = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match="'llama3' needs high_freq_factor and low_freq_factor"):
        Rotary(16, {**base, "rope_type": "llama3"})
    with pytest.raises(ValueError, match="'linear' needs factor"):
        Rotary(16, {"rope_type": "linear", "rope_theta": 1e4})


@pytest.mark.parametrize("consumer", ["vllm", "sglang", "tgi"])
def test_commands_keep_names_with_spaces_whole(consumer: str) -> None:
    head = made(Eagle3Settings(draft_vocab_size=SIZE), TARGET, REDUCED)
    words = shlex.split(command_of(consumer, "eagle3", head, "my head's"))
    assert "my head's" in words or json.loads(words[-1])["model"] == "my head's"
    assert consumer == "tgi" or head.contract.target in words
