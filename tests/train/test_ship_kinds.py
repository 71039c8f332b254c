"""Heads of other kinds than EAGLE-3 through the commands: trained, shipped, back, trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Call, Place, write_config
from safetensors.torch import load_file
from tiny_runs import LAYERS

TEST = ("--limit", 1)

OTHERS = {
    "vllm": {"type": "eagle", "draft_vocab_size": None},
    "medusa": {"type": "medusa", "draft_vocab_size": None, "unroll_steps": 2},
    "dflash": {
        "type": "block",
        "draft_vocab_size": None,
        "layers": LAYERS[:2],
        "unroll_steps": 3,
        "num_layers": 2,
        "anchor_predicts": False,
        "norm_features": False,
        "mask_token_id": 16,
        "markov_rank": 0,
        "confidence": False,
    },
}
"""A head that each format has, of the whole vocabulary."""


@pytest.mark.slow
@pytest.mark.parametrize("format", OTHERS)
def test_a_head_of_another_kind_goes_out_and_back_and_is_trained_on(
    format: str, place: Place, call: Call, tmp_path: Path
) -> None:
    target, config = ["--target", place.target], tmp_path / "run.yaml"
    settings = json.loads(
        write_config(config, place.root, place.target, max_steps=1, agreement_prompts=0).read_text()
    )
    config.write_text(json.dumps({**settings, "head": OTHERS[format]}))

    def trained(name: str, *more: str) -> Path:
        done = call("train", "--config", config, f"out={tmp_path / name}", *more)
        assert done.code == 0, done.err
        return tmp_path / name / "head"

    def shipped(head: Path, name: str) -> Path:
        done = call("export", "--head", head, *target, "--format", format, "--out", tmp_path / name,
                    "--prompts", place.prompts, *TEST)  # fmt: skip
        assert done.code == 0, done.err
        return tmp_path / name

    first, back = trained("first"), tmp_path / "back"
    done = call("import", shipped(first, "out"), *target, "--out", back)
    assert done.code == 0, done.err
    shown = ["--prompts", place.prompts, "--dtype", "float32", *TEST, "--max-new-tokens", 4]
    done = call("evaluate", "--head", back, *target, *shown, "--identity", 1, "--json")
    assert done.code == 0, done.err
    (cell,) = json.loads(done.out)["cells"]
    assert cell["records"]["head"]["identical"]["equal"] == 1
    second = trained("second", f"training.start={back}")
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert any(not after[name].equal(before[name]) for name in before)
    assert (shipped(second, "again") / "config.json").is_file()
