"""One evaluation as a whole, from folders: who is in the report, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target, tiny_tokenizer

from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head and a sibling of it, and prompts."""
    made = tmp_path_factory.mktemp("compare")
    tiny_target(num_layers=6).save_pretrained(made / "target")
    tiny_tokenizer().save_pretrained(made / "target")
    target = load_target(made / "target")
    settings = Eagle3Settings(draft_vocab_size=None, intermediate_size=64)
    settings.build(target.contract((2, 4, 5)), target.config, None).save_pretrained(made / "head")
    small = tiny_target(num_layers=2)
    Sibling.of(small, tiny_tokenizer(), target).save_pretrained(made / "sibling")
    prompts = [{"id": word, "category": "chat", "turns": [word]} for word in ("Hello", "Why?")]
    (made / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return made


def evaluated(folder: Path, *trees: str, head: bool = False, sibling: bool = False) -> Any:
    asked = Comparison(
        str(folder / "target"),
        "float32",
        head=folder / "head" if head else None,
        sibling=str(folder / "sibling") if sibling else None,
        prompts=(str(folder / "prompts.jsonl"),),
        trees=trees or ("chain:2",),
        identity=1,
        identity_tokens=8,
        settings=Settings(max_new_tokens=8),
    )
    return compare(asked)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["plain", "lookup"]),
        ({"head": True}, ["plain", "lookup", "head", "merged"]),
        ({"sibling": True}, ["plain", "lookup", "sibling", "merged"]),
        (
            {"head": True, "sibling": True},
            ["plain", "lookup", "head", "sibling", "merged"],
        ),
    ],
    ids=["neither", "head", "sibling", "both"],
)
def test_a_report_is_of_what_was_given(
    folder: Path, given: dict[str, bool], names: list[str]
) -> None:
    result = evaluated(folder, **given)
    assert list(result["records"]) == names
    assert all(r["identical"]["equal"] == 1 for r in result["records"].values() if "tau" in r)
    assert ("simulated_tau" in result) == ("head" in names)


def test_a_tree_without_nodes_is_plain_decoding_and_nothing_is_simulated(folder: Path) -> None:
    """Another chain's figure stands in, where there is one."""
    result = evaluated(folder, "static:", head=True)
    assert result["records"]["head"]["tau"] == 1.0
    assert "simulated_tau" not in result
    assert "simulated_tau" in evaluated(folder, "static:", "chain:2", head=True)
