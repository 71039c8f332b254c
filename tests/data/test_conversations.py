"""Rows are read one by one: what is bad is skipped with its place and reason, the rest is kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from chats import ANSWER, USER, chat, write
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.conversations import (
    Message,
    Prompt,
    Skips,
    read_conversations,
    read_prompts,
)


def test_f01_bad_rows_are_skipped_with_place_and_reason(tmp_path: Path) -> None:
    good = chat(USER, ANSWER)
    bad = (chat(), chat({"role": "system", "content": "Be brief"}, id="s"), chat(ANSWER, USER))
    path = write(tmp_path / "chats.jsonl", good, bad[0], good, bad[1], good, bad[2])
    conversations, skips = read_conversations(path)
    assert [conversation.id for conversation in conversations] == ["chats-1", "chats-3", "chats-5"]
    assert skips.rows == {
        "no messages": ["chats.jsonl:2"],
        "no assistant message": ["chats.jsonl:4 (s)"],
        "no user message before the first answer": ["chats.jsonl:6"],
    }
    assert skips.total == 3
    with pytest.raises(ValueError, match=r"bad\.jsonl: no usable row; 3 rows skipped: no messages"):
        read_conversations(write(tmp_path / "bad.jsonl", *bad))


def test_f01_a_file_of_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl: no row at all$"):
        read_conversations(write(tmp_path / "empty.jsonl"))


def test_f02_messages_that_do_not_alternate_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = ([USER, USER, ANSWER], [USER, ANSWER, ANSWER])
    conversations, skips = read_conversations(
        write(tmp_path / "a.jsonl", *(chat(*row) for row in rows))
    )
    assert [[m.role for m in c.messages] for c in conversations] == [
        [message["role"] for message in row] for row in rows
    ]
    assert not skips.total


def test_f10_tool_calls_are_kept_with_arguments_as_objects(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "index": 0}
    call["function"] = {"name": "weather", "arguments": '{"city": "Paris"}'}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "21 degrees", "tool_call_id": "c1"}
    path = write(tmp_path / "tools.jsonl", chat(USER, asks, result, ANSWER))
    ((conversation,), _) = read_conversations(path)
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert conversation.messages[1] == Message(
        "assistant", "", ({"id": "c1", "type": "function", "function": function},)
    )
    assert conversation.messages[2] == Message("tool", "21 degrees", call_id="c1")


def test_f11_one_odd_row_among_many_costs_that_row_only(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    image = [{"type": "text", "text": "See"}, {"type": "image", "url": "x.png"}]
    rows = [chat(USER, ANSWER)] * 1000 + [
        chat(USER, {"role": "assistant", "content": parts}),
        chat(USER, {"role": "assistant", "content": None}),
        chat({"role": "user", "content": image}, ANSWER),
        chat({**USER, "name": "Ann"}, {**ANSWER, "weight": 1}, source="x"),
        chat(USER, {"role": "assistant", "content": {"text": "Hello"}}),
        chat(USER, {"role": "assistant", "content": ""}),
        chat(USER, {"role": "assistant", "content": " \n"}),
        chat({"role": "narrator", "content": "Once"}, ANSWER),
        chat("Hi", ANSWER),
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": "Hi"},
    ]
    conversations, skips = read_conversations(write(tmp_path / "mixed.jsonl", *rows))
    assert len(conversations) == 1003
    assert {tuple(conversation.messages) for conversation in conversations} == {
        (Message("user", "Hi"), Message("assistant", "Hello"))
    }
    assert skips.counts == {
        "the content of the assistant is null, not text": 1,
        "the content of the user has a part of type 'image', not text": 1,
        "the content of the assistant is an object, not text": 1,
        "empty assistant message": 2,
        "unknown role 'narrator'": 1,
        "a message is a text, not an object": 1,
        "'messages' is a text, not a list": 1,
    }


def damaged(path: Path) -> Path:
    """Write a file with BOM, CRLF, a truncated line 3, an empty line and a row that is a list."""
    good = json.dumps(chat(USER, ANSWER))
    lines = [good, good, good[:20], "", json.dumps([USER, ANSWER]), good, ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    return path


def test_f12_skip_reads_the_remaining_rows_of_a_damaged_file(tmp_path: Path) -> None:
    conversations, skips = read_conversations(damaged(tmp_path / "a.jsonl"))
    assert [conversation.id for conversation in conversations] == ["a-1", "a-2", "a-6"]
    assert skips.rows == {
        "not valid JSON": ["a.jsonl:3"],
        "the row is a list, not an object": ["a.jsonl:5"],
    }


def test_f12_strict_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = damaged(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl:3: not valid JSON$") as error:
        read_conversations(path, strict=True)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"[" * 100_000, b"7" * 5_000, rb'{"messages": [{"role": "user"', b"null"],
    ids=["bytes", "deep", "number", "cut", "null"],
)
def test_f12_no_line_can_stop_the_run(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(chat(USER, ANSWER)).encode())
    conversations, skips = read_conversations(path)
    assert len(conversations) == skips.total == 1


def test_f12_half_of_a_surrogate_pair_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat({"role": "user", "content": "\ud83d"}, ANSWER))
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        read_conversations(path)


def test_f12_arrays_and_gzip_read_like_lines(tmp_path: Path) -> None:
    rows = [chat(USER, ANSWER, id=7, category="chat"), 5, chat(USER, ANSWER, finish="length")]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    array, array_skips = read_conversations(tmp_path / "a.json")
    lines, line_skips = read_conversations(tmp_path / "a.jsonl.gz")
    assert array == lines
    assert [(c.id, c.category, c.finish) for c in array] == [
        ("7", "chat", "stop"),
        ("a-3", "other", "length"),
    ]
    assert array_skips.rows == {"the row is a number, not an object": ["a.json:item 2"]}
    assert line_skips.rows == {"the row is a number, not an object": ["a.jsonl.gz:2"]}


def test_f12_from_value_keys_and_names_are_mapped(tmp_path: Path) -> None:
    turns = (("system", "Be brief"), ("human", "Hi"), ("gpt", "Hello"), ("tool", "1"))
    row = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    ((conversation,), _) = read_conversations(write(tmp_path / "a.jsonl", row))
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant", "tool"]
    assert [m.content for m in conversation.messages] == [text for _, text in turns]


def test_f12_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    lines = write(tmp_path / "lines.json", chat(USER, ANSWER), chat(USER, ANSWER))
    with pytest.raises(ValueError, match=r"lines\.json:2: not one JSON array.*named \.jsonl"):
        read_conversations(lines)
    with pytest.raises(ValueError, match=r"one\.json: holds an object"):
        read_conversations(write(tmp_path / "one.json", chat(USER, ANSWER)))
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a\.csv: unknown kind of file; use \.jsonl"):
        read_conversations(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        read_conversations(tmp_path / "absent.jsonl")
    whole = gzip.compress(json.dumps(chat(USER, ANSWER)).encode() * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: damaged gzip file"):
        read_conversations(tmp_path / "cut.jsonl.gz")


def test_an_unknown_finish_is_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'finish' is neither"):
        read_conversations(write(tmp_path / "a.jsonl", chat(USER, ANSWER, finish="eos")))


def test_prompts_of_benchmarks_are_read_as_they_are(tmp_path: Path) -> None:
    """Spec-Bench's file names its rows by number; MT-bench on the Hub has its turns as `prompt`."""
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Hi", "More"], "reference": []},
        {"prompt_id": 82, "category": "math", "prompt": ["Hi", "More"], "language": "de"},
        {"turns": ["Hi"], "language": 3},
    )
    prompts, skips = read_prompts(path)
    assert skips.total == 0
    assert prompts == [
        Prompt("81", "writing", ("Hi", "More")),
        Prompt("82", "math", ("Hi", "More"), language="de"),
        Prompt("question-3", "other", ("Hi",)),
    ]


def test_prompts_are_turns_or_the_user_turns_of_a_conversation(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        {"id": "p", "category": "qa", "turns": ["One?", "Two?"], "system": "Be brief"},
        {"turns": ["Three?"], "reference": "3"},
        chat({"role": "system", "content": "Be kind"}, USER, ANSWER, USER),
        {"turns": []},
        {"turns": ["Four?", 4]},
        {"turns": "Five?"},
        {"prompt": "Six?"},
        {"instruction": "Add", "input": "2 + 2", "output": "4", "system": "Be exact"},
        {"text": "Seven?"},
        {"turns": ["Eight?"], "tools": [{"name": "search"}]},
        chat(USER, {"role": "tool", "content": "42"}, ANSWER),
    )
    prompts, skips = read_prompts(path)
    assert [(p.id, p.category, list(p.turns), p.system) for p in prompts] == [
        ("p", "qa", ["One?", "Two?"], "Be brief"),
        ("prompts-2", "other", ["Three?"], None),
        ("prompts-3", "other", ["Hi", "Hi"], "Be kind"),
        ("prompts-7", "other", ["Six?"], None),
        ("prompts-8", "other", ["Add\n\n2 + 2"], "Be exact"),
    ]
    assert skips.rows == {
        "no user turn": ["prompts.jsonl:4"],
        "a turn is a number, not text": ["prompts.jsonl:5"],
        "'turns' is a text, not a list": ["prompts.jsonl:6"],
        "no 'turns', 'messages', 'conversations' or 'prompt'": ["prompts.jsonl:9"],
        "a prompt with tools, which are not read": ["prompts.jsonl:10", "prompts.jsonl:11"],
    }


def test_a_summary_is_one_line_with_counts_and_the_first_rows() -> None:
    skips = Skips()
    assert skips.summary() == "0 rows skipped"
    for line in range(1, 5):
        skips.add("no messages", f"a.jsonl:{line}")
    skips.add("not valid JSON", "a.jsonl:9 (x)")
    assert skips.summary() == (
        "5 rows skipped: no messages: 4 [a.jsonl:1, a.jsonl:2, a.jsonl:3, ...]; "
        "not valid JSON: 1 [a.jsonl:9 (x)]"
    )


# fmt: off
KEYS = [
    "role", "from", "content", "value", "messages", "conversations", "tool_calls", "function",
    "name", "arguments", "type", "text", "ids", "tools", "prompt", "completion", "input_ids",
    "loss_mask", "labels", "attention_mask", "finish", "reasoning", "id", "turns", "system",
    "history", "images", "made", "template_kwargs", "question_id", "language",
]
# fmt: on
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
        | st.sampled_from(["user", "assistant", "gpt", "text", "function_call", "tool"])
    ),
    max_leaves=25,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(JSON, min_size=1, max_size=3))
def test_f11_no_row_whatever_its_shape_can_stop_the_run(tmp_path_factory, rows: list) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(path, *rows, chat(USER, ANSWER), {"turns": ["Hi"]})
    for read, usable in ((read_conversations, 1), (read_prompts, 2)):
        found, skips = read(path)
        assert len(found) + skips.total == len(rows) + 2
        assert len(found) >= usable
