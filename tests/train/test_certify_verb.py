"""`drafthead certify`: its files, its exit codes, and heads that adapt their target."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from command import Call, assert_one_line, write_prompts

from drafthead.heads.contract import LAST
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.medusa2 import Medusa2Settings
from drafthead.inference import certify, sampling, verify
from drafthead.inference.certificate_page import LIMITS, PROMISED
from drafthead.inference.target import load_target


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts: what is tested here is what is done with the checks."""
    size = partial(certify.Size, prompts=2, new_tokens=6, seed_tokens=3)
    monkeypatch.setattr(certify, "Size", size)


@pytest.fixture
def asked(target_folder: Path, tmp_path: Path) -> list[object]:
    """Options that name an untrained head, its target, and prompts."""
    torch.manual_seed(0)
    target = load_target(target_folder)
    settings = Eagle3Settings(draft_vocab_size=None, intermediate_size=64)
    head = settings.build(target.contract((1, 2, 3)), target.config, None)
    head.save_pretrained(tmp_path / "head")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    return ["--head", tmp_path / "head", "--target", target_folder, "--prompts", prompts]


def test_a_certificate_is_printed_and_written(
    asked: list[object], call: Call, tmp_path: Path
) -> None:
    """The serving dtype is checked beside the exact one; nothing of the page is elsewhere."""
    out = tmp_path / "made" / "here"
    options = ["--dtype", "float32", "--rule", "rejection", "--draws", 500, "--json"]
    done = call("certify", *asked, *options, "--out", out)
    assert done.code == 0, done
    printed = json.loads(done.out)
    assert printed == json.loads((out / "certificate.json").read_text())
    assert printed["passed"] is True
    assert printed["dtypes"] == {"exact": "float64", "serving": "float32"}
    checks = printed["checks"]
    assert all(c.keys() == {"name", "passed", "figure", "detail"} for c in checks)
    names = [c["name"] for c in checks]
    assert len(set(names)) == len(names) == 11
    assert sum(name.startswith("control: ") for name in names) == 5
    page = (out / "certificate.html").read_text()
    shown = html.unescape(page)
    for text in (*PROMISED, *LIMITS, "Passed: all 11 checks.", *names):
        assert text in shown
    assert not re.search(r"https?://|<script|<link|src=", page)
    assert "prefers-color-scheme: dark" in page
    assert {p.name for p in out.iterdir()} == {"certificate.json", "certificate.html"}


def test_a_broken_decoder_is_not_certified(
    asked: list[object], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and the lines say what failed."""

    def wrong(tokens: Sequence[int], parents: Sequence[int], choice_after):  # type: ignore[no-untyped-def]
        path, token = verify.walk(tokens, parents, choice_after)
        return path, choice_after(path[:-1]) if path else token

    monkeypatch.setattr(sampling, "walk", wrong)
    done = call(
        *["certify", *asked, "--dtype", "float64", "--rule", "coupled", "--draws", 500],
        *["--out", tmp_path / "out"],
    )
    assert done.code == 1, done
    assert re.search(r"^FAILED  greedy text: \d+ of \d+ texts equal, largest gap", done.out, re.M)
    assert re.search(r"^passed  store after rounds", done.out, re.M)
    assert re.search(r"^not passed: \d+ of \d+ checks failed", done.out, re.M)
    assert "Not passed" in (tmp_path / "out" / "certificate.html").read_text()
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["passed"] is False


def test_a_head_that_adapts_its_target_is_certified_against_the_adapted_one(
    target_folder: Path, call: Call, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target = load_target(target_folder)
    settings = Medusa2Settings(
        unroll_steps=2, draft_vocab_size=256, lora_rank=2, lora_targets=("q_proj", "v_proj")
    )
    head = settings.build(target.contract((LAST,)), target.config, torch.arange(0, 512, 2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.2)
    head.save_pretrained(tmp_path / "head")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    asked = ["--head", tmp_path / "head", "--target", target_folder, "--prompts", prompts]
    options = ["--dtype", "float64", "--rule", "coupled", "--draws", 500, "--json"]
    done = call("certify", *asked, *options)
    assert done.code == 0, done
    told = json.loads(done.out)["target"]
    assert told["adapted"] is True
    assert told["name"].endswith(" as adapted by the head")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--lossy"], ["--lossy", "nothing to certify"]),
        (["--rule", "typical"], ["rule 'typical' is lossy", "coupled, rejection, block"]),
        (["--rule", "best"], ["rule 'best'", "coupled, rejection, block"]),
        (["--dtype", "int8"], ["--dtype 'int8'"]),
        (["--out", "{file}"], ["is a file", "name a folder"]),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(
    options: list[str], parts: list[str], call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "taken"
    file.touch()
    given = [option.format(file=file) for option in options]
    assert_one_line(call("certify", "--head", "nowhere", *given), parts)
