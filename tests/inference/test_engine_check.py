"""Comparing an engine's drafts with ours; engines that are not there or fail. No engine is run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_head, tiny_target

from drafthead.inference.decoder import decode
from drafthead.inference.engine_check import (
    DRIVER,
    Decoded,
    EngineError,
    Job,
    chained,
    check_engine,
    compared,
    run_engine,
)
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape

OURS = Decoded(
    tokens=[[7, 1, 2, 3], [8, 4, 4, 4]],
    drafts=[[(1, [1, 9]), (3, [5])], [(1, [4, 4])]],
    rounds=3,
)


def test_the_same_drafts_agree_also_where_ours_are_cut_at_the_end() -> None:
    theirs = Decoded(
        OURS.tokens,
        [[(1, [1, 9]), (3, [5, 6]), (5, [0, 0])], [(1, [4, 4]), (4, [1, 1])]],
        3,
    )
    result = compared(OURS, theirs)
    assert (result.prompts, result.first_drafts_equal, result.texts_equal) == (2, 2, 2)
    assert (result.drafts, result.drafts_equal) == (3, 3)
    assert result.engine_tau == result.our_tau == 2.0  # three tokens of each prompt in rounds
    assert result.passed
    assert result.line() == (
        "engine agrees: first drafts 2 of 2 equal, all drafts 3 of 3, texts 2 of 2; "
        "tau 2.000 here, 2.000 there"
    )


@pytest.mark.parametrize(
    ("theirs", "counts"),
    [
        # another first draft
        (Decoded(OURS.tokens, [[(1, [1, 8]), (3, [5, 6])], [(1, [4, 4])]], 3), (1, 3, 2, 2)),
        # another later draft alone is a near tie at most, unless tau says otherwise
        (Decoded(OURS.tokens, [[(1, [1, 9]), (3, [6])], [(1, [4, 4])]], 4), (2, 3, 2, 2)),
        # another text: drafts after it are not compared
        (
            Decoded([[7, 1, 0, 3], [8, 4, 4, 4]], [[(1, [1, 9]), (3, [5])], [(1, [4, 4])]], 3),
            (2, 2, 2, 1),
        ),
        # drafts, but none after the same text
        (Decoded(OURS.tokens, [[(2, [9, 9])], [(2, [9, 9])]], 3), (0, 0, 0, 2)),
    ],
)
def test_what_differs_is_counted_and_fails(
    theirs: Decoded, counts: tuple[int, int, int, int]
) -> None:
    found = compared(OURS, theirs)
    assert counts == (
        found.first_drafts_equal,
        found.drafts,
        found.drafts_equal,
        found.texts_equal,
    )
    assert not found.passed
    assert "DISAGREES" in found.line()


def test_tau_may_differ_by_three_hundredths() -> None:
    def rounds(count: int) -> Decoded:
        return Decoded([[0] * 101], [[(1, [1])]], count)

    assert compared(rounds(50), rounds(51)).passed
    assert not compared(rounds(50), rounds(52)).passed


def test_our_side_is_the_decoder_with_a_chain() -> None:
    model = tiny_target()
    target, head = Target(model), tiny_head(model)
    prompts = [[n, 40 + n, 9] for n in range(3, 14)]  # more than are decoded together
    made = chained(target, head, prompts, 2, 12)
    rounds = 0
    for prompt, new, drafts in zip(prompts, made.tokens, made.drafts, strict=True):
        rows, _ = decode(target, [prompt], Sampler(), None, max_new_tokens=12)
        assert new == rows[0].new_ids
        state = head.open(1, 40)
        features, _ = target.states(torch.tensor([prompt]), head.contract.layers)
        next_ids = torch.tensor([[*prompt[1:], new[0]]])
        logits = head.extend(state, features, next_ids, torch.tensor([len(prompt)]))
        assert drafts[0][0] == 1
        assert drafts[0][1][0] == head.draft_ids[logits.argmax()]
        drafter = HeadDrafter(head, parse_shape("chain:2"))
        alone, _ = decode(target, [prompt], Sampler(), drafter, max_new_tokens=12)
        rounds += len(alone[0].rounds)
    assert made.rounds == rounds
    assert made.tau == 11 * 11 / rounds


JOB = Job("target", "draft", "eagle3", 3, [[1, 2]], 8)


def _script(folder: Path, text: str) -> Path:
    file = folder / "program"
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("kind", ["nowhere", "folder", "text", "other program"])
def test_no_engine_is_one_line_that_says_what_makes_one(kind: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    python = {
        "nowhere": tmp_path / "bin" / "python",
        "folder": tmp_path,
        "text": tmp_path / "text",
        "other program": _script(tmp_path, "#!/bin/sh\necho hello\n"),
    }[kind]
    said = rf"^{python}: no Python of an engine \(.+\); name the bin/python .*make engine-vllm"
    with pytest.raises(EngineError, match=said) as info:
        check_engine(python)
    assert "\n" not in str(info.value)


def test_a_python_without_the_engine_is_told_before_any_work() -> None:
    with pytest.raises(EngineError, match=r"a Python without vLLM; `make engine-vllm`"):
        check_engine(Path(sys.executable))


def test_an_engine_whose_caller_was_killed_ends() -> None:
    """It would go on for minutes, and hold its memory, for nobody."""
    engine = "import sys, time; sys.path.insert(0, {!r}); import engine_vllm as e; "
    engine += "e.end_with_parent(); print(1, flush=True); time.sleep(60)"
    inner = [sys.executable, "-c", engine.format(str(DRIVER.parent))]
    caller = f"import subprocess; subprocess.run({inner!r})"
    started = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"1\n"
    started.kill()
    begun = time.monotonic()
    assert started.stdout.read() == b"", "the engine holds the other end of the pipe while it runs"
    assert time.monotonic() - begun < 30
    started.wait()


def test_an_engine_that_fails_is_one_line_that_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match=r"ended with 1 \(ModuleNotFoundError: .*vllm") as info:
        run_engine(Path(sys.executable), [JOB])
    assert "\n" not in str(info.value)
    log = Path(str(info.value).split("see ")[-1])
    assert "Traceback" in log.read_text()
    asked = json.loads((log.parent / "jobs.json").read_text())
    assert asked[0]["method"] == "eagle3"
