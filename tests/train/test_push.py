"""`drafthead push` and `pull` as a user meets them: what they print, share and refuse."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import COMMAND, Call, assert_one_line, write_prompts
from hub_client import asked_by_this_process
from hub_server import TOKEN, Hub, serving
from huggingface_hub import constants
from tiny_runs import write_head

NAME = "org/head"


@pytest.fixture(scope="module")
def head(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of the target on disk."""
    return write_head(tmp_path_factory.mktemp("heads") / "head", target_folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    with asked_by_this_process(found, tmp_path / "cache"):
        yield found


def test_a_head_is_pushed_with_its_figures_and_pulled_as_it_was(
    head: Path, target_folder: Path, tmp_path: Path, call: Call, hub: Hub
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    asked = ["--head", head, "--target", target_folder, "--dtype", "float32", "--prompts", prompts]
    few = ["--limit", 4, "--max-new-tokens", 4, "--identity", 0, "--out", tmp_path / "eval"]
    done = call("evaluate", *asked, *few)
    assert done.code == 0, done.err
    push = ["push", "--head", head, "--repo", NAME, "--evaluation", tmp_path / "eval"]
    done = call(*push, "--target", "org/target")
    assert done.code == 0, done.err
    assert done.out == f"{constants.ENDPOINT}/{NAME} (private)\n"
    assert "one commit" in done.err
    files = hub.files(NAME)
    assert set(files) == {"config.json", "model.safetensors", "README.md", "evaluation.json"}
    evaluation = json.loads(files["evaluation.json"])
    assert evaluation["heads"]["head"]["folder"] == "head"
    assert evaluation["cells"]
    assert not {"sample", "samples"} & set(evaluation), "what was written for the prompts stays"
    told = b"".join(files.values())
    assert str(tmp_path.parent).encode() not in told
    assert str(head.parent).encode() not in told
    assert b"base_model: org/target" in files["README.md"]

    again = call(*push, "--target", "org/target", "--json")
    assert json.loads(again.out)["changed"] == []
    assert "nothing was changed" in again.err
    assert_one_line(call("push", "--head", head, "--repo", NAME), ["org/head exists", "--update"])
    done = call("pull", NAME, "--out", tmp_path / "pulled")
    assert done.out == f"{tmp_path / 'pulled'}\n"
    assert {p.name: p.read_bytes() for p in (tmp_path / "pulled").iterdir()} == files
    assert hub.commits(NAME) == 1
    assert TOKEN not in done.out + done.err + again.err


@pytest.mark.slow
def test_the_command_by_itself_asks_the_endpoint_of_the_environment(
    head: Path, tmp_path: Path
) -> None:
    """In a process of its own, which reads these variables when it imports the Hub's client."""
    hub = Hub()
    with serving(hub) as endpoint:
        given = {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"),
                 "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
        done = subprocess.run(
            [*COMMAND, "push", "--head", str(head), "--repo", NAME, "--public"],
            env=os.environ | given,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{endpoint}/{NAME} (public)\n"
    assert set(hub.files(NAME)) == {"config.json", "model.safetensors", "README.md"}
    assert not hub.repositories["models", NAME].private
    assert len(done.stderr.splitlines()) == 1, "no bars, no remarks of libraries"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "--head", "nowhere", "--repo", NAME], "nowhere: no config.json"),
        (["push", "--repo", NAME], "--head"),
        (["push", "--head", "HEAD", "--repo", "head"], "'head': whose? write ORG/NAME"),
        (["push", "--head", "HEAD", "--repo", NAME, "--evaluation", "no"], "no: not there"),
        (["push", "--head", "HEAD", "--repo", NAME], "org/head: HF_HUB_OFFLINE is set"),
        (["pull", NAME, "--out", "x"], "org/head: HF_HUB_OFFLINE is set"),
        (["pull", NAME, "--out", "HEAD"], "exists; name a new folder"),
    ],
)
def test_what_cannot_be_shared_is_one_line(
    arguments: list[str], said: str, head: Path, call: Call
) -> None:
    given = [str(head) if argument == "HEAD" else argument for argument in arguments]
    assert_one_line(call(*given), [said])
