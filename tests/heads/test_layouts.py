"""Folders of others: read without running anything, written whole, told apart by their content."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.heads.base import settings_class
from drafthead.heads.blocks import Rotary
from drafthead.heads.layouts.fields import rope_fields, rope_of
from drafthead.heads.layouts.files import read_folder, write_folder
from drafthead.heads.layouts.layout import LAYOUTS, LayoutError, Stored
from drafthead.heads.layouts.recognise import family, layout_in
from drafthead.heads.layouts.schema import check, check_folder, load_schema, schema_names

CONFIG = {"model_type": "llama"}


def tensors() -> dict[str, Tensor]:
    return {"fc.weight": torch.randn(4, 8), "norm.weight": torch.randn(4)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


# Writing


def test_f70_shared_and_strided_tensors_are_written_apart(tmp_path: Path) -> None:
    rows = torch.randn(6, 4)
    shared = {"a.weight": rows, "b.weight": rows, "half": rows[:3], "turned": rows.T}
    out = write_folder(Stored(CONFIG, shared), tmp_path / "out")
    assert equal(load_file(out / "model.safetensors"), shared)
    assert equal(read_folder(out).tensors, shared)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_folder(Stored(CONFIG, tensors()), out)  # an empty one is taken
    with pytest.raises(ValueError, match="exists already; name a folder that does not"):
        write_folder(Stored(CONFIG, tensors()), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_writing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_folder(Stored({"x": torch.ones(1)}, tensors()), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_f69_both_spellings_of_the_dtype(tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in tensors().items()}
    config = read_folder(write_folder(Stored(CONFIG, half), tmp_path / "out")).config
    assert config["dtype"] == config["torch_dtype"] == "float16"


# Reading


class Marker:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def foreign(folder: Path, config: object = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt"])
def test_f73_pickles_are_read_as_tensors_or_not_at_all(name: str, tmp_path: Path) -> None:
    folder, marker, known = foreign(tmp_path / "in"), tmp_path / "marker", tensors()
    torch.save(known, folder / name)
    assert equal(read_folder(folder).tensors, known)
    for write in (
        lambda: torch.save({"fc.weight": Marker(marker)}, folder / name),
        lambda: (folder / name).write_bytes(pickle.dumps(Marker(marker), protocol=2)),
        lambda: (folder / name).write_bytes(b"nothing"),
    ):
        write()
        with pytest.raises(LayoutError, match=f"{name}: holds more than tensors, or is damaged"):
            read_folder(folder)
        assert not marker.exists()
    torch.save({"step": 3}, folder / name)
    with pytest.raises(LayoutError, match=f"{name}: 'step' is int, not a tensor"):
        read_folder(folder)


def test_f73_code_beside_the_tensors_is_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, marker, known = tmp_path / "in", tmp_path / "marker", tensors()
    foreign(folder, {"auto_map": {"AutoModel": "modeling.Head"}})
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "training_args.bin").write_bytes(pickle.dumps(Marker(marker), protocol=2))
    save_file(known, folder / "model.safetensors")
    assert equal(read_folder(folder).tensors, known)
    assert not marker.exists()
    assert "['training_args.bin'] not read" in caplog.text


def test_shards_are_put_together_and_stay_inside(tmp_path: Path) -> None:
    folder, known = foreign(tmp_path / "in"), tensors()
    shards = {"fc.weight": "one.safetensors", "norm.weight": "two.safetensors"}
    index = folder / "model.safetensors.index.json"
    for name, file in shards.items():
        save_file({name: known[name]}, folder / file)
    with pytest.raises(LayoutError, match="could all be the tensors"):
        read_folder(folder)
    index.write_text(json.dumps({"weight_map": shards}))
    assert equal(read_folder(folder).tensors, known)
    for stray in ("../config.json", "three.safetensors"):
        index.write_text(json.dumps({"weight_map": {"fc.weight": stray}}))
        with pytest.raises(LayoutError, match=f"'{stray}' is no file of this folder"):
            read_folder(folder)


@pytest.mark.parametrize(
    ("config", "message"), [("[1]", "expected an object"), ("{", "no JSON"), (None, "no config")]
)
def test_configs_that_are_none(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(LayoutError, match=message):
        read_folder(tmp_path)


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"no tensors; expected model\.safetensors"):
        read_folder(foreign(tmp_path / "in"))


# Telling apart

HIDDEN = {"fc.weight": torch.ones(4, 12), "midlayer.hidden_norm.weight": torch.ones(4)}
FOUND: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "speculators": ({"speculators_config": {}, "dflash_config": {}}, HIDDEN),
    "dflash": ({"dflash_config": {}}, HIDDEN),
    "medusa": ({"medusa_num_heads": 3}, {}),
    "hydra": ({"hydra_num_heads": 3}, {}),
    "mlp_speculator": ({"model_type": "mlp_speculator"}, {}),
    "p-eagle": ({}, HIDDEN | {"mask_hidden": torch.ones(12)}),
    "eagle3": ({"architectures": ["LlamaForCausalLM"]}, HIDDEN),
    "eagle": ({"architectures": ["LlamaForCausalLM"]}, {"fc.weight": torch.ones(4, 8)}),
    "": ({"architectures": ["LlamaForCausalLM"]}, {"model.norm.weight": torch.ones(4)}),
}


@pytest.mark.parametrize("name", FOUND)
def test_families_are_told_by_what_they_hold(name: str) -> None:
    stored = Stored(*FOUND[name])
    assert family(stored) == name
    prefixed = {f"model.{key}": tensor for key, tensor in stored.tensors.items()}
    assert family(Stored(stored.config, prefixed)) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mlp_speculator", "MLP speculators"), ("p-eagle", "P-EAGLE"), ("", "no draft head is known")],
)
def test_what_is_not_read_is_named(name: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=f"^x: {reason}.* \\(tensors: "):
        layout_in(Stored(*FOUND[name], place="x"))


def test_our_own_heads_are_not_foreign() -> None:
    stored = Stored({"model_type": "drafthead_eagle3"}, HIDDEN, place="x")
    with pytest.raises(LayoutError, match=r"^x: is a head of drafthead already"):
        layout_in(stored)


# Schemas


def test_every_layout_has_its_schemas_and_every_schema_its_layout() -> None:
    wanted = {consumer for layout in LAYOUTS for consumer in layout.consumers}
    assert wanted == set(schema_names())
    for layout in LAYOUTS:
        settings_class(layout.kind)
        assert layout.formats
    for name in wanted:
        assert load_schema(name)["tensors"]


def test_f71_no_place_of_this_machine_passes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("socket.gethostname", lambda: "box-7")
    schema = {"config": {"target": {"type": "str"}}, "tensors": []}
    for fine in ("org/model", "model", "box-77", "a/box"):
        assert check(Stored({"target": fine}, {}), schema) == []
    for place in (
        "/data/model",
        "C:\\model",
        "~/model",
        "../model",
        "x/home/somebody/y",
        "at box-7",
    ):
        (problem,) = check(Stored({"target": place}, {}), schema)
        assert problem == f"config.target = {place!r} is a place of this machine"
    folder = write_folder(Stored({"target": "m"}, {"a": torch.ones(1)}), tmp_path / "out")
    (folder / "optimizer.pt").write_bytes(b"")
    schema = {
        "config": {"target": {"type": "str"}},
        "tensors": [{"name": "a", "shape": [1]}],
    }
    problems = check_folder(folder, Stored({"target": "m"}, {"a": torch.ones(1)}), schema)
    assert problems == ["file optimizer.pt does not belong there"]


# Rotary embeddings, in the spellings that are about

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rotary_fields_go_there_and_back() -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert rope_fields(plain) == {"rope_theta": 5e5, "rope_parameters": plain}
    assert rope_of(rope_fields(plain)) == plain
    assert rope_of(rope_fields(LLAMA3)) == LLAMA3
    old = rope_fields(LLAMA3)
    del old["rope_parameters"]  # as before transformers 5
    assert rope_of(old) == LLAMA3
    assert rope_of({"rope_scaling": {"type": "linear", "factor": 2.0}}) == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 10_000.0,
    }
    assert rope_of({"rope_theta": 1e6, "rope_scaling": {"mrope_section": [1, 1, 2]}}) == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


def test_scaled_rotary_slows_the_slow_turns_alone() -> None:
    plain = Rotary(128, {"rope_type": "default", "rope_theta": 5e5}).frequencies
    ratio = plain / Rotary(128, LLAMA3).frequencies
    waves = 2 * torch.pi / plain
    torch.testing.assert_close(ratio[waves < 8192 / 4], torch.ones_like(ratio[waves < 8192 / 4]))
    torch.testing.assert_close(ratio[waves > 8192], torch.full_like(ratio[waves > 8192], 8.0))
    between = ratio[(waves > 8192 / 4) & (waves < 8192)]
    assert len(between) > 2
    assert ((between > 1) & (between < 8)).all()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    cos, _ = Rotary(64, yarn | {"rope_theta": 1e4}).tables(1, torch.device("cpu"), torch.float32)
    assert cos[0, 0].item() == pytest.approx(0.1 * torch.log(torch.tensor(4.0)).item() + 1)
    with pytest.raises(ValueError, match="'yarn' needs original_max_position_embeddings"):
        Rotary(64, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
