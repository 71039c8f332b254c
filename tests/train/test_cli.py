"""The command as a user meets it: help, results on standard output, Ctrl-C, and the demo.

Processes are started where that proves something (streams, signals, the noise of libraries); the
rest calls the same entry point in this process.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from command import COMMAND, NOISE, Call, Done, Place, assert_one_line, write_prompts
from tiny import CORPUS
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafthead.data.conversations import read_conversations
from drafthead.heads import load_head
from drafthead.train.cli import app

VERBS = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
QUESTION = "What is the capital of France?"


def greedy_text(target: Path, prompt: str, new_tokens: int) -> str:
    """What transformers itself answers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


# Help


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, call: Call) -> None:
    done = call(verb, "--help")
    text = " ".join(done.out.split())
    assert done.code == 0
    assert f"Usage: drafthead {verb}" in text
    assert f"Example: drafthead {verb}" in text
    assert done.err == ""


def test_the_bare_command_shows_its_verbs(call: Call) -> None:
    done = call()
    assert done.code == 0
    assert all(verb in done.out for verb in VERBS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--bogus"], "--bogus; see drafthead train --help"),
        (["bogus"], "'bogus'; see drafthead --help"),
        (["train"], "'--config'; see drafthead train --help"),
        (["generate", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "--seed", "often"], "--seed"),
    ],
)
def test_an_unknown_or_wrong_option_is_one_line(
    arguments: list[str], said: str, call: Call
) -> None:
    done = call(*arguments)
    assert_one_line(done, [said])


# Results


def test_train_writes_a_head_and_nothing_but_its_result_on_standard_output(place: Place) -> None:
    result = json.loads(place.train.stdout)
    assert result["head"] == str(place.head)
    assert result["steps"] == 4
    assert result["simulated_tau"] >= 1
    assert load_head(place.head).contract.target == place.target.name
    assert "20 rows" in place.train.stderr
    assert not NOISE.search(place.train.stderr), place.train.stderr


@pytest.mark.slow
def test_evaluate_prints_its_records_and_nothing_else(place: Place, tmp_path: Path) -> None:
    command = ["evaluate", "--head", place.head, "--target", place.target, "--json"]
    command += ["--prompts", place.prompts, "--max-new-tokens", "8", "--dtype", "float32"]
    command += ["--identity", "3", "--out", tmp_path / "new" / "result"]
    done = subprocess.run(
        [*COMMAND, *map(str, command)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not NOISE.search(done.stderr), done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "new" / "result" / "evaluation.json").read_text()) == result
    files = {"journal.jsonl", "rounds.parquet", "answers.parquet", "report.html"}
    assert all((tmp_path / "new" / "result" / name).is_file() for name in files)
    (cell,) = result["cells"]
    assert list(cell["records"]) == ["plain", "lookup", "head", "merged"]
    assert result["prompts"] == 4
    assert result["new_tokens"] == 8
    assert result["trees"] == ["chain:3"]
    assert result["target"]["dtype"] == "float32"
    assert result["simulated"]["head"]["agrees"]
    assert {"settings", "sample", "versions", "machine", "costs"} <= result.keys()
    for name, record in cell["records"].items():
        assert record["tokens_per_s"] > 0
        assert {"draft", "verify", "accept", "commit", "other"} == record["round_ms"].keys()
        if name == "plain":
            continue
        assert 1 <= record["tau_interval"][0] <= record["tau"] <= record["tau_interval"][1]
        assert record["speedup"] > 0
        assert record["cpu_speedup"] > 0
        assert {"survival", "conditional", "cut", "rounds", "by_source"} <= record.keys()
        assert record["by_category"].keys() == {"a", "b"}
        same = record["identical"]
        assert (same["equal"] + same["tied"], same["of"], same["dtype"]) == (3, 3, "float32")


def test_evaluate_without_json_prints_its_table_one_row_per_tree(place: Place, call: Call) -> None:
    done = call(
        *("evaluate", "--head", place.head, "--target", place.target, "--dtype", "float32"),
        *("--prompts", place.prompts, "--limit", 2, "--max-new-tokens", 6, "--identity", 0),
        *("--tree", "chain:2", "--tree", "tree:2x2:4"),
    )
    assert done.code == 0, done.err
    rows = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert rows == ["plain", "lookup", "head chain:2", "head tree:2x2:4", "merged"]


@pytest.mark.slow
def test_generate_streams_to_a_pipe_the_very_text_of_plain_decoding(
    place: Place, call: Call
) -> None:
    told = ["generate", "--target", str(place.target), "--dtype", "float32"]
    told += ["--max-new-tokens", "30"]
    drafted = [*told, "--head", str(place.head), "--tree", "tree:3x2:5"]
    piped = subprocess.run(
        [*COMMAND, *drafted], input=QUESTION + "\n", capture_output=True, text=True, timeout=300
    )
    text = greedy_text(place.target, QUESTION, 30)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == text + "\n"
    assert "tokens per round" in piped.stderr
    assert not NOISE.search(piped.stderr), piped.stderr
    assert call(*told, "--prompt", QUESTION).out == text + "\n"
    for arguments in (drafted, told):
        result = json.loads(call(*arguments, "--json", stdin=QUESTION).out)
        assert result["text"] == text
        assert result["new_tokens"] == 30
        assert result["tau"] >= 1
        assert result["tokens_per_s"] > 0


def test_a_seed_gives_the_same_text_with_a_head_and_without(place: Place, call: Call) -> None:
    told = ["generate", "--target", place.target, "--dtype", "float32", "--prompt", QUESTION]
    told += ["--max-new-tokens", 20, "--temperature", 0.9, "--top-p", 0.95]
    plain = call(*told, "--seed", 3)
    assert plain.code == 0, plain.err
    assert call(*told, "--seed", 3, "--head", place.head).out == plain.out
    assert call(*told, "--seed", 4, "--head", place.head).out != plain.out


def test_regenerate_writes_conversations_that_can_be_trained_on(
    place: Place, call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "answers" / "train.jsonl.gz"
    done = call(
        *("regenerate", place.prompts, "--target", place.target, "--dtype", "float32"),
        *("--out", out, "--max-new-tokens", 12, "--batch", 3, "--json"),
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    rows, skips = read_conversations(out)
    assert result["written"] == len(rows) == 4 - sum(result["dropped"].values())
    assert skips.total == 0
    assert [row.messages[0].content for row in rows] == list(CORPUS[: len(rows)])
    assert all(row.messages[-1].role == "assistant" for row in rows)
    assert list(out.parent.iterdir()) == [out]


def test_rows_that_cannot_be_used_are_told_with_their_place(
    place: Place, call: Call, tmp_path: Path
) -> None:
    """The reference is in square brackets, which must not be taken for markup."""
    prompts = tmp_path / "mixed.jsonl"
    prompts.write_text(place.prompts.read_text() + '{"id": "/empty", "turns": []}\n')
    told = ["--target", place.target, "--dtype", "float32", "--max-new-tokens", 4]
    answered = call("regenerate", prompts, "--out", tmp_path / "out.jsonl", *told)
    measured = call(
        *("evaluate", "--head", place.head, "--prompts", prompts, *told),
        *("--limit", 1, "--identity", 0),
    )
    for done in (answered, measured):
        assert done.code == 0, done.err
        assert "no user turn: 1 [mixed.jsonl:5 (/empty)]" in done.err


# Streams that end


def interrupted(command: Sequence[object], ready: Callable[[subprocess.Popen[str]], bool]) -> Done:
    """Start the command, press Ctrl-C when `ready`, and wait for its end."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Also where the tests themselves were started with Ctrl-C ignored, as in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 120
        while not ready(process):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return Done(process.returncode, out, err)


@pytest.fixture(scope="module")
def patient_target(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target, allowed to go on for long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("patient") / "tiny"
    shutil.copytree(place.target, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 100_000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_ctrl_c_ends_generate_with_one_line_and_keeps_the_text(patient_target: Path) -> None:
    command = ["generate", "--target", patient_target, "--dtype", "float32", "--prompt", QUESTION]
    shown = ""

    def first_text(process: subprocess.Popen[str]) -> bool:
        nonlocal shown
        assert process.stdout is not None
        shown += process.stdout.read(1)
        return len(shown) >= 5

    done = interrupted([*command, "--max-new-tokens", 90_000], first_text)
    assert done.code == 130
    assert done.err.strip() == "interrupted"
    text = greedy_text(patient_target, QUESTION, 40)
    assert (shown + done.out).startswith(text[: len(shown)])


@pytest.mark.slow
def test_ctrl_c_ends_regenerate_with_one_line_and_the_same_command_completes_it(
    place: Place, call: Call, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "many.jsonl", 60)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    command = ["regenerate", prompts, "--target", place.target, "--dtype", "float32"]
    command += ["--temperature", 1.0, "--max-new-tokens", 100]

    def some_written(_process: subprocess.Popen[str]) -> bool:
        return part.exists() and part.read_text().count("\n") >= 4

    done = interrupted([*command, "--out", out, "--batch", 1], some_written)
    assert done.code == 130
    assert done.err.strip() == "interrupted; the same command continues where it was"
    assert done.out == ""
    assert not out.exists()
    kept = part.read_text()
    assert kept.endswith("\n")
    rows = [json.loads(line) for line in kept.splitlines()][1:]
    assert 3 <= len(rows) < 60

    finished = call(*command, "--out", out, "--batch", 20)
    assert finished.code == 0, finished.err
    assert not part.exists()
    whole = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["row"] in whole for row in rows if row["row"])
    assert call(*command, "--out", tmp_path / "anew.jsonl", "--batch", 20).code == 0
    assert (tmp_path / "anew.jsonl").read_text() == out.read_text()


@pytest.mark.slow
def test_a_reader_that_leaves_ends_generate_quietly(patient_target: Path) -> None:
    command = ["generate", "--target", patient_target, "--dtype", "float32", "--prompt", QUESTION]
    process = subprocess.Popen(
        [*COMMAND, *map(str, command), "--max-new-tokens", "90000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141, "as shells report a closed pipe"
    finally:
        process.kill()


# The demo


@pytest.mark.slow
def test_the_demo_does_the_whole_job_and_a_second_time_only_measures(
    smollm2: Path, tmp_path: Path
) -> None:
    assert smollm2.is_dir()
    command = [*COMMAND, "demo", "--positions", "1500", "--prompts", "2", "--new-tokens", "6"]
    command += ["--out", str(tmp_path / "demo")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert not NOISE.search(done.stderr), done.stderr
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert json.loads(done.stdout) == result
    for name in ("plain", "lookup", "head", "merged"):
        assert result[name]["tokens_per_s"] > 0
    assert result["simulated_tau"] >= 1
    assert result["prompts"] == 2
    assert result["new_tokens"] == 6
    assert result["seconds"] > 0
    assert {"python", "torch", "transformers"} <= result["versions"].keys()
    page = (tmp_path / "demo" / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert all(name in page for name in ("reference head", "Training"))

    again = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    assert "merged" in again.stdout
    after = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert after["training"]["steps"] == result["training"]["steps"]
