"""Answers depend on the settings alone: not on the batch, nor on how often the run was killed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import endless, own_greedy
from tiny import tiny_tokenizer

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt, read_conversations
from drafthead.data.files import held
from drafthead.inference.regenerate import Answering, Report, loops, regenerate
from drafthead.inference.target import Target

ANSWERING = Answering(max_new_tokens=16, seed=8, batch=3)
PROMPTS = [
    Prompt("a", "chat", ["What is the capital of France?", "And its river?", "And then?"]),
    Prompt("b", "maths", ["Three apples and four pears make how many?"]),
    Prompt("c", "chat", ["Write a function."], system="Be short and right, always."),
    Prompt("d", "chat", ["Memory fades slowly.", "Why?"]),
    Prompt("e", "code", ["Explain every line of it."]),
    Prompt("f", "code", ["Summarise the paragraph.", "Without names."]),
    Prompt("a", "maths", ["Two of five?"]),
]
"""The last has an id that was there before, as users' files do."""


def ending_target() -> Target:
    """A target that ends its answers often: every eighth of its tokens is an end token."""
    model = endless(num_layers=3)
    model.generation_config.eos_token_id = [2, *range(3, 512, 8)]
    return Target(model, tiny_tokenizer())


@pytest.fixture(scope="module")
def target() -> Target:
    return ending_target()


@pytest.fixture(scope="module")
def unbroken(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    regenerate(target, PROMPTS, out, ANSWERING)
    return out.read_bytes()


def rows(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


class KilledError(Exception):
    """Stands for a kill between two conversations."""


def begin(target: Target, out: Path, conversations: int) -> None:
    """Run until this many conversations are written, then break off."""

    def progress(done: int, total: int) -> None:
        if done == conversations:
            raise KilledError

    with pytest.raises(KilledError):
        regenerate(target, PROMPTS, out, ANSWERING, progress=progress)


def test_conversations_come_in_the_order_of_the_prompts(unbroken: bytes) -> None:
    made = rows(unbroken)
    assert [r["id"] for r in made] == ["a", "b", "c", "d", "e", "f", "a"]
    assert [r["category"] for r in made] == [p.category for p in PROMPTS]
    assert made[0]["messages"] != made[-1]["messages"], "an id that repeats is another prompt"


def test_turns_alternate_and_go_on_only_after_an_answer_that_ended(unbroken: bytes) -> None:
    made = rows(unbroken)
    for row, prompt in zip(made, PROMPTS, strict=True):
        messages = [m for m in row["messages"] if m["role"] != "system"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert [m["content"] for m in messages[::2]] == list(prompt.turns[: len(messages) // 2])
        assert row["finish"] in ("stop", "length")
        if row["finish"] == "stop":
            assert len(messages) == 2 * len(prompt.turns), "all turns were answered"
    assert max(len(r["messages"]) for r in made) >= 4, "some conversation has two answers"
    assert made[2]["messages"][0] == {"role": "system", "content": PROMPTS[2].system}


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Greedy, two turns: each answer is transformers' own for the conversation so far."""
    target, chat = ending_target(), ChatFormat(tiny_tokenizer())
    out = tmp_path / "out.jsonl"
    regenerate(target, PROMPTS, out, replace(ANSWERING, temperature=0.0))
    ends = set(target.model.generation_config.eos_token_id)
    answers = 0
    for row in rows(out.read_bytes()):
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                before = [Message(m["role"], m["content"]) for m in row["messages"][:index]]
                ids = chat.prompt_ids(before)
                new = own_greedy(target, ids, 16)[len(ids) :]
                ended = new[-1] in ends
                wanted = chat.tokenizer.decode(new[:-1] if ended else new)
                assert message["content"] == (wanted if ended else wanted.rstrip("\ufffd"))
                answers += 1
    assert answers >= 3


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_the_batch_changes_no_answer(
    target: Target, unbroken: bytes, tmp_path: Path, batch: int
) -> None:
    report = regenerate(target, PROMPTS, tmp_path / "out.jsonl", replace(ANSWERING, batch=batch))
    assert (tmp_path / "out.jsonl").read_bytes() == unbroken
    assert report.written == len(PROMPTS)
    assert not part_of(tmp_path / "out.jsonl").exists()


def test_seed_and_place_decide_an_answer(target: Target, unbroken: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate(target, PROMPTS, out, replace(ANSWERING, seed=4))
    assert out.read_bytes() != unbroken
    regenerate(target, PROMPTS[:2] * 2, tmp_path / "twice.jsonl", ANSWERING)
    made = rows((tmp_path / "twice.jsonl").read_bytes())
    assert made[0] == rows(unbroken)[0], "the place in the file is the same"
    assert made[1]["messages"] != made[3]["messages"], "one prompt twice is answered twice"


@pytest.mark.parametrize("conversations", [1, 4, 6])
def test_a_run_that_was_broken_off_gives_the_same_file(
    target: Target, unbroken: bytes, tmp_path: Path, conversations: int
) -> None:
    out = tmp_path / "out.jsonl"
    begin(target, out, conversations)
    assert not out.exists(), "a file in place is complete"
    before = part_of(out).read_bytes()
    answered: list[int] = []
    report = regenerate(
        target, PROMPTS, out, ANSWERING, progress=lambda done, total: answered.append(done)
    )
    assert out.read_bytes() == unbroken
    assert answered == list(range(conversations + 1, len(PROMPTS) + 1)), "nothing twice"
    assert len(before.splitlines()) == conversations + 1
    assert report.written == len(PROMPTS)


@pytest.mark.parametrize("cut", [1, 20, 10**6])
def test_a_line_that_was_cut_is_answered_again(
    target: Target, unbroken: bytes, tmp_path: Path, cut: int
) -> None:
    """By one byte (the line end), by some, and down to a piece of the header."""
    out = tmp_path / "out.jsonl"
    begin(target, out, 3)
    part = part_of(out)
    os.truncate(part, max(10, part.stat().st_size - cut))
    regenerate(target, PROMPTS, out, ANSWERING)
    assert out.read_bytes() == unbroken


CHILD = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from test_regenerate import ANSWERING, PROMPTS, ending_target, regenerate
regenerate(
    ending_target(), PROMPTS, Path({out!r}), ANSWERING,
    progress=lambda done, total: time.sleep(1 if done >= 2 else 0),
)
"""


def test_a_real_kill_loses_at_most_one_conversation(
    target: Target, unbroken: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    here = Path(__file__).parent
    code = CHILD.format(path=[str(here), str(here.parent)], out=str(out))
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_for_lines(part_of(out), 3, child)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    assert not out.exists()
    regenerate(target, PROMPTS, out, ANSWERING)
    assert out.read_bytes() == unbroken


def wait_for_lines(path: Path, count: int, child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert child.poll() is None, "the child ended by itself"
        assert time.monotonic() < end, "the child wrote nothing"
        time.sleep(0.05)


def test_other_settings_prompts_or_targets_are_not_mixed(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begin(target, out, 2)
    before = part_of(out).read_bytes()
    other = Target(endless(num_layers=4), tiny_tokenizer())
    attempts: list[tuple[Target, Sequence[Prompt], Answering]] = [
        (target, PROMPTS, replace(ANSWERING, seed=9)),
        (target, PROMPTS, replace(ANSWERING, temperature=0.5)),
        (target, PROMPTS, replace(ANSWERING, max_new_tokens=17)),
        (target, PROMPTS[:-1], ANSWERING),
        (target, [*PROMPTS[:-1], replace(PROMPTS[-1], turns=["Other?"])], ANSWERING),
        (other, PROMPTS, ANSWERING),
    ]
    for which, prompts, answering in attempts:
        with pytest.raises(ValueError, match=r"was begun with .*: remove it, or name") as caught:
            regenerate(which, prompts, out, answering)
        assert "\n" not in str(caught.value)
        assert part_of(out).read_bytes() == before, "a refusal leaves the work alone"
    assert regenerate(target, PROMPTS, out, replace(ANSWERING, batch=7)).written == len(PROMPTS)


def test_gz_is_the_same_text_compressed(target: Target, unbroken: bytes, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl.gz"
    regenerate(target, PROMPTS, out, ANSWERING)
    first = out.read_bytes()
    assert gzip.decompress(first) == unbroken
    with pytest.raises(FileExistsError, match="is there already"):
        regenerate(target, PROMPTS, out, ANSWERING)
    out.unlink()
    regenerate(target, PROMPTS, out, ANSWERING)
    assert out.read_bytes() == first, "the same bytes, whenever it was written"
    conversations, skips = read_conversations(out)
    assert len(conversations) == len(PROMPTS)
    assert skips.total == 0


# What is left out


def saying(token: int) -> Target:
    """A target that says one token for ever."""
    model = endless(num_layers=1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
    model.lm_head.register_forward_hook(
        lambda module, args, logits: logits + 9.0 * (torch.arange(512) == token)
    )
    return Target(model, tiny_tokenizer())


def test_loops_are_dropped_and_counted(tmp_path: Path) -> None:
    target, out = saying(100), tmp_path / "out.jsonl"
    greedy = replace(ANSWERING, temperature=0.0, max_new_tokens=90)
    report = regenerate(target, PROMPTS[:3], out, greedy)
    assert report == Report(0, report.new_tokens, report.skipped)
    assert dict(report.skipped) == {"loop": 3}
    assert out.read_bytes() == b""
    assert report.new_tokens < 3 * 80, "a loop is seen before the limit"


def test_a_part_file_that_is_damaged_is_named(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begin(target, out, 2)
    part_of(out).write_bytes(b"\0\n" + part_of(out).read_bytes())
    with pytest.raises(ValueError, match=r"out\.jsonl\.part: damaged .*; remove it"):
        regenerate(target, PROMPTS, out, ANSWERING)


def test_a_part_file_that_another_process_writes_is_left_to_it(
    target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    begin(target, out, 2)
    before = part_of(out).read_bytes()
    with held(part_of(out)), pytest.raises(ValueError, match="another process writes here"):
        regenerate(target, PROMPTS, out, ANSWERING)
    assert part_of(out).read_bytes() == before


def test_the_tokenizers_own_end_ends_an_answer_too(tmp_path: Path) -> None:
    """F47: the generation config names another one."""
    target, out = saying(2), tmp_path / "out.jsonl"
    target.model.generation_config.eos_token_id = 7
    report = regenerate(target, PROMPTS[1:2], out, replace(ANSWERING, temperature=0.0))
    assert report.new_tokens == 1


def test_a_character_that_the_limit_cut_is_left_out(tmp_path: Path) -> None:
    target, out = saying(100), tmp_path / "out.jsonl"
    assert target.tokenizer is not None
    lead = target.tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False)[0]
    target, limit = saying(lead), replace(ANSWERING, temperature=0.0, max_new_tokens=3)
    assert dict(regenerate(target, PROMPTS[1:2], out, limit).skipped) == {"empty": 1}


def test_dropped_conversations_stay_counted_after_a_kill(tmp_path: Path) -> None:
    target, out = saying(100), tmp_path / "out.jsonl"
    greedy = replace(ANSWERING, temperature=0.0, max_new_tokens=90, batch=1)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KilledError

    with pytest.raises(KilledError):
        regenerate(target, PROMPTS[:3], out, greedy, progress=stop)
    assert dict(regenerate(target, PROMPTS[:3], out, greedy).skipped) == {"loop": 3}


def test_empty_answers_and_prompts_beyond_the_context_are_counted(tmp_path: Path) -> None:
    target, out = saying(3), tmp_path / "out.jsonl"
    target.model.generation_config.eos_token_id = 3
    long = Prompt("long", "chat", ["word " * 200])
    greedy = replace(ANSWERING, temperature=0.0)
    report = regenerate(target, [PROMPTS[0], long, PROMPTS[4]], out, greedy)
    assert dict(report.skipped) == {"empty": 2, "too long": 1}
    assert report.written == 0


def test_a_long_system_text_leaves_the_answer_its_room(target: Target, tmp_path: Path) -> None:
    """Room is reckoned with it: every answer may have all its tokens, or ends by itself."""
    system = "Please translate this sentence into German and tell me. " * 3
    prompt = Prompt("s", "chat", ["Why?", "And?"], system=system)
    out = tmp_path / "out.jsonl"
    endless_target = Target(endless(num_layers=3), tiny_tokenizer())
    report = regenerate(endless_target, [prompt], out, ANSWERING)
    assert (report.written, report.new_tokens) == (1, 16)
    assert rows(out.read_bytes())[0]["finish"] == "length"


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([7] * 48, True),
        ([7] * 47, False),
        ([1, 2, 3, *[7] * 48], True),
        ([*[7] * 48, 1], False),
        ([5, 6] * 24, True),
        (list(range(40)) * 4, True),
        (list(range(40)) * 3, False),
        (list(range(41)) * 5, False),
        (list(range(200)), False),
        ([], False),
    ],
)
def test_what_counts_as_a_loop(ids: list[int], found: bool) -> None:
    """A run of at most 40 tokens, at least four times and 48 tokens, at the very end."""
    assert loops(ids) == found
