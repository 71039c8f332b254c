"""`drafthead export` and `import` as a user meets them, there and back, and their mistakes."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, Call, Place, assert_one_line, write_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import LAYERS, three_layers, write_target

from drafthead.heads import load_head
from drafthead.heads.borrowing import BorrowingHead
from drafthead.inference import engine_check
from drafthead.inference.engine_check import EngineError, EngineResult
from drafthead.inference.shipped import unlike
from drafthead.inference.target import load_target

TEST = ("--limit", 1)


def export(call: Call, place: Place, out: Path, *more: object, format: str = "vllm") -> Any:
    arguments = ["--head", place.head, "--target", place.target, "--format", format, "--out", out]
    return call("export", *arguments, "--prompts", place.prompts, *more)


@pytest.fixture(scope="module")
def exported(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained head for vLLM, by the command in a process of its own."""
    out = tmp_path_factory.mktemp("exported") / "out"
    done = subprocess.run(
        [*COMMAND, "export", "--head", place.head, "--target", place.target, "--format", "vllm",
         "--out", out, "--prompts", place.prompts, "--limit", "4"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, test, *uses = done.stdout.splitlines()
    assert first.startswith(f"{out}: eagle3-vllm, float32, ")
    assert "tensors and draft logits are equal; tau " in test
    assert uses[0].startswith(f"vLLM 0.32.0: vllm serve {place.target} --speculative-config '{{")
    return out


def test_f65_f75_a_trained_head_comes_back_from_another_process_equal(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    """The folder alone is moved: no side file says which tokens are drafted."""
    moved = shutil.copytree(exported, tmp_path / "elsewhere")
    done = call("import", moved, "--target", place.target, "--out", tmp_path / "head", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["layers"], told["draft_vocab_size"], told["vocab_size"]) == ([1, 2, 3], 256, 512)
    ours, theirs = load_head(place.head), load_head(tmp_path / "head")
    assert isinstance(ours, BorrowingHead)
    assert isinstance(theirs, BorrowingHead)
    target = load_target(place.target)
    for head in (ours, theirs):
        head.bind(target.model)
    assert unlike(ours, theirs) == []
    assert theirs.contract.model_dump(exclude={"dtype"}) == ours.contract.model_dump(
        exclude={"dtype"}
    )
    assert len(ours.state_dict()) == len(theirs.state_dict()) == 17


def files_text(folder: Path) -> str:
    """What of a folder is text: the config, and the header of the tensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return f"{(folder / 'config.json').read_text()} {tensors.metadata()} {tensors.keys()}"


def test_f71_no_file_says_where_it_was_made(exported: Path, place: Place) -> None:
    assert json.loads((place.head / "config.json").read_text())["contract"]["target"] == "tiny"
    private = {str(place.target.parent), str(place.root), str(exported), "/" + getpass.getuser()}
    files = [file for file in exported.rglob("*") if file.is_file()]
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    for file in files:
        content = file.read_bytes()
        assert not [text for text in private if text.encode() in content], file
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", files_text(exported))


def test_what_is_exported_is_told_as_json(place: Place, call: Call, tmp_path: Path) -> None:
    done = export(
        call, place, tmp_path / "out", "--dtype", "bf16", "--json", *TEST, format="speculators"
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["tau_before"] >= 1
    assert told["tau_after"] >= 1
    assert told["prompts"] == 1
    assert told["dtype"] == "bfloat16"
    assert [*told["serve"]] == ["speculators 0.9.0"]
    assert told["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["lm_head.weight"].shape == (256, 64)
    assert stored["fc.weight"].dtype == torch.bfloat16


def test_a_head_of_a_reduced_vocabulary_over_all_tokens(
    place: Place, call: Call, tmp_path: Path
) -> None:
    done = export(call, place, tmp_path / "out", "--whole-vocabulary", "--limit", 0)
    assert done.code == 0, done.err
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["lm_head.weight"].shape == (512, 64)
    assert "d2t" not in stored
    assert "tau" not in done.out
    assert "--prompts: no effect with --limit 0" in done.err


def test_an_imported_head_is_evaluated_tuned_trained_on_and_exported_again(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    """The contract that `import` writes is as good as the one that training writes."""
    head, target = tmp_path / "head", ["--target", place.target]
    assert call("import", exported, *target, "--out", head).code == 0
    shown = ["--prompts", place.prompts, "--dtype", "float32", "--limit", 1]
    done = call("evaluate", "--head", head, *target, *shown, "--max-new-tokens", 4,
                "--identity", 1, "--tree", "chain:2", "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["cells"][0]["records"]
    done = call("tune", "--head", head, *target, *shown, "--max-new-tokens", 3, "--repeats", 1,
                "--batch", 1)  # fmt: skip
    assert done.code == 0, done.err
    assert (head / "tuning.json").is_file()

    config = write_config(
        tmp_path / "run.yaml", place.root, place.target,
        start=str(head), max_steps=1, agreement_prompts=0,
    )  # fmt: skip
    done = call("train", "--config", config, f"out={tmp_path / 'run'}")
    assert done.code == 0, done.err
    trained = tmp_path / "run" / "head"
    before, after = (load_file(f / "model.safetensors") for f in (head, trained))
    assert before.keys() == after.keys()
    assert 0 < (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.01
    done = call("export", "--head", trained, *target, "--format", "speculators",
                "--out", tmp_path / "again", "--limit", 0)  # fmt: skip
    assert done.code == 0, done.err
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again["fc.weight"].equal(after["fc.weight"])


@pytest.mark.parametrize("drafts", [4, 3])
def test_an_engine_that_drafts_otherwise_is_exit_code_1(
    drafts: int, place: Place, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def checked(*arguments: Any) -> EngineResult:
        asked.extend(arguments)
        return EngineResult(4, drafts, 9, 9, 4, engine_tau=1.5, our_tau=1.5)

    monkeypatch.setattr(engine_check, "check", checked)
    monkeypatch.setattr(engine_check, "check_engine", lambda python: None)
    done = export(
        call, place, tmp_path / "out", "--dtype", "bf16", "--json",
        "--engine", "vllm", "--engine-python", "bin/python", *TEST,
    )  # fmt: skip
    assert done.code == (0 if drafts == 4 else 1), done.err
    assert json.loads(done.out)["engine"]["passed"] == (drafts == 4)
    target, head, out, python, prompts, _, method = asked
    assert (target, out, method) == (str(place.target), tmp_path / "out", "eagle3")
    assert head.dtype == torch.bfloat16, "what is compared is rounded as it was exported"
    assert python == Path("bin/python")
    assert len(prompts) == 1


@pytest.mark.parametrize("error", [EngineError("the engine ended with 1"), KeyboardInterrupt()])
def test_an_engine_that_fails_leaves_the_export_and_says_so(
    error: BaseException, place: Place, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(*arguments: Any) -> EngineResult:
        raise error

    monkeypatch.setattr(engine_check, "check", checked)
    monkeypatch.setattr(engine_check, "check_engine", lambda python: None)
    out = tmp_path / "out"
    done = export(call, place, out, "--json", "--engine", "vllm", "--engine-python", "x", *TEST)
    assert done.code == (2 if isinstance(error, EngineError) else 130), done.err
    assert done.out == ""
    assert f"{out} is written and read back all the same; to run this again, remove it" in done.err
    assert (out / "config.json").is_file()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_folder_that_is_made(
    there: bool, exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    real = tmp_path / "real"
    if there:
        real.mkdir()
    (tmp_path / "link").symlink_to(real)
    done = call("import", exported, "--target", place.target, "--out", tmp_path / "link")
    assert done.code == 0, done.err
    assert (real / "config.json").is_file()
    assert {file.name for file in tmp_path.iterdir()} == {"link", "real"}


def test_a_tilde_is_the_home_folder(
    exported: Path, place: Place, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells leave `--out=~/x` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = call("import", exported, "--target", place.target, "--out=~/head")
    assert done.code == 0, done.err
    assert export(call, place, Path("~/out"), "--limit", 0).code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"head", "out"}


# Mistakes


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--format", "vlm"], "unknown format 'vlm'; did you mean 'vllm'?"),
        (["--format", "medusa"], "it has no eagle3 heads; use --format"),
        (["--format", "eagle"], "SafeAILab/EAGLE has no norm_features"),
        (["--dtype", "int8"], "--dtype 'int8': choose from bf16, fp16, fp32"),
        (["--engine", "vllm"], "--engine and --engine-python belong together"),
        (["--engine", "x", "--engine-python", "y"], "--engine 'x': choose from vllm"),
        (
            ["--engine", "vllm", "--engine-python", "y", "--format", "sglang"],
            "--engine vllm serves --format vllm or speculators, not sglang",
        ),
        (
            ["--engine", "vllm", "--engine-python", sys.executable, "--target", "nowhere"],
            "a Python without vLLM; `make engine-vllm` builds one",
        ),
        (["--head", "nowhere"], "nowhere: no config.json"),
        (["--head", "reference"], "and does not fit 'tiny': hidden_size is 64"),
        (["--target", "nowhere"], "target 'nowhere': no such folder"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    more: list[str], said: str, place: Place, call: Call, tmp_path: Path
) -> None:
    assert_one_line(export(call, place, tmp_path / "out", *more), [said])
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_there_is_left_alone(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    before = (exported / "config.json").read_bytes()
    said = [f"{exported}: exists already; name a new folder, or remove it first"]
    assert_one_line(export(call, place, exported), said)
    assert_one_line(call("import", exported, "--target", place.target, "--out", exported), said)
    assert (exported / "config.json").read_bytes() == before


def test_f75_another_target_of_the_same_shape_is_refused_both_ways(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    other = write_target(tmp_path / "other", three_layers(seed=5))
    done = export(call, place, tmp_path / "out", "--target", other)
    assert_one_line(done, ["made for target 'tiny' and does not fit 'other'", "fingerprint"])
    done = call("import", exported, "--target", other, "--out", tmp_path / "head")
    assert done.code == 0, "its rows are then its own: nothing in a flat folder names the target"
    assert "its output rows are not those of 'other'" in done.err
    assert "lm_head.weight" in load_head(tmp_path / "head").state_dict()
    assert not (tmp_path / "out").exists()


def _p_eagle(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mask_hidden": torch.ones(1, 1, 192)}, folder / "model.safetensors")
    return "P-EAGLE heads (mask_hidden) are not read here"


def _mlp_speculator(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "mlp_speculator"}))
    save_file({"speculator.emb.0.weight": torch.ones(4, 2)}, folder / "model.safetensors")
    return "MLP speculators (fms-extras) are not read here"


def _of_nothing(folder: Path) -> str:
    save_file({"some.weight": torch.ones(4, 2)}, folder / "model.safetensors")
    return "no draft head is known to look like this (tensors: some.weight)"


def _our_own(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "drafthead_eagle3"}))
    return "it is a head of drafthead already"


def _emptied(folder: Path) -> str:
    shutil.rmtree(folder)
    return "no such folder"


def _not_utf8(folder: Path) -> str:
    (folder / "config.json").write_bytes(b'\xff\xfe{"model_type": "llama"}')
    return "config.json: no JSON ("


def _half(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return "file not fully covered); get it anew"


DAMAGES = (_p_eagle, _mlp_speculator, _of_nothing, _our_own, _emptied, _not_utf8, _half)


@pytest.mark.parametrize("damage", DAMAGES)
def test_f66_what_cannot_be_imported_is_one_line(
    damage: Any, exported: Path, call: Call, tmp_path: Path
) -> None:
    """And said before the target is loaded, which may take minutes: here there is none."""
    folder = shutil.copytree(exported, tmp_path / "theirs")
    said = damage(folder)
    done = call("import", folder, "--target", "nowhere", "--out", tmp_path / "head")
    assert_one_line(done, [said, str(folder)])
    assert not (tmp_path / "head").exists()


def test_layers_can_be_named_and_must_be_ids(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    """What the user says wins over what the folder says."""
    asked = ["import", exported, "--target", place.target, "--out", tmp_path / "head"]
    assert_one_line(call(*asked, "--layers", "one"), ["--layers 'one': give ids with commas"])
    assert_one_line(call(*asked, "--layers", "1,2,2"), ["--layers '1,2,2': a state is named twice"])
    assert_one_line(call(*asked, "--layers", "1,2,9"), ["must be distinct ascending ids in 1..3"])
    assert_one_line(call(*asked, "--layers", "1,2"), ["fc.weight takes 3 states"])
    assert call(*asked, "--layers", "1,2,3").code == 0
    assert load_head(tmp_path / "head").contract.layers == LAYERS


def test_who_made_a_folder_must_be_known(exported: Path, call: Call, tmp_path: Path) -> None:
    asked = ["import", exported, "--target", "nowhere", "--out", tmp_path / "head"]
    said = ["--producer 'nobody': choose from angelslim, ", "modelopt, ", "speculators, ", "vllm"]
    assert_one_line(call(*asked, "--producer", "nobody"), said)


def test_a_draft_is_not_its_own_target(exported: Path, call: Call, tmp_path: Path) -> None:
    done = call("import", exported, "--target", exported, "--out", tmp_path / "head")
    assert_one_line(done, [f"--target {exported}: it is the draft itself"])


def test_an_export_given_as_a_head_is_told_of_import(
    exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    done = export(call, place, tmp_path / "out", "--head", exported)
    assert_one_line(done, ["'llama' is no head", "`drafthead import` makes one"])


@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_place_where_nothing_can_be_made_is_told_before_any_work(
    verb: str, exported: Path, place: Place, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "more" / "out"
    if verb == "export":
        done = export(call, place, out, "--target", "nowhere")
    else:
        done = call("import", exported, "--target", "nowhere", "--out", out)
    assert_one_line(done, [f"{out}: {tmp_path / 'file'} is no folder; name a new folder elsewhere"])
