"""The model card: its figures are the evaluation's, its metadata the Hub's, its code runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import REFERENCE, a_run, certified, evaluated, metadata_of
from evaluations import hostile
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from ladder import REDUCED, ladder_head
from tiny import tiny_target
from tiny_runs import write_target

from drafthead.heads.card import RunFacts, card, read_evaluation
from drafthead.heads.contract import LAST, describe
from drafthead.heads.layouts.layout import LayoutError, layout_of
from drafthead.heads.medusa2 import Medusa2Settings
from drafthead.heads.published import places
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.target import load_target

MERGED = "head and lookup merged"
NAMES = {"lookup": "prompt lookup alone", "merged": MERGED, "merged mine": MERGED}

FLAGS: dict[str, dict[str, str]] = {
    "block": {},
    "block-dflash": {"vllm": "", "sglang": ""},
    "eagle-hass": {"sglang": ""},
    "hydra++": {},
    "medusa": {"vllm": " --whole-vocabulary"},
}
"""By kind of head and format, what its export asks for beside; not in it: not loaded there."""

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a head of it, and a real evaluation of the head beside another one."""
    folder = tmp_path_factory.mktemp("card")
    write_target(folder / "tiny", tiny_target())
    model: Any = load_target(folder / "tiny").model
    for name, kind in (("mine", "eagle3"), ("other", "eagle3-whole")):
        ladder_head(kind, model).save_pretrained(folder / name)
    rows = [
        {"id": "a", "category": "chat|room", "turns": ["Hello there"], "language": "en"},
        {"id": "b", "category": "writing", "turns": ["Write of the sea"], "language": "en"},
        {"id": "c", "category": "writing", "turns": ["Warum?"], "language": "de"},
        {"id": "none", "turns": []},
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = compare(
        Comparison(
            str(folder / "tiny"),
            "float32",
            {"mine": folder / "mine", "other": folder / "other"},
            prompts=(str(folder / "asked.jsonl"),),
            trees=("chain:2", "tree:2x2:4"),
            settings=Settings(max_new_tokens=8),
            temperatures=(0.0, 1.0),
            identity=0,
        )
    )
    (folder / "evaluation.json").write_text(json.dumps(found))
    return folder


def tables(text: str) -> Iterator[tuple[str, Rows]]:
    """Heading and rows of each table, as the grammar of Markdown's tables has them."""
    heading, rows, header = "", [], None
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line.strip("|\n"))]
            if header is None:
                header = cells
            elif set("".join(cells)) - set("- "):
                assert len(cells) == len(header), line
                numbered = [f"{n} {header[:i].count(n)}" for i, n in enumerate(header)]
                rows.append(dict(zip(numbered, cells, strict=True)))
        elif header is not None:
            yield heading, rows
            rows, header = [], None


def near(shown: str, value: float, digits: int = 2) -> bool:
    return shown == f"{value:.{digits}f}"


def interval(shown: str, ends: list[float] | None) -> bool:
    return shown == ("–" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}")


# Figures


def test_every_figure_is_the_evaluations(measured: Path) -> None:
    evaluation = read_evaluation(measured)
    text = card(measured / "mine", evaluation=evaluation)
    check_figures(text, evaluation, "mine", rows=2 * 5)
    assert "1 row of the files could not be used as prompts" in text
    assert all(r.dataset_name == "asked.jsonl" for r in ModelCard(text).data.eval_results)


def test_every_figure_of_several_batches_is_the_evaluations() -> None:
    check_figures(card(REFERENCE, evaluation=evaluated()), evaluated(), "head", rows=6 * 4)


def check_figures(text: str, evaluation: dict[str, Any], name: str, rows: int) -> None:
    """All of the card's figures of the head that the evaluation calls so."""
    found = dict(tables(text))
    speeds = found.pop("Measured")
    wanted = {
        (f"{c['temperature']:g}", str(c["batch"]), NAMES.get(n, n.replace(name, "head"))): record
        for c in evaluation["cells"]
        for n, record in c["records"].items()
        if "other" not in n
    }
    assert len(wanted) == rows
    assert [(r["temperature 0"], r["batch 0"], r["drafter 0"]) for r in speeds] == list(wanted)
    for row, record in zip(speeds, wanted.values(), strict=True):
        assert near(row["tau 0"], record.get("tau", 1.0))
        assert interval(row["95 % 0"], record.get("tau_interval"))
        assert near(row["speed-up 0"], record.get("speedup", 1.0))
        assert interval(row["95 % 1"], record.get("speedup_interval"))
        assert near(row["by CPU time 0"], record.get("cpu_speedup", 1.0))
        assert near(row["tokens/s 0"], record["tokens_per_s"], 1)
    headings = 0
    for temperature in (0.0, 1.0):
        cell = next(c for c in evaluation["cells"] if c["temperature"] == temperature)
        shape, record = fastest(cell, name)
        headings += 3 if record["survival"] else 2
        several = "" if shape == "head" else f", {shape}"
        check_details(found, record, f"(temperature {temperature:g}, batch 1{several})")
    assert len([heading for heading in found if heading.startswith("By ")]) == headings
    _, top = fastest(evaluation["cells"][0], name)
    assert f"{top['tau']:.2f} tokens a pass and {top['speedup']:.2f} times the speed" in text
    check_index(text, evaluation, name)


def fastest(cell: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    shapes = {n.replace(name, "head"): r for n, r in cell["records"].items() if n.startswith(name)}
    return max(shapes.items(), key=lambda item: float(item[1]["speedup"]))


def check_details(found: dict[str, Rows], record: dict[str, Any], where: str) -> None:
    for by in ("category", "language"):
        rows = found[f"By {by} {where}"]
        groups = record[f"by_{by}"]
        assert [r[f"{by} 0"].replace("\\|", "|") for r in rows] == list(groups)
        for row, group in zip(rows, groups.values(), strict=True):
            several = group["prompts"] > 1
            assert row["prompts 0"] == str(group["prompts"])
            assert near(row["tau 0"], group["tau"])
            assert interval(row["95 % 0"], group["tau_interval"] if several else None)
            assert near(row["speed-up 0"], group["speedup"])
            assert interval(row["95 % 1"], group["speedup_interval"] if several else None)
    rows = found.get(f"By depth {where}", [])
    assert len(rows) == len(record["survival"])
    for k, row in enumerate(rows):
        assert row["depth 0"] == str(k + 1)
        for place, key in enumerate(("survival", "conditional")):
            assert near(row[f"{key} 0"], record[key][k], 3)
            assert interval(row[f"95 % {place}"], record[f"{key}_interval"][k])


def check_index(text: str, evaluation: dict[str, Any], name: str) -> None:
    """What the Hub reads are the fastest shape's figures in each cell."""
    _, results = model_index_to_eval_results(ModelCard(text).data.to_dict()["model-index"])
    assert len(results) == 2 * len(evaluation["cells"])
    for cell in evaluation["cells"]:
        place = f"temperature {cell['temperature']:g}, batch {cell['batch']}"
        _, best = fastest(cell, name)
        values = {r.metric_type: r for r in results if r.dataset_config == place}
        for key in ("tau", "speedup"):
            assert values[key].metric_value == round(best[key], 3)
            ends = [round(end, 3) for end in best[f"{key}_interval"]]
            assert values[key].metric_args == {"interval_95": ends}


def test_the_metadata_are_read_by_the_hubs_client(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    run = RunFacts.read(a_run(tmp_path / "run"))
    path.write_text(card(REFERENCE, evaluation=evaluated(), run=run, repo="me/my-head"))
    found = metadata_load(path)
    assert {key: found[key] for key in list(found)[:5]} == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "adapter",
        "library_name": "drafthead",
        "pipeline_tag": "text-generation",
        "tags": ["drafthead", "speculative-decoding", "draft-head", "eagle3"],
    }
    assert (found["license"], found["datasets"]) == ("apache-2.0", ["org/chats"])
    assert sorted(found["language"]) == ["de", "en"]
    read = ModelCard.load(path)
    assert read.data.model_name == "my-head"
    assert len(read.data.eval_results) == 12
    assert "drafthead pull me/my-head --out my-head" in read.text
    assert 'load_head(fetched("hub:me/my-head")' in read.text


# What there is to say


@pytest.mark.parametrize("kind", FLAGS)
def test_each_kind_of_head(kind: str, tmp_path: Path) -> None:
    papers = {"block": "2607.05147", "block-dflash": "2602.06036", "eagle-hass": "2408.15766",
              "hydra++": "2402.05109", "medusa": "2401.10774"}  # fmt: skip
    head = ladder_head(kind, tiny_target())
    head.save_pretrained(tmp_path)
    text = card(tmp_path)
    assert f"(https://arxiv.org/abs/{papers[kind]})" in text
    size = head.config.draft_vocab_size
    vocabulary = f"{size} of 512 tokens" if head.reduced else "all 512"
    assert f"| draft vocabulary | {vocabulary} |" in text
    assert f"| weights of the head | {sum(p.numel() for p in head.parameters()):,} in" in text
    for format, engine in (("vllm", "vLLM"), ("sglang", "SGLang")):
        flag = FLAGS[kind].get(format)
        if flag is None:
            assert f"**{engine}**: not loaded there (" in text
            with pytest.raises(LayoutError):
                layout_of(format, head)
        else:
            assert f"--format {format}{flag} --out exported-{format}" in text
            assert re.search(rf"\*\*{engine} [\d.]+\*\* loads an export", text)


def test_a_head_that_changes_its_target_says_so(tmp_path: Path) -> None:
    target = tiny_target()
    settings = Medusa2Settings(draft_vocab_size=len(REDUCED))
    contract = describe(target, None, (LAST,), {})
    settings.build(contract, target.config, REDUCED).save_pretrained(tmp_path)
    text = card(tmp_path)
    assert "is that of the target **as adapted by this head**" in text
    assert "the text is the target's as this head adapts it" in text
    assert "- It changes the target in memory" in text
    assert "changes the target" not in card(REFERENCE)


def test_what_is_missing_is_said() -> None:
    text = card(REFERENCE)
    assert text.count(" loads an export:") == 2
    for line in (
        "Nothing is measured here: no evaluation was given",
        "No certificate was given",
        "No training run was given: the data are not known",
        "Not known to this card: give the folder of the run.",
    ):
        assert text.count(line) == 1
    assert "model-index" not in metadata_of(text)
    assert "language" not in metadata_of(text)


def test_a_run_is_told_as_it_went(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    text = card(REFERENCE, run=RunFacts.beside(run / "head"))
    assert "2,767 steps over 1,985,406 token positions, 68.0 minutes" in text
    assert "Held-out simulated tau 1.560 at step 2,600." in text
    assert "decoded tau 1.512, simulated 1.498 on the same texts; they agree" in text
    assert "[org/chats](https://huggingface.co/datasets/org/chats)" in text
    assert " on CPU (2 cores)." in text
    assert RunFacts.beside(REFERENCE) is None
    assert "start: first" in text
    (run / "result.json").unlink()
    assert "left no result.json" in card(REFERENCE, run=RunFacts.read(run))


def test_how_answers_were_made_is_read_from_their_rows(tmp_path: Path) -> None:
    made = {"target": "/models/Tiny", "temperature": 0.7, "top_p": 1.0, "seed": 0}
    (tmp_path / "made.jsonl").write_text(json.dumps({"messages": [], "made": made}) + "\n")
    config = {"data": {"train": [str(tmp_path / "made.jsonl")], "max_length": 64},
              "head": {"type": "eagle3", "unroll_steps": 3}, "training": {}, "schedule": {},
              "optimiser": {"lr": 1e-3}}  # fmt: skip
    config["schedule"] = {"kind": "cosine"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = card(REFERENCE, run=RunFacts.read(tmp_path))
    assert "`made.jsonl`: answered by Tiny (temperature 0.7, top p 1.0, seed 0)" in text


def test_a_certificate_is_told_whatever_it_says() -> None:
    assert "**Certificate: passed**, all 2 checks" in card(REFERENCE, certificate=certified())
    text = card(REFERENCE, certificate=certified(passed=False))
    assert "**Certificate: NOT passed**: 1 of 2 checks failed (law of samples)" in text
    assert "| law of samples | FAILED | 0.41 |" in text


def test_lossy_figures_are_marked() -> None:
    lossy = evaluated() | {"lossy": True}
    lossy["settings"] = {"rule": "typical"}
    assert "the text is not the target's own.**" in card(REFERENCE, evaluation=lossy)
    assert "lossy" not in card(REFERENCE, evaluation=evaluated())


def test_the_code_of_a_card_runs(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "tiny").symlink_to(measured / "tiny")
    (tmp_path / "tiny-eagle3").symlink_to(measured / "mine")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", card(measured / "mine"), flags=re.DOTALL)
    exec(compile(code.replace("max_new_tokens=128", "max_new_tokens=8"), "card", "exec"), {})
    assert capsys.readouterr().out.strip()


# What must not be in it


def test_f71_no_path_user_or_host_is_in_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "alice")
    run = RunFacts.read(a_run(tmp_path / "run"))
    text = card(REFERENCE, evaluation=evaluated(), certificate=certified(), run=run)
    for leak in ("alice", "/home", "/root", str(tmp_path), str(Path.cwd()), str(Path.home())):
        assert leak not in text
    assert not list(places(text))  # nothing that publishing would have to take out
    assert "`own.jsonl`" in text


def test_text_that_others_chose_breaks_nothing() -> None:
    evaluation = hostile()
    (name,) = evaluation["heads"]
    seen = evaluated()["heads"]["head"]
    evaluation["heads"][name] = seen
    for cell in evaluation["cells"]:
        cell["records"][name] = cell["records"].pop("head")
    text = card(REFERENCE, evaluation=evaluation)
    assert len(list(tables(text))) >= 4  # each row has as many cells as its header
    assert "<script" not in text.replace("<details><summary>", "")
    assert max(len(line) for line in text.splitlines()) < 900
