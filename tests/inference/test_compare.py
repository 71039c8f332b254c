"""One evaluation as a whole, from folders: who is in the report, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny import tiny_target, tiny_tokenizer

from drafthead.data.conversations import Prompt
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference import compare as comparing
from drafthead.inference.compare import Comparison, _distinct, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.lineup import named
from drafthead.inference.sibling import Sibling
from drafthead.inference.summary import verdict
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
    prompts = [
        {"id": "hello", "category": "chat", "turns": ["Hello", "More?"]},
        {"question_id": 81, "category": "writing", "turns": ["Why?"], "reference": []},
        {"id": "hello", "turns": ["Warum?"], "language": "de"},
        {"id": "none", "turns": []},
    ]
    (made / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return made


def asked(folder: Path, *trees: str, **other: Any) -> Comparison:
    return Comparison(
        str(folder / "target"),
        "float32",
        prompts=(str(folder / "prompts.jsonl"),),
        trees=trees or ("chain:2",),
        **{"identity": 1, "identity_tokens": 8, "settings": Settings(max_new_tokens=8)} | other,
    )


def evaluated(folder: Path, *trees: str, head: bool = False, sibling: bool = False) -> Any:
    return compare(
        asked(
            folder,
            *trees,
            head=folder / "head" if head else None,
            sibling=str(folder / "sibling") if sibling else None,
        )
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["plain", "lookup"]),
        ({"head": True}, ["plain", "lookup", "head", "merged"]),
        ({"sibling": True}, ["plain", "lookup", "sibling", "merged"]),
        (
            {"head": True, "sibling": True},
            ["plain", "lookup", "head", "sibling", "merged head", "merged sibling"],
        ),
    ],
    ids=["neither", "head", "sibling", "both"],
)
def test_a_report_is_of_what_was_given(
    folder: Path, given: dict[str, bool], names: list[str]
) -> None:
    result = evaluated(folder, **given)
    (cell,) = result["cells"]
    assert (cell["temperature"], cell["batch"]) == (0, 1)
    assert list(cell["records"]) == names
    assert all(r["identical"]["equal"] == 1 for r in cell["records"].values() if "tau" in r)
    drafting = [name for name in names if name in ("head", "sibling")]
    assert list(result["simulated"]) == list(result["heads"]) == drafting
    assert all(told["agrees"] for told in result["simulated"].values())
    assert list(result["costs"]) == (["1"] if drafting else [])


def test_a_tree_without_nodes_is_plain_decoding_and_nothing_is_simulated(folder: Path) -> None:
    """Another chain's figure stands in, where there is one."""
    result = evaluated(folder, "static:", head=True)
    assert result["cells"][0]["records"]["head"]["tau"] == 1.0
    assert result["simulated"] == {}
    assert list(evaluated(folder, "static:", "chain:2", head=True)["simulated"]) == ["head chain:2"]


def test_a_grid_of_several_heads_that_is_stopped_anywhere_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    """As the run in one sitting, but for its seconds."""
    grid = asked(
        folder,
        head={"one": folder / "head", "two": folder / "head"},
        batches=(2, 1),
        repeats=2,
        settings=Settings(max_new_tokens=4),
    )
    whole = compare(grid, out=tmp_path / "whole")
    total = len(grid.cells) * whole["turns"]
    for moment in (total // 2, total):

        def stop(done: int, total: int, moment: int = moment) -> None:
            if done == moment:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compare(grid, out=tmp_path / "pieces", progress=stop)
    pieces = compare(grid, out=tmp_path / "pieces")
    assert pieces["sittings"] == 3
    assert whole["sittings"] == 1
    assert [(c["temperature"], c["batch"]) for c in whole["cells"]] == [(0.0, 2), (0.0, 1)]
    for ours, theirs in zip(whole["cells"], pieces["cells"], strict=True):
        merged = ["merged one", "merged two"]
        assert list(ours["records"]) == ["plain", "lookup", "one", "two", *merged]
        for name, record in ours["records"].items():
            other = theirs["records"][name]
            assert record["repeated"] == {"equal": 4, "of": 4} == other["repeated"]
            if name == "plain":
                continue
            assert all(record[key] == other[key] for key in ("tau", "tau_interval", "survival"))
            assert record["agreement"]["equal"] == 4
            assert record["identical"]["equal"] == 1
            assert list(record["by_category"]) == ["chat", "other", "writing"]
            assert record["by_language"]["de"]["prompts"] == 1
    assert whole["failed"] == []
    assert whole["skipped"] == {"no user turn": 1}
    assert (whole["prompts"], whole["turns"]) == (3, 4)
    check_files(tmp_path / "whole", whole)
    with pytest.raises(ValueError, match="begun with another repeats"):
        compare(replace(grid, repeats=1), out=tmp_path / "pieces")


def check_files(out: Path, result: dict[str, Any]) -> None:
    """The figures of evaluation.json, made again of the tables beside it."""
    assert json.loads((out / "evaluation.json").read_text()) == result
    assert (out / "report.html").is_file()
    rounds, answers = (
        pd.read_parquet(out / "rounds.parquet"),
        pd.read_parquet(out / "answers.parquet"),
    )
    assert set(answers["prompt"]) == {"hello", "81", "hello#2"}
    for cell in result["cells"]:
        r = rounds.query(f"temperature == {cell['temperature']} and batch == {cell['batch']}")
        of = {name: r[r.drafter == name] for name in cell["records"]}
        speed = {name: own.emitted.sum() / own.seconds.sum() for name, own in of.items()}
        for name, record in cell["records"].items():
            assert record["tokens_per_s"] == pytest.approx(speed[name])
            if name != "plain":
                assert record["tau"] == of[name].emitted.mean()
                assert record["speedup"] == pytest.approx(speed[name] / speed["plain"])
                deep = range(1, of[name].accepted.max() + 1)
                assert record["survival"] == [(of[name].accepted >= k).mean() for k in deep]


def test_no_prompt_that_can_be_answered_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"could be answered: prompt 'hello': .* context of 256"):
        compare(asked(folder, settings=Settings(max_new_tokens=255)))


def test_identity_is_of_prompts_that_fit(folder: Path, tmp_path: Path) -> None:
    """Nothing compared is no proof: a first prompt that is too long gives its place to the next."""
    rows = [{"id": "long", "turns": ["word " * 400]}, {"id": "fits", "turns": ["Why?"]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = compare(replace(asked(folder), prompts=(str(tmp_path / "p.jsonl"),)))
    same = result["cells"][0]["records"]["lookup"]["identical"]
    assert (same["equal"], same["of"]) == (1, 1)
    none = {"equal": 0, "of": 0, "tied": 0, "largest_gap": None, "tie": None, "dtype": "float32"}
    result["cells"][0]["records"]["lookup"]["identical"] = none
    assert verdict(result, None).kind == "unchecked"


def test_a_batch_that_prompts_cannot_fill_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="batch 4: there are 3 prompts"):
        compare(asked(folder, batches=(1, 4)))


def test_no_id_is_given_twice_even_where_one_looks_like_a_number() -> None:
    """Figures are by prompt: two prompts of one id would count as one."""
    prompts = [Prompt(name, "c", ["x"]) for name in ("a", "a#2", "a", "b", "a", "a#2", "a#3")]
    found = [prompt.id for prompt in _distinct(prompts)]
    assert len(set(found)) == len(found)
    assert found[:2] == ["a", "a#2"], "the first of each keeps its own"
    assert found[3] == "b"


def test_another_target_that_is_not_there_costs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a measurement for nothing, nor one that is lost when the name is put right."""
    out, wrong = tmp_path / "out", tmp_path / "typo"
    one = asked(folder, "chain:1", head=folder / "head", identity=0)
    with monkeypatch.context() as patched:
        patched.setattr(comparing, "models", lambda *a: pytest.fail("it was loaded"))
        for other, said in ((wrong, "no such folder"), (folder / "head", "model_type is")):
            with pytest.raises((ValueError, OSError), match=said):
                compare(replace(one, against=str(other)), out=out)
    compare(one, out=out)
    kept = (out / "journal.jsonl").read_text()
    result = compare(replace(one, against=str(folder / "target")), out=out)
    assert result["drift"]["lost"] == 0.0
    assert result["sittings"] == 2
    text = (out / "journal.jsonl").read_text()
    assert text.startswith(kept), "what was measured before is taken as it is"
    assert len(text.splitlines()) == len(kept.splitlines()) + 2, "a sitting and the drift"


def test_names_of_heads(tmp_path: Path) -> None:
    """One is called `head`; several as their folders, or as they are told."""
    (tmp_path / "mine" / "head").mkdir(parents=True)
    mine = str(tmp_path / "mine" / "head")
    assert named([mine], "head") == {"head": mine}
    assert named([f"x={mine}"], "head") == {"x": mine}
    assert named([mine, "reference"], "head") == {"mine": mine, "reference": "reference"}
    assert named([f"ours={mine}", "org/model"], "sibling") == {"ours": mine, "model": "org/model"}
    for wrong in ([mine, mine], ["plain=a", "b"], ["a=x", "a=y"]):
        with pytest.raises(ValueError, match="is taken; give each as NAME=FOLDER"):
            named(wrong, "head")
