"""What is published of a head: the files of one, their records, and no trace of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_head, tiny_target

from drafthead.heads.publication import publication
from drafthead.heads.published import is_published, untraced


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "run" / "head"
    tiny_head(tiny_target()).save_pretrained(found)
    return found


def certificate(head: str) -> dict[str, Any]:
    """As `drafthead certify` writes it, of a head in this folder."""
    return {
        "passed": True,
        "checks": [{"name": "greedy text", "passed": True, "figure": "4 of 4 texts equal"}],
        "target": {"name": "unnamed llama", "folder": "/home/jo/.cache/a target", "adapted": False},
        "head": {"folder": head, "type": "eagle3"},
        "dtypes": {"exact": "float32", "serving": "bfloat16"},
        "rules": ["coupled"],
    }


def test_f71_only_a_heads_files_and_no_place_of_this_machine(folder: Path) -> None:
    for stray in ("training_args.bin", "metrics.jsonl", "notes.md", "model.pt"):
        (folder / stray).write_bytes(b"secret")
    (folder / "checkpoints").mkdir()
    (folder / "certificate.json").write_text(json.dumps(certificate(str(folder))))
    found = publication(folder, target="org/target", repo="org/head")
    assert set(found) == {"config.json", "model.safetensors", "README.md", "certificate.json"}
    assert all(map(is_published, found))
    texts = {n: c if isinstance(c, bytes) else c.read_bytes() for n, c in found.items()}
    for trace in (str(folder.parent), "/home/", "secret"):
        assert not [name for name, text in texts.items() if trace.encode() in text], trace
    told = json.loads(texts["certificate.json"])
    assert told["head"]["folder"] == "head"
    assert told["target"]["folder"] == "a target"
    assert publication(folder, target="org/target", repo="org/head") == found, "the same again"


def test_what_is_no_sound_head_or_of_another_one_is_not_published(folder: Path) -> None:
    other = certificate("x") | {"head": {"folder": "x", "type": "medusa"}}
    (folder.parent / "certificate.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"the certificate is of .*medusa"):
        publication(folder, certificate=folder.parent)
    with pytest.raises(ValueError, match=r"nowhere\.json: not there"):
        publication(folder, evaluation=folder / "nowhere.json")
    (folder / "tuning.json").write_text("{")
    with pytest.raises(ValueError, match=r"tuning\.json"):
        publication(folder)
    (folder / "tuning.json").write_text(
        '{"machine": {}, "dtype": "float32", "head": "0", "shapes": {"1": "chain:2"}}'
    )
    with pytest.raises(ValueError, match=r"was tuned with other weights; .*tuning\.json"):
        publication(folder)
    (folder / "tuning.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["contract"]["target"] = "/data/models/target"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: '/data/models/target' is a place on this"):
        publication(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        publication(folder)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/jo/runs/mine/head", "head"),
        ("~/runs/eval", "eval"),
        ("file:///home/jo/a b/c", "c"),
        (r"C:\Users\jo\head", "head"),
        ("C:/Users/jo/head", "head"),
        ("../../jo/runs/head", "head"),
        ("path:/home/jo/x and <./jo/y>", "path:x and <./jo/y>"),
        ("/mnt/my disk/target", "target"),
        ("not read: /a/b/p.jsonl:3 (id), then (/a/y).", "not read: p.jsonl:3 (id), then (y)."),
        ("hub:org/name", "hub:org/name"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("https://arxiv.org/abs/2503.01840", "https://arxiv.org/abs/2503.01840"),
        ("40 tokens/s and/or 3 /4", "40 tokens/s and/or 3 /4"),
        ("</think>", "</think>"),
        ("samples/test", "samples/test"),
    ],
)  # fmt: skip
def test_f71_paths_shrink_to_their_last_name_and_nothing_else_does(text: str, left: str) -> None:
    assert untraced({text: [text, 1, None]}) == {left: [left, 1, None]}


def test_files_of_one_name_are_both_counted() -> None:
    skipped = {"/a/p.jsonl": 1, "/b/p.jsonl": 2, "q": 3, "/c/p.jsonl": 4}
    assert untraced(skipped) == {"p.jsonl": 1, "p.jsonl (2)": 2, "q": 3, "p.jsonl (3)": 4}


def test_records_that_are_no_json_or_no_unicode(folder: Path) -> None:
    made = certificate(str(folder)) | {"seen": "\udcff"}
    (folder / "certificate.json").write_text(json.dumps(made))
    found = publication(folder)["certificate.json"]
    assert isinstance(found, bytes)
    assert json.loads(found)["seen"] == "?"
    (folder / "tuning.json").write_text('{"machine": {}, "dtype": "a", "shapes": {}, "x": NaN}')
    with pytest.raises(ValueError, match=r"tuning\.json: cannot be read as JSON \(it holds NaN"):
        publication(folder)


def test_what_lies_beside_a_head_stays_there(folder: Path) -> None:
    """A checkout of git, a copy of the weights, links and a folder in a record's place."""
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("url = https://me:hf_secret@huggingface.co/me/head")
    (folder / "head.safetensors").write_bytes(b"secret")
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to("../elsewhere")
    (folder / "evaluation.json").mkdir()
    assert set(publication(folder)) == {"config.json", "model.safetensors", "README.md"}
