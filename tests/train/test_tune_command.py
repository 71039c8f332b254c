"""`drafthead tune` as a user meets it: what it prints, where the choice lies, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Call, assert_one_line, write_prompts
from tiny_runs import write_head

from drafthead.inference.tree import parse_shape
from drafthead.inference.tuning import read


@pytest.fixture(scope="module")
def head(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of the target on disk."""
    return write_head(tmp_path_factory.mktemp("heads") / "head", target_folder)


def test_tune_writes_its_choice_beside_the_head_and_prints_it(
    head: Path, target_folder: Path, tmp_path: Path, call: Call
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    asked = ["tune", "--head", head, "--target", target_folder, "--dtype", "float32"]
    asked += ["--prompts", prompts, "--limit", 2, "--max-new-tokens", 4, "--repeats", 1]
    done = call(*asked, "--batch", 1, "--batch", 2, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["file"] == str(head / "tuning.json")
    tuning = read(head / "tuning.json")
    assert {b: str(s) for b, s in tuning.shapes.items()} == {
        int(b): s for b, s in result["shapes"].items()
    }
    assert tuning.shapes.keys() == {1, 2}
    assert tuning.prompts == 2
    assert "written to" in done.err
    elsewhere = tmp_path / "new" / "mine.json"
    done = call(*asked, "--clock", "cpu", "--out", elsewhere)
    assert done.out.startswith("batch 1: ")
    assert len(done.out.splitlines()) == 2, "one and four rows, where none are asked for"
    assert all(parse_shape(str(shape)) == shape for shape in read(elsewhere).shapes.values())
    assert "decoding does not look there" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --head or --sibling, the one that is to be tuned"),
        (["--head", "x", "--sibling", "y"], "give --head or --sibling"),
        (["--head", "nowhere"], "nowhere: no config.json"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(
    arguments: list[str], said: str, target_folder: Path, call: Call
) -> None:
    assert_one_line(call("tune", *arguments, "--target", target_folder), [said])


def test_prompts_that_do_not_fit_are_left_out_and_one_batch_has_an_interval(
    head: Path, target_folder: Path, tmp_path: Path, call: Call
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "endless", "turns": ["word " * 400]}) + "\n")
    asked = ["tune", "--head", head, "--target", target_folder, "--dtype", "float32"]
    asked += ["--prompts", prompts, "--batch", 2, "--repeats", 1]
    out = tmp_path / "mine.json"
    done = call(*asked, "--limit", 2, "--max-new-tokens", 4, "--out", out)
    assert done.code == 0, done.err
    assert "left out: 1 of the prompts (prompt 'endless': prompt of" in done.err
    assert read(out).prompts == 2, "the next ones stand in"
    assert done.out.startswith("batch 2: off")
    for gains in read(out).gains.values():
        assert all(low is not None and high is not None for _, low, high in gains.values())
    done = call(*asked, "--max-new-tokens", 300)
    assert_one_line(done, ["no prompt can be decoded: prompt 'endless'", "context of 256"])
    before = (head / "config.json").read_bytes()
    done = call(*asked, "--out", head / "config.json")
    assert_one_line(done, ["config.json: is there and no tuning; name another file"])
    assert (head / "config.json").read_bytes() == before


def test_a_clock_that_is_none_is_one_line(
    head: Path, target_folder: Path, tmp_path: Path, call: Call
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    done = call("tune", "--head", head, "--target", target_folder, "--dtype", "float32",
                "--prompts", prompts, "--clock", "sun", "--max-new-tokens", 3)  # fmt: skip
    assert_one_line(done, ["clock 'sun': choose one of wall, cpu"])
