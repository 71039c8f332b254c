"""The audit shows what training would see: figures that add up, and every token as it is."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chats import FORGETFUL, PLAIN, THINKING, ask, chat_format
from tiny import tiny_tokenizer

from drafthead.data.audit import Audit, audit, preview
from drafthead.data.chat import ChatFormat, build_rows
from drafthead.data.conversations import read_conversations
from drafthead.data.preview import page, summary, terminal_text
from drafthead.train.cli import main

USER = {"role": "user", "content": "Hi"}
HOSTILE = "<script>alert(1)</script> {{ 7 * 7 }} \x1b[2J \u202egnp & é🎈"


def chat(answer: str, question: str = "Hi", **more: object) -> dict[str, object]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def audited(path: Path, fmt: ChatFormat, max_length: int = 512, **more: object) -> Audit:
    return audit([(path.name, path)], fmt, max_length, **more)


def test_the_figures_are_those_of_the_rows_that_training_builds(tmp_path: Path) -> None:
    rows = [
        chat("Paris", id="a"),
        chat(("word " * 100).strip(), id="cut"),
        chat("No", question="word " * 200, id="long"),
        chat("One", id="unfinished", finish="length"),
        chat("and so on " * 40, id="loop", finish="length"),
        chat("", id="empty"),
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "id": "ids"},
    ]
    path, fmt = write(tmp_path / "a.jsonl", *rows), chat_format(PLAIN)
    found = audited(path, fmt, 90)
    examples, _ = read_conversations(path)
    built, _ = build_rows(examples, fmt, 90)
    assert found.rows == len(built) == 5
    assert found.tokens == sum(len(row.ids) for row in built)
    assert found.trained == sum(sum(row.mask) for row in built)
    whole = [fmt.rows(example, 10_000)[0] for example in examples]
    over = [row for row in whole if len(row.ids) > 90]
    assert found.cut == len(over) == 3
    assert found.cut_tokens == sum(len(row.ids) - 90 for row in over)
    assert found.cut_trained == sum(sum(row.mask[90:]) for row in over)
    assert found.skips.rows == {
        "empty assistant message": ["a.jsonl:6 (empty)"],
        "fewer than 1 supervised tokens in max_length 90": ["long"],
    }
    assert (found.read, found.conversations, found.unfinished) == (7, 5, 2)
    # "word word word …" is as much a loop as "and so on and so on …".
    assert found.looping == ["cut", "loop"]
    assert found.answers == {"text": 5, "ids": 1}
    assert sum(count for _, count in found.histogram()) == len(whole)
    assert found.percentiles()["max"] == max(len(row.ids) for row in whole)


def test_answers_with_ids_and_those_encoded_anew_are_counted(tmp_path: Path) -> None:
    fmt = chat_format(PLAIN)
    ids = fmt.tokenizer("Paris<|im_end|>", add_special_tokens=False)["input_ids"]
    turns = [USER, {"role": "assistant", "content": "Paris", "ids": ids}]
    other = [USER, {"role": "assistant", "content": "Rome", "ids": ids}]
    found = audited(write(tmp_path / "a.jsonl", {"messages": turns}, {"messages": other}), fmt)
    assert found.answers == {"kept": 1, "re-encoded": 1}
    assert "1 with the ids that the target emitted, 1 encoded anew" in "\n".join(summary(found))


def test_template_variants_are_compared_by_conversation_and_token(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("Paris", id="a"), chat("Rome", id="b"))
    on, off = chat_format(THINKING, think=True), chat_format(THINKING)
    compared = audited(path, on, other=off).comparison
    assert compared is not None
    extra = len(off.tokenizer("<think></think>", add_special_tokens=False)["input_ids"])
    assert (compared.conversations, compared.different, compared.refused) == (2, 2, 0)
    assert compared.different_tokens == 2 * extra
    assert compared.first is not None
    assert compared.first.id == "a"
    assert "<think>" in compared.first.there
    assert "<think>" not in compared.first.here
    same = audited(path, on, other=chat_format(THINKING, think=True)).comparison
    assert same is not None
    assert (same.different, same.different_tokens, same.first) == (0, 0, None)


def test_conversations_that_a_template_shows_otherwise_later_are_counted(tmp_path: Path) -> None:
    turns = [USER, {"role": "assistant", "content": "<think>a</think>One"}] * 2
    found = audited(write(tmp_path / "a.jsonl", {"messages": turns}), chat_format(FORGETFUL))
    assert (found.conversations, found.rows, found.split) == (1, 2, 1)


@pytest.mark.parametrize("colours", [True, False])
def test_the_preview_shows_every_token_and_obeys_none(tmp_path: Path, colours: bool) -> None:
    fmt = chat_format(PLAIN)
    path = write(tmp_path / "a.jsonl", chat(f"{HOSTILE}\nEnd", question=HOSTILE))
    (shown,) = audited(path, fmt).previews
    examples, _ = read_conversations(path)
    ((row,), _) = build_rows(examples, fmt, 512)
    assert [token for group in shown.groups for token in group.ids] == row.ids
    assert [group.trained for group in shown.groups for _ in group.ids] == row.mask
    assert "".join(group.text for group in shown.groups) == fmt.tokenizer.decode(row.ids)
    text = terminal_text(shown, colours)
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J \\x202egnp & é🎈" in text
    if not colours:
        assert text.count("⟦") == text.count("⟧") == 1
        assert text.endswith("End<|im_end|>⟧")
    else:
        stripped = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert "\x1b" not in stripped


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    fmt = chat_format(PLAIN)
    path = write(tmp_path / "a<b>.jsonl", chat(f"{HOSTILE}\nEnd", id="<i>id</i>"))
    text = page(audited(path, fmt))
    assert "<script" not in text
    assert "<i>id" not in text
    assert "http" not in text
    assert "{{ 7 * 7 }}" in html.unescape(re.sub("<[^>]*>", "", text))
    tokens = re.findall(r'<(b|span) title="token (\d+): ([\d, ]+)">', text)
    examples, _ = read_conversations(path)
    ((row,), _) = build_rows(examples, fmt, 512)
    assert [int(token) for *_, ids in tokens for token in ids.split(", ")] == row.ids
    assert [name == "b" for name, _, ids in tokens for _ in ids.split(", ")] == row.mask


def test_long_runs_are_shortened_in_a_terminal_only(tmp_path: Path) -> None:
    fmt = chat_format(PLAIN)
    path = write(tmp_path / "a.jsonl", chat("x " * 2000))
    found = audited(path, fmt, 8192)
    assert "characters …" in terminal_text(found.previews[0], False)
    assert len(page(found)) > 2000 * len('<b title="token">x</b>')


def test_rows_to_look_at_are_spread_over_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(chat("Paris", id=str(i)) for i in range(10)))
    found = audited(path, chat_format(PLAIN), previews=3)
    assert [row.id for row in found.previews] == ["0", "3", "6"]
    assert audited(path, chat_format(PLAIN), previews=0).previews == []


def test_nothing_to_train_on_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("No", question="word " * 99), {"messages": []})
    with pytest.raises(ValueError, match=r"a\.jsonl: nothing would be trained with max_length 64"):
        audited(path, chat_format(PLAIN), 64)


def test_a_group_of_tokens_ends_where_the_mask_changes() -> None:
    fmt = chat_format(PLAIN)
    (row,) = fmt.rows(ask("🎈", "🎈"), 512)
    shown = preview(row, fmt)
    assert [g.text for g in shown.groups if g.trained] == ["🎈", "<|im_end|>"]
    assert [len(g.ids) for g in shown.groups if "🎈" in g.text] == [4, 4]


# The command


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a tokenizer and no model: more must not be needed."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(template=THINKING).save_pretrained(folder)
    return folder


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run `drafthead audit` in this process; give its exit code, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        arguments = ["drafthead", "audit", *map(str, words), "--target", str(target)]
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return run


def test_f01_the_command_names_what_it_skips_and_fails_only_if_nothing_is_left(
    tmp_path: Path, command: Command
) -> None:
    bad = ({"messages": []}, {"messages": [{"role": "system", "content": "Be brief"}]})
    first = {"messages": [{"role": "assistant", "content": "Hello"}, USER]}
    good = [chat("Paris"), chat("Rome"), chat("Bonn")]
    path = write(tmp_path / "a.jsonl", good[0], bad[0], good[1], bad[1], good[2], first)
    page_at = tmp_path / "new" / "a.html"
    code, out, err = command(path, "--html", page_at, "--compare", "think=true")
    assert code == 0, err
    assert "⟦Paris<|im_end|>⟧" in out
    assert "6 rows read, 3 of them give 3 rows" in out
    for line, reason in ((2, "no messages"), (4, "no assistant"), (6, "no user message before")):
        assert re.search(rf"1  {reason}.*\[a\.jsonl:{line}\]", out), out
    assert "compared with think=True: 3 of 3 conversations differ" in out
    assert "&lt;|im_end|&gt;" in page_at.read_text()
    code, out, err = command(write(tmp_path / "bad.jsonl", *bad, first), "--json")
    assert (code, out) == (2, "")
    assert "bad.jsonl: no usable row; 3 rows skipped" in err
    assert err.count("\n") == 1


def test_f12_the_command_is_strict_where_it_is_asked_to_be(
    tmp_path: Path, command: Command
) -> None:
    good = json.dumps(chat("Paris"))
    path = tmp_path / "a.jsonl"
    lines = [good, good, good[:20], "", json.dumps([USER]), good, ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert command(path, "--strict") == (2, "", f"error: {path}:3: not valid JSON\n")
    code, out, err = command(path, "--json", "--rows", 0)
    assert code == 0, err
    figures = json.loads(out)
    assert figures["rows"] == 3
    assert figures["skipped"] == {
        "not valid JSON": ["a.jsonl:3"],
        "the row is a list, not an object": ["a.jsonl:5"],
    }
