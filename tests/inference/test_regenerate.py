"""Answers depend on the settings alone: not on the batch, nor on how often the run was killed."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from answering import ANSWERING, PROMPTS, begin, ending_target, part_of, rows
from drafts import endless, own_greedy
from tiny import tiny_head, tiny_tokenizer

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt, read_conversations
from drafthead.inference.answers import Answering, Talk
from drafthead.inference.drafters import LookupDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.regenerate import _Target, regenerate
from drafthead.inference.store import Store
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape


@pytest.fixture(scope="module")
def target() -> Target:
    return ending_target()


@pytest.fixture(scope="module")
def unbroken(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    regenerate(target, PROMPTS, out, ANSWERING)
    return out.read_bytes()


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
        assert row["made"]["temperature"] == ANSWERING.temperature
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
                assert message["ids"] == new if ended else new[: len(message["ids"])]
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


def test_kept_ids_say_the_answer(unbroken: bytes) -> None:
    """Without the end id, which is there exactly where the answer ended by itself."""
    tokenizer, ends = tiny_tokenizer(), {2, *range(3, 512, 8)}
    answers = [m for row in rows(unbroken) for m in row["messages"] if m["role"] == "assistant"]
    assert len(answers) >= len(PROMPTS)
    for message in answers:
        ids = message["ids"]
        body = ids[:-1] if ids[-1] in ends else ids
        assert tokenizer.decode(body) == message["content"]
        assert not ends & set(body)


@pytest.mark.parametrize("tree", ["chain:3", "static:0,1,0.0,0.1", "tree:3x3:6"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_drafts_changes_no_answer(
    tmp_path: Path, tree: str, temperature: float
) -> None:
    """In fp64, where no forward rounds otherwise than another."""
    model = ending_target().model.double()
    target = Target(model, tiny_tokenizer())
    head = tiny_head(endless(num_layers=3), layers=(1, 2, 3)).double()
    head.bind(model, check=False)
    answering = replace(ANSWERING, temperature=temperature)
    plain = regenerate(target, PROMPTS, tmp_path / "plain.jsonl", answering)
    drafter = HeadDrafter(head, parse_shape(tree))
    report = regenerate(target, PROMPTS, tmp_path / "out.jsonl", answering, drafter=drafter)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert report == plain
    assert report.written >= 3


def test_another_drafter_may_continue_a_part_file(
    target: Target, unbroken: bytes, tmp_path: Path
) -> None:
    """What drafts is no part of what answers depend on."""
    out = tmp_path / "out.jsonl"
    begin(target, out, 3)
    regenerate(target, PROMPTS, out, ANSWERING, drafter=LookupDrafter(4, longest=2, shortest=1))
    assert out.read_bytes() == unbroken


FORGETFUL = (
    "{% for m in messages %}{% if loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows the last message alone, as templates that drop earlier thoughts do in part."""


def test_a_later_turn_meets_noise_of_its_own(tmp_path: Path) -> None:
    """The same prompt at the same positions, twice in one conversation: two draws."""
    target = Target(endless(num_layers=3), tiny_tokenizer(template=FORGETFUL))
    target.model.generation_config.eos_token_id = [*range(3, 512, 2)]
    twice = [Prompt(f"p{i}", "chat", ["Why is that so?"] * 2) for i in range(32)]
    out = tmp_path / "out.jsonl"
    regenerate(target, twice, out, replace(ANSWERING, temperature=1.0))
    pairs = [[m["ids"] for m in row["messages"] if "ids" in m] for row in rows(out.read_bytes())]
    both = [pair for pair in pairs if len(pair) == 2]
    assert len(both) >= 4
    assert all(first != second for first, second in both)


def test_top_k_limits_what_is_drawn(tmp_path: Path) -> None:
    """One candidate is greedy decoding."""
    target, texts = ending_target(), []
    for name, answering in (
        ("k", replace(ANSWERING, top_k=1, temperature=1.5)),
        ("greedy", replace(ANSWERING, temperature=0.0)),
    ):
        regenerate(target, PROMPTS, tmp_path / name, answering)
        texts.append([row["messages"] for row in rows((tmp_path / name).read_bytes())])
    assert texts[0] == texts[1]


def test_prompts_of_similar_length_share_a_store(tmp_path: Path) -> None:
    """No answer depends on it, and the smaller ones get a smaller store."""
    target, opened = ending_target(), []
    long = [Prompt(f"l{i}", "chat", ["Explain every line of it. " * 6]) for i in range(3)]
    prompts = [*PROMPTS[1:3], *long, *PROMPTS[4:5] * 9, *PROMPTS[:1]]
    regenerate(target, prompts, tmp_path / "one.jsonl", replace(ANSWERING, batch=9))
    make = target.open

    def watched(batch: int, capacity: int) -> Store:
        opened.append(capacity)
        return make(batch, capacity)

    target.open = watched  # type: ignore[method-assign]
    regenerate(target, prompts, tmp_path / "two.jsonl", replace(ANSWERING, batch=1))
    assert len(opened) >= 2
    assert opened[-1] < opened[0] / 2
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_conversation_that_outgrows_its_store_gets_a_larger_one(
    target: Target, unbroken: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a template repeats much of what was said."""
    room = _Target._room

    def short_sighted(self: _Target, talk: Talk) -> int:
        """Room for the first turn only, to begin with."""
        first = len(self.chat.prompt_ids(talk.messages)) + ANSWERING.max_new_tokens
        return room(self, talk) if talk.answers else first

    monkeypatch.setattr(_Target, "_room", short_sighted)
    monkeypatch.setattr("drafthead.inference.regenerate.WORTH_A_STORE", 0)
    opened = []
    monkeypatch.setattr(
        target, "open", lambda *size: opened.append(size) or Target.open(target, *size)
    )
    report = regenerate(target, PROMPTS, tmp_path / "out.jsonl", ANSWERING)
    assert report.written == len(PROMPTS)
    assert (tmp_path / "out.jsonl").read_bytes() == unbroken
    assert len(opened) == 2
    assert opened[0] < opened[1]


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
from answering import ANSWERING, PROMPTS, ending_target
from drafthead.inference.regenerate import regenerate
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
