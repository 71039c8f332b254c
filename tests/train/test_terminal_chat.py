"""A chat as its user meets it: on a real terminal, with keys pressed and a screen read."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from command import COMMAND, Call
from scripted import scripted
from terminals import Terminal
from tiny import tiny_tokenizer
from tiny_runs import write_target

from drafthead.inference.stream import Piece
from drafthead.train.answer_text import AnswerText, harmless

ANSWER = "So🙂 \x1b[2Jit\x07\x9b"
"""What the target says to everything: an escape sequence that clears the screen is in it."""
VISIBLE = "So🙂 \\x1b[2Jit\\x07\\x9b"
REFRAIN = "la🙂 "


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("speaker") / "tiny", scripted(ANSWER))


@pytest.fixture(scope="module")
def singer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It never ends, and has the context for that."""
    model = scripted(REFRAIN, endless=True)
    model.config.max_position_embeddings = 100_000
    return write_target(tmp_path_factory.mktemp("singer") / "tiny", model)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Begins a chat at a terminal of its own, with these options; its history is in `tmp_path`."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with ExitStack() as running:

        def begin(*options: object, colour: bool = True) -> Terminal:
            command = [*COMMAND, "generate", "--dtype", "float32", *map(str, options)]
            mode = {"NO_COLOR": "" if colour else "1"}
            return running.enter_context(Terminal(command, environment | mode))

        yield begin


def plain(screen: str) -> str:
    """A screen without what our marks, rich and readline have written to it."""
    return re.sub(r"\x1b\[(\d*m|\?2004[hl]\r?)", "", screen).replace("\r", "")


def test_a_chat_marks_its_drafts_counts_them_and_shows_no_control_character(
    speaker: Path, chat: Callable[..., Terminal]
) -> None:
    terminal = chat("--target", speaker, "--sibling", speaker, "--max-new-tokens", 30)
    before = terminal.settings()
    terminal.until(r"Ctrl-D leaves[^>]*> $")
    screen = terminal.say("hello")
    assert "\x1b[32m" in screen, "the sibling is the target itself: its drafts are kept"
    assert VISIBLE in plain(screen)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain(screen))
    assert "tokens per round" in screen

    stats = plain(terminal.say("/stats"))
    new = len(tiny_tokenizer()(ANSWER, add_special_tokens=False).input_ids) + 1
    assert re.search(rf"new tokens +│ +{new} +│ +{new} ", stats), stats
    assert re.search(r"survival by depth +│ 1.00 ", stats), stats
    assert all(name in stats for name in ("tokens/s", "tau", "accepted / drafted", "first token"))

    assert plain(terminal.say("/bogus now")).count("\n") == 2, "the line typed, and one more"
    assert "/undo stands alone" in terminal.say("/undo it")
    assert VISIBLE in plain(terminal.say("//slash"))
    terminal.type("two\\\n")
    terminal.until(r"\. $")
    assert VISIBLE in plain(terminal.say("lines"))
    assert "taken back: two lines" in terminal.say("/undo")
    assert "taken back: /slash" in terminal.say("/undo")
    assert "the answer is always the same" in terminal.say("/retry")
    assert "/retry" in terminal.say("/help")
    assert "forgotten: 1 exchange" in terminal.say("/clear")
    assert "nothing to take back" in terminal.say("/undo")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
    assert terminal.settings() == before


def test_later_turns_hold_the_earlier_ones_and_a_full_context_is_one_line(
    speaker: Path, chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    told = ["--json", "--system", "Be brief.", "--max-new-tokens", 150]
    terminal = chat("--target", speaker, *told)
    terminal.until(r"Ctrl-D leaves[^>]*> $")
    messages = [{"role": "system", "content": "Be brief."}]
    for said in ("hello", "and then?"):
        (line,) = re.findall(r"\{.*\}", plain(terminal.say(said)))
        result = json.loads(line)
        messages.append({"role": "user", "content": said})
        ids = tiny_tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert result["prompt_tokens"] == len(ids)
        assert result["text"] == ANSWER
        assert result["finish"] == "stop"
        messages.append({"role": "assistant", "content": ANSWER})
    full = plain(terminal.say("zq" * 45))
    assert full.count("\n") == 2, full
    assert "not sent: the conversation with this message takes" in full
    assert "/undo takes the last exchange back, /clear forgets all" in full
    assert "taken back: and then?" in terminal.say("/undo"), "the conversation was kept"
    assert "Be brief." in terminal.say("/system")
    terminal.type("/quit\n")
    assert terminal.process.wait(timeout=60) == 0

    history = tmp_path / "drafthead" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    lines = history.read_text().splitlines()
    assert lines[:2] == ["hello", "and then?"]


def test_ctrl_c_stops_an_answer_and_twice_at_the_prompt_leaves(
    singer: Path, chat: Callable[..., Terminal]
) -> None:
    told = ["--sibling", singer, "--max-new-tokens", 90_000]
    terminal = chat("--target", singer, *told, colour=False)
    before = terminal.settings()
    terminal.until(r"Ctrl-D leaves[^>]*> $")
    terminal.type("go\n")
    screen = terminal.until("la🙂 la🙂 la")
    terminal.type("\x03\x03")  # as impatient users do: the second is not meant for the prompt
    screen += terminal.until(r"> $")
    assert "\x1b[32m" not in screen, "NO_COLOR is set"
    assert re.search(r"tokens per round; stopped", screen)
    sung = plain(screen).split("go\n")[1].replace("^C", "").split("\n")[0]
    assert re.fullmatch("(la🙂 )+(la|la🙂)?", sung), "whole characters"
    assert "taken back: go" in terminal.say("/undo"), "it was kept"
    terminal.type("half a line")
    terminal.until("half a line$")
    terminal.press_ctrl_c()
    assert "Ctrl-C again or Ctrl-D leaves" in terminal.until(r"> $")
    terminal.press_ctrl_c()
    assert terminal.process.wait(timeout=60) == 0
    assert terminal.settings() == before


def test_a_pipe_gets_the_text_as_it_is_and_keeps_no_history(
    speaker: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    told = ["generate", "--target", speaker, "--dtype", "float32", "--max-new-tokens", 30]
    done = call(*told, "--sibling", speaker, "--marks", stdin="/help\n")
    assert done.out == ANSWER + "\n"
    assert "--marks: no effect" in done.err
    piped = call(*told, "--json", stdin="hello")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", piped.out)
    assert json.loads(piped.out)["text"] == ANSWER
    assert list(tmp_path.iterdir()) == []


def test_a_system_prompt_that_the_template_refuses_is_one_line(tmp_path: Path, call: Call) -> None:
    folder = write_target(tmp_path / "tiny", scripted("So"))
    template = folder / "chat_template.jinja"
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no!') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    done = call("generate", "--target", folder, "--prompt", "hi", "--system", "Be brief.")
    assert (done.code, done.out) == (2, "")
    (line,) = re.findall("error: .*", done.err)
    assert "no!" in line
    assert "say it in the first message" in line


def test_a_reader_that_leaves_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(typer.Exit) as end:
            AnswerText(marks=False, guarded=False).show(Piece("So", drafted=False))
        assert end.value.exit_code == 141
        out.flush()  # as the interpreter does at its end


def test_control_characters_are_spelled_out_and_nothing_else() -> None:
    every = "".join(map(chr, range(0x100)))
    shown = harmless(every + "🙂\u2028é")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert shown.count("\\x") == 0x20 - 2 + 0x21
    assert "\t\n" in shown
    assert shown.endswith("ÿ🙂\u2028é")
    assert harmless("\x1b]0;title\x07") == "\\x1b]0;title\\x07"
