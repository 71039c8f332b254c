"""A head of the Hub where a verb asks for a folder: `hub:ORG/NAME[@REVISION]`, over real HTTP."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, Call, assert_one_line, write_prompts
from hub_client import asked_by_this_process
from hub_server import TOKEN, Hub, serving
from huggingface_hub import constants
from tiny_runs import write_head

from drafthead.heads import load_head
from drafthead.heads.hub import fetched, pull, push
from drafthead.heads.publication import publication
from drafthead.inference import tuning
from drafthead.inference.speculate import speculate
from drafthead.inference.target import load_target

NAME = "org/head"
TOKENS = ["--dtype", "float32", "--max-new-tokens", 6]


@pytest.fixture(scope="module")
def head(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of the target on disk."""
    return write_head(tmp_path_factory.mktemp("heads") / "head", target_folder)


@pytest.fixture
def hub(head: Path, tmp_path: Path) -> Iterator[Hub]:
    """A Hub that holds the head, and a client without a cache."""
    found = Hub()
    fetched.cache_clear()
    with asked_by_this_process(found, tmp_path / "cache"):
        push(publication(head, target="org/target", repo=NAME), NAME)
        found.requests.clear()
        yield found
    fetched.cache_clear()


def generated(call: Call, head: object, target: Path) -> dict[str, Any]:
    """What `generate --json` says, but for its times."""
    asked = ["--target", target, *TOKENS, "--prompt", "Hello there", "--tree", "chain:2"]
    done = call("generate", "--head", head, *asked, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return {name: value for name, value in found.items() if not name.endswith("_s")}


def test_generate_drafts_with_a_head_of_the_hub_as_with_its_folder(
    hub: Hub, head: Path, target_folder: Path, tmp_path: Path, call: Call
) -> None:
    mine, theirs = (generated(call, name, target_folder) for name in (head, f"hub:{NAME}"))
    assert theirs == mine
    weights = [r for r in hub.requests if r.startswith("GET") and "model.safetensors" in r]
    assert len(weights) == 1
    pull(NAME, tmp_path / "pulled")
    loaded = load_target(target_folder, "float32")
    assert loaded.tokenizer is not None
    drafter = load_head(tmp_path / "pulled", torch.float32)
    drafter.bind(loaded.model)
    model: Any = loaded.model
    inputs = loaded.tokenizer("Hello there", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    out = model.generate(**inputs, max_new_tokens=6, custom_generate=speculate(drafter, seed=0))
    assert torch.equal(out, plain)


def test_evaluate_takes_revisions_of_a_head_side_by_side(
    hub: Hub, target_folder: Path, tmp_path: Path, call: Call
) -> None:
    first = hub.repositories["models", NAME].branches["main"]
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    heads = ["--head", f"hub:{NAME}@{first}", "--head", f"hub:{NAME}"]
    done = call("evaluate", *heads, "--target", target_folder, *TOKENS, "--prompts", prompts,
                "--identity", 0, "--out", tmp_path / "eval")  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "eval" / "evaluation.json").read_text())["heads"]
    assert list(found) == [f"head@{first}", "head"]
    assert {Path(of["folder"]).name for of in found.values()} == {first}


def test_a_tuning_is_kept_out_of_the_hubs_cache_and_found_again(
    hub: Hub, target_folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "cache_dir", lambda: tmp_path / "mine")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    done = call("tune", "--head", f"hub:{NAME}", "--target", target_folder, *TOKENS,
                "--prompts", prompts, "--repeats", 1, "--batch", 1, "--json")  # fmt: skip
    assert done.code == 0, done.err
    file = Path(json.loads(done.out)["file"])
    assert file.parent == tmp_path / "mine" / "tuning"
    assert not list((tmp_path / "cache").rglob("tuning.json"))
    folder, target = fetched(f"hub:{NAME}"), load_target(target_folder, "float32")
    found = tuning.fitting(folder, target, load_head(folder, torch.float32))
    assert found is not None
    assert found[0] == file
    # One that its maker published holds on the same machine, too: the newer one is mine.
    (folder / "tuning.json").write_bytes(file.read_bytes())
    found = tuning.fitting(folder, target, load_head(folder, torch.float32))
    assert found is not None
    assert found[0] == file


@pytest.mark.parametrize("verb", ["generate", "evaluate", "tune"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hub:org/none", "org/none: not on 127.0.0.1, or not to be seen without a token"),
        ("hub:org/head@never", "org/head: has no such revision; name a branch, tag or commit"),
        ("hub:org/model", "org/model: holds no head"),
        ("hub:head", "'head': whose? write ORG/NAME"),
        ("hub:", "'': no name of a repository"),
        ("hub:org/rows", "org/rows: is a data set on 127.0.0.1, not a model"),
        ("hub:org/lm", "model_type 'llama' is no head"),
    ],
)
def test_what_holds_no_head_is_one_line(
    verb: str, name: str, said: str, hub: Hub, target_folder: Path, call: Call
) -> None:
    hub.add("org/model", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    hub.add("org/lm", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x"})
    hub.add("org/rows", {"README.md": b"x"}, kind="datasets")
    told = {"generate": ["--prompt", "x"]}.get(verb, [])
    assert_one_line(call(verb, "--head", name, "--target", target_folder, *told), [said])


def test_a_hub_that_is_not_there_is_one_line_until_the_head_is_cached(
    hub: Hub, target_folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["generate", "--head", f"hub:{NAME}", "--target", target_folder, *TOKENS]
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert_one_line(
            call(*asked, "--prompt", "x"),
            ["org/head: 127.0.0.1 cannot be reached (Connection refused); check the network"],
        )
    assert call(*asked, "--prompt", "x").code == 0
    fetched.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert call(*asked, "--prompt", "x").code == 0


@pytest.mark.slow
def test_the_command_by_itself_fetches_and_tells_no_token(
    head: Path, target_folder: Path, tmp_path: Path
) -> None:
    """In a process of its own, which reads these variables when it imports the Hub's client."""
    hub = Hub()
    found = publication(head, target="org/target", repo=NAME)
    files = {name: f if isinstance(f, bytes) else f.read_bytes() for name, f in found.items()}
    hub.add(NAME, files, private=True)
    with serving(hub) as endpoint:
        given = {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        left = {name: v for name, v in os.environ.items() if name != "HF_HUB_OFFLINE"}
        asked = ["generate", "--head", f"hub:{NAME}", "--target", target_folder, *TOKENS]
        done = subprocess.run(
            [*COMMAND, *map(str, asked), "--prompt", "Hello there"],
            env=left | given,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(done.stderr.splitlines()) == 1, "no bars, no remarks of libraries"
    assert any("model.safetensors" in request for request in hub.requests)
    assert TOKEN not in done.stdout + done.stderr
