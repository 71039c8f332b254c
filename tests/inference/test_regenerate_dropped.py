"""What `regenerate` leaves out or cuts short, and what it does with a damaged or busy part file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from answering import ANSWERING, PROMPTS, KilledError, begin, ending_target, part_of, rows
from drafts import endless
from tiny import tiny_tokenizer

from drafthead.data.conversations import Prompt
from drafthead.data.files import held
from drafthead.data.loops import loops
from drafthead.inference.answers import Report
from drafthead.inference.regenerate import regenerate
from drafthead.inference.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return ending_target()


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


def test_a_prompt_that_the_template_refuses_costs_only_itself(tmp_path: Path) -> None:
    target, out = saying(100), tmp_path / "out.jsonl"
    assert target.tokenizer is not None
    template = str(target.tokenizer.chat_template)
    guard = "{% if 'odd' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}"
    picky = Target(target.model, tiny_tokenizer(template=guard + template))
    prompts = [Prompt("a", "odd", ["an odd one"]), PROMPTS[0], Prompt("b", "odd", ["Hello", "odd"])]
    report = regenerate(picky, prompts, out, replace(ANSWERING, max_new_tokens=4), drop=())
    assert dict(report.skipped) == {"refused by the chat template": 1}
    kept = rows(out.read_bytes())
    assert [row["id"] for row in kept] == [PROMPTS[0].id, "b"]
    assert [m["role"] for m in kept[1]["messages"]] == ["user", "assistant"]


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
