"""What a model card is made from: licences, and files that are none or of another head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import REFERENCE, a_run, certified, evaluated, metadata_of
from huggingface_hub import constants
from ladder import ladder_head
from tiny import tiny_target

from drafthead.heads.card import RunFacts, card, licence_of, read_certificate, read_evaluation
from drafthead.heads.card_origin import KNOWN
from drafthead.heads.load import load_head

# Licences


def test_a_licence_is_the_targets_or_unknown_and_never_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    ladder_head("medusa", tiny_target()).save_pretrained(head)
    target.mkdir()
    found = metadata_of(card(head, target=target))
    assert (found["license"], found["license_name"]) == ("other", "unknown")
    assert "Not known." in card(head, target=target)
    terms = {"license": "llama3.1", "license_name": "community", "license_link": "LICENSE"}
    (target / "README.md").write_text(f"---\n{yaml.safe_dump(terms)}---\n# Target\n")
    found = metadata_of(card(head, target=target))
    assert {key: found[key] for key in terms} == terms
    assert metadata_of(card(head, target=target, licence="mit"))["license"] == "mit"
    assert metadata_of(card(head, target=target, licence="unknown"))["license"] == "other"
    with pytest.raises(ValueError, match=r"licence 'My own': give the id"):
        card(head, licence="My own")
    cached = tmp_path / "cache" / "models--org--base"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (target / "README.md").rename(cached / "snapshots" / "abc" / "README.md")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    found = metadata_of(card(head, base_model="org/base"))
    assert found["license"] == "llama3.1"
    link = "https://huggingface.co/org/base/blob/main/LICENSE"
    assert found["license_link"] == link, "this repository has no such file"
    assert licence_of("org/other") is None


def test_the_known_target_is_the_reference_heads() -> None:
    assert load_head(REFERENCE).contract.fingerprint in KNOWN


# Errors


def broken(change: str) -> Any:
    found = evaluated()
    record = found["cells"][0]["records"]["head"]
    match change:
        case "tau":
            record["tau"] = "high"
        case "survival":
            record["survival"] = [1.5]
        case "negative":
            record["by_category"]["coding"]["speedup"] = -1.0
        case "nothing":
            found["cells"] = []
        case "machine":
            del found["machine"]
        case "training":
            return {"step": 3, "simulated_tau": 1.5}
        case "list":
            return [found]
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("tau", r"cells\.0\.records\.head\.tau: Input should be a valid number"),
        ("survival", r"head\.survival\.0: Input should be less than or equal to 1"),
        ("negative", r"by_category\.coding\.speedup: Input should be greater"),
        ("nothing", r"cells: Tuple should have at least 1 item"),
        ("machine", r"machine: Field required"),
        ("training", r"the held-out figures of a training run"),
        ("list", r"is no JSON object"),
        ("torn", r"cannot be read as JSON"),
        ("gone", r"not there; give evaluation\.json or the folder"),
    ],
)
def test_an_odd_evaluation_is_an_error_of_one_line(change: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    if change != "gone":
        text = json.dumps(broken(change))
        path.write_text(text[: len(text) // 2] if change == "torn" else text)
    with pytest.raises(ValueError, match=told) as caught:
        read_evaluation(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_figures_of_another_head_are_refused(tmp_path: Path) -> None:
    ladder_head("medusa", tiny_target()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of 'head' \(eagle3\), and not of this medusa head"):
        card(tmp_path, evaluation=evaluated())
    with pytest.raises(ValueError, match=r"is of another head \(eagle3, for .* this one \(medusa"):
        card(tmp_path, certificate=certified())
    with pytest.raises(ValueError, match=r"the run trained a head of type 'eagle3'"):
        card(tmp_path, run=RunFacts.read(a_run(tmp_path / "run")))
    strange = certified()
    strange["head"]["fingerprint"] = "0" * 64
    with pytest.raises(ValueError, match="certify this one"):
        card(REFERENCE, certificate=strange)
    other = evaluated()
    other["heads"]["head"]["fingerprint"] = "0" * 64
    with pytest.raises(ValueError, match="evaluate this one"):
        card(REFERENCE, evaluation=other)
    twice = evaluated()
    twice["heads"]["again"] = twice["heads"]["head"]
    with pytest.raises(ValueError, match="say which of them"):
        card(REFERENCE, evaluation=twice)
    assert card(REFERENCE, evaluation=twice, name="head") == card(REFERENCE, evaluation=evaluated())
    with pytest.raises(ValueError, match="says that it passed, but a check did not"):
        card(REFERENCE, certificate=certified(passed=False) | {"passed": True})


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.yaml; give the folder of a training run"):
        RunFacts.read(tmp_path)
    (tmp_path / "config.yaml").write_text("head: [")
    with pytest.raises(ValueError, match=r"no settings of a training run") as caught:
        RunFacts.read(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.yaml").write_text("head: {type: eagle3}\ndata: {train: [x]}\n")
    with pytest.raises(ValueError, match=r"config\.yaml: .*data\.max_length: Field required"):
        RunFacts.read(tmp_path)
    run = a_run(tmp_path / "run", steps="many")
    with pytest.raises(ValueError, match=r"result\.json: steps: Input should be a valid integer"):
        RunFacts.read(run)
    (tmp_path / "certificate.json").write_text('{"passed": true}')
    with pytest.raises(ValueError, match=r"checks: Field required; .*`drafthead certify`"):
        read_certificate(tmp_path)
    with pytest.raises(ValueError, match=r"repository 'mine': give an id of the Hub"):
        card(REFERENCE, repo="mine")
