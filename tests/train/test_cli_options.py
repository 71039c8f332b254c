"""Options of the command beside a head: a sibling, no drafter at all, rules, and idle settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import Call, Place, assert_one_line, write_prompts

from drafthead.train.options import template_arguments
from drafthead.train.terminal import bars

QUESTION = "What is the capital of France?"


@pytest.fixture
def evaluate(place: Place) -> list[object]:
    command: list[object] = ["evaluate", "--target", place.target, "--dtype", "float32"]
    return [*command, "--prompts", place.prompts, "--limit", 2, "--max-new-tokens", 6]


@pytest.fixture
def generate(place: Place) -> list[object]:
    command: list[object] = ["generate", "--target", place.target, "--dtype", "float32"]
    return [*command, "--prompt", QUESTION, "--max-new-tokens", 12]


def test_evaluate_without_head_and_sibling_measures_lookup_and_says_so(
    evaluate: list[object], call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "result"
    done = call(*evaluate, "--identity", 1, "--json", "--profile", "--by", "category", "--out", out)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert json.loads((out / "evaluation.json").read_text()) == result
    records = result["cells"][0]["records"]
    assert list(records) == ["plain", "lookup"]
    assert records["lookup"]["identical"]["equal"] == 1
    assert "no --head and no --sibling: only prompt lookup drafts\n" in done.err
    assert "ms of a round" in done.err, "the heading stays on one line where nothing is narrow"
    told = call(*evaluate, "--identity", 0, "--tree", "tree:2x2:4").err
    assert "only prompt lookup drafts; --tree has no effect\n" in told


def test_what_nothing_drafts_or_temperature_0_leaves_without_effect_is_told(
    place: Place, generate: list[object], call: Call
) -> None:
    plain = call(*generate)
    assert "effect" not in plain.err
    idle = call(*generate, "--head", place.head, "--rule", "block", "--top-p", 0.5, "--seed", 1)
    assert idle.err.startswith("--rule block, --top-p, --seed: no effect at temperature 0\n")
    assert idle.out == plain.out
    warm = call(*generate, "--head", place.head, "--rule", "block", "--temperature", 1)
    assert "effect" not in warm.err
    alone = call(*generate, "--rule", "typical", "--lossy", "--tree", "tree:2x2:4")
    assert alone.err.startswith("no --head and no --sibling: --tree, --rule and --lossy have no")
    assert "; lossy" not in alone.err
    assert alone.out == plain.out


def test_a_lossy_rule_is_asked_for_and_marked_in_every_output(
    place: Place, generate: list[object], evaluate: list[object], call: Call
) -> None:
    typical: list[object] = ["--head", place.head, "--rule", "typical"]
    assert_one_line(call(*generate, *typical), ["'typical'", "ask for it with --lossy"])
    assert_one_line(call(*generate, "--lossy"), ["'coupled' is exact", "leave --lossy out"])
    assert "; lossy: not the target's own text" in call(*generate, *typical, "--lossy").err
    assert json.loads(call(*generate, *typical, "--lossy", "--json").out)["lossy"] is True
    assert json.loads(call(*generate, "--json").out)["lossy"] is False
    done = call(*evaluate, *typical, "--lossy")
    assert "head (lossy)" in done.out
    assert "lossy: rule 'typical' accepts" in done.err


def test_a_sibling_drafts_the_targets_own_text(
    place: Place, generate: list[object], evaluate: list[object], call: Call
) -> None:
    """The target itself is a sibling of which every draft is kept."""
    drafted = json.loads(call(*generate, "--sibling", place.target, "--json").out)
    plain = json.loads(call(*generate, "--json").out)
    assert drafted["text"] == plain["text"]
    assert drafted["tau"] > 2 > plain["tau"] == 1
    both: list[object] = ["--head", place.head, "--sibling", place.target]
    assert_one_line(call(*generate, *both), ["--head and --sibling", "give one"])
    result = json.loads(call(*evaluate, *both, "--identity", 1, "--json").out)
    records = result["cells"][0]["records"]
    merged = ["merged head", "merged sibling"]
    assert list(records) == ["plain", "lookup", "head", "sibling", *merged]
    assert all(r["identical"]["equal"] == 1 for n, r in records.items() if n != "plain")
    bare = json.loads(call(*evaluate, *both, "--no-lookup", "--identity", 1, "--json").out)
    (alone,) = (cell["records"] for cell in bare["cells"])
    assert list(alone) == ["plain", "head", "sibling"]
    assert alone["head"]["tau"] == records["head"]["tau"]
    assert_one_line(call(*evaluate, "--no-lookup"), ["nothing drafts", "--head or --sibling"])


def test_template_arguments_are_read_one_by_one_or_together() -> None:
    assert template_arguments("--compare", ["enable_thinking=false", "level=high", "n=3"]) == {
        "enable_thinking": False,
        "level": "high",
        "n": 3,
    }
    assert template_arguments("--compare", ['{"enable_thinking": false}', "a=b=c"]) == {
        "enable_thinking": False,
        "a": "b=c",
    }
    for wrong in ("thinking", '{"a": ', "=1", "no name=1"):
        with pytest.raises(ValueError, match="--compare"):
            template_arguments("--compare", [wrong])


def test_what_libraries_print_at_work_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as DeepSpeed in every process: `--json` can be piped on."""
    with bars():
        sys.stdout.write("built successfully\n")
    sys.stdout.write("the result\n")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("the result\n", "built successfully\n")


def test_heads_are_named_and_a_grid_is_shown_cell_by_cell(
    place: Place, call: Call, tmp_path: Path
) -> None:
    """What fails is told; the rest of the run is not lost."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "endless", "turns": ["word " * 400]}) + "\n")
    told = ["evaluate", "--target", place.target, "--dtype", "float32", "--max-new-tokens", 4]
    heads = ["--head", f"one={place.head}", "--head", f"two={place.head}"]
    grid = ["--batch", 1, "--batch", 2, "--identity", 0, "--tree", "chain:1"]
    done = call(*told, *heads, *grid, "--prompts", prompts)
    assert done.code == 0, done.err
    rows = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert rows == ["plain", "lookup", "one", "two", "merged one", "merged two"] * 2
    assert all(f"temperature 0, batch {batch}" in done.out for batch in (1, 2))
    assert done.err.count("failed: prompt 'endless', turn 1: prompt of") == 1
