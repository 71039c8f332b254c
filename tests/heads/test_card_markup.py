"""A card rendered: names that others chose are text in it, and each keeps its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cards import REFERENCE, a_run, certified, evaluated
from markdown_it import MarkdownIt
from markdown_it.token import Token

from drafthead.heads.card import RunFacts, card, read_evaluation
from drafthead.heads.card_engines import engines
from drafthead.heads.load import load_head

NAMES = {
    "a|b": "a|b",
    "a\\|b": "a\\|b",
    "two\nlines": "two lines",
    "<img src=x onerror=y>": "<img src=x onerror=y>",
    "{{ 7*7 }}{% raw %}": "{{ 7*7 }}{% raw %}",
    "![seen](https://example.org/x.png)": "![seen](https://example.org/x.png)",
    "[here](javascript:x)": "[here](javascript:x)",
    "```": "'''",
    "</details>": "</details>",
    "---": "---",
    "n" * 200 + "1": "n" * 79 + "…",
    "n" * 200 + "2": "n" * 79 + "…",
    "\ud800": "?",
}
"""What a category may be called, and how a reader sees it."""


def rendered(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text.split("---\n", 2)[2])


def rows(tokens: list[Token]) -> Iterator[list[str]]:
    """The cells of each row of each table, as they are seen."""
    found: list[str] = []
    for token, inner in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "tr_open":
            found = []
        if token.type in ("td_open", "th_open") and inner is not None:
            found.append("".join(part.content for part in inner.children or ()))
        if token.type == "tr_close":
            yield found


def odd() -> dict[str, Any]:
    """An evaluation in which each category has another number of prompts."""
    found = evaluated()
    for cell in found["cells"]:
        for record in cell["records"].values():
            if "by_category" in record:
                one = record["by_category"]["coding"]
                record["by_category"] = {
                    name: one | {"prompts": 100 + i} for i, name in enumerate(NAMES)
                }
    return found


def test_names_are_text_and_each_has_its_row(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(odd()))
    run = RunFacts.read(a_run(tmp_path / "run"))
    text = card(
        REFERENCE,
        evaluation=read_evaluation(tmp_path),
        certificate=certified(),
        run=run,
        repo="me/x",
    )
    tokens = rendered(text)
    wanted = [[name, str(100 + i)] for i, name in enumerate(NAMES.values())]
    found = [row[:2] for row in rows(tokens) if len(row) == 6 and row[1].startswith("1")]
    assert found == wanted * 2, "one place for each of two temperatures"
    inline = [part for token in tokens for part in token.children or ()]
    assert not any(part.type in ("image", "html_inline") for part in inline)
    addresses = {str(part.attrs["href"]) for part in inline if part.type == "link_open"}
    assert all(a.startswith(("https://huggingface.co/", "https://arxiv.org/")) for a in addresses)
    html = [t.content.strip() for t in tokens if t.type == "html_block"]
    assert html.count("</details>") == sum("<details>" in block for block in html) == 2
    fences = [token.info for token in tokens if token.type == "fence"]
    assert fences == ["bash", "yaml", "python", "bash", "bash"]


def test_a_long_name_of_a_head_finds_its_records() -> None:
    found, name = evaluated(), "h" * 120
    found["heads"] = {name: found["heads"]["head"]}
    for cell in found["cells"]:
        cell["records"] = {n.replace("head", name): r for n, r in cell["records"].items()}
    found["simulated"] = {name: found["simulated"]["head"]}
    assert card(REFERENCE, evaluation=found) == card(REFERENCE, evaluation=evaluated())
    assert card(REFERENCE, evaluation=found, name=name) == card(REFERENCE, evaluation=found)


def test_figures_that_are_none_are_refused(tmp_path: Path) -> None:
    found = evaluated()
    found["cells"][0]["records"]["head"]["cut"] = float("nan")
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"evaluation\.json: cannot be read .*holds NaN"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize("target", ["m", "vllm", "sglang", "my target"])
def test_a_launch_names_the_target_once(target: str) -> None:
    head = load_head(REFERENCE)
    contract = head.config.contract | {"target": target}
    head.config.contract = contract
    head = type(head)(head.config)
    vllm, sglang = engines(head, "x", "y", "'models/it'")
    assert vllm.serve.startswith("vllm serve 'models/it' --speculative-config")
    assert sglang.serve.startswith("python -m sglang.launch_server --model-path 'models/it' --spec")


def test_a_run_is_that_of_its_own_head_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert RunFacts.beside(run / "head") == RunFacts.read(run)
    (run / "another").mkdir()
    assert RunFacts.beside(run / "another") is None
    made = {"target": "Tiny", "temperature": None, "top_p": "<b>"}
    (tmp_path / "odd.jsonl").write_text(json.dumps({"made": made}) + "\n")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("/home/alice/answers.jsonl", str(tmp_path / "odd.jsonl"))
    )
    text = card(REFERENCE, run=RunFacts.read(run))
    assert "`odd.jsonl`: answered by Tiny (top p &lt;b>)" in text
