"""The spellings that data sets use for a row are read alike; nothing of a row is dropped unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import ANSWER, USER, chat, write

from drafthead.data.conversations import (
    Message,
    Tokenised,
    read_conversations,
    read_prompts,
)


def only(tmp_path: Path, *rows: object) -> list[list[Message]]:
    """The messages of each row, none of which may be skipped."""
    found, skips = read_conversations(write(tmp_path / "a.jsonl", *rows))
    assert not skips.total
    return [list(conversation.messages) for conversation in found]


def test_a_question_with_its_answer_is_one_exchange(tmp_path: Path) -> None:
    exchange = [Message("user", "Hi"), Message("assistant", "Hello")]
    system = {"role": "system", "content": "Be brief"}
    assert (
        only(
            tmp_path,
            {"prompt": "Hi", "completion": "Hello"},
            {"prompt": [USER], "completion": [ANSWER]},
            {"prompt": "Hi", "response": "Hello", "messages": None},
            {"instruction": "Hi", "input": "", "output": "Hello"},
            {"question": "Hi", "answer": "Hello", "context": None},
        )
        == [exchange] * 5
    )
    assert only(
        tmp_path,
        {"prompt": [system, USER], "completion": [ANSWER, USER, ANSWER]},
        {"instruction": "Add", "input": "2 + 2", "output": "[4]", "system": "Be brief"},
    ) == [
        [Message("system", "Be brief"), *exchange, *exchange],
        [
            Message("system", "Be brief"),
            Message("user", "Add\n\n2 + 2"),
            Message("assistant", "[4]"),
        ],
    ]


def test_tools_reasoning_and_ids_are_kept_in_every_spelling(tmp_path: Path) -> None:
    weather = {"name": "weather", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": weather}
    thinks = {**ANSWER, "reasoning_content": "A greeting.", "ids": [5, 6, 2]}
    path = write(
        tmp_path / "a.jsonl",
        chat(USER, thinks, tools=[tool]),
        chat(USER, thinks, tools=json.dumps([weather])),
        chat(USER, {**thinks, "tool_calls": None, "name": None}, tools=[json.dumps(tool)]),
    )
    found, _ = read_conversations(path)
    answer = Message("assistant", "Hello", ids=(5, 6, 2), reasoning="A greeting.")
    for conversation in found:
        assert conversation.tools == (tool,)
        assert conversation.messages[1] == answer


def test_the_system_text_of_a_row_comes_before_its_messages(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief"}
    said = [Message("system", "Be brief"), Message("user", "Hi"), Message("assistant", "Hello")]
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = (
        chat(USER, ANSWER, system="Be brief"),
        chat(system, USER, ANSWER, system="Be brief"),
        {"conversations": sharegpt, "system_prompt": "Be brief"},
        {"prompt": [USER], "completion": [ANSWER], "system": "Be brief"},
    )
    assert only(tmp_path, *rows) == [said] * 4
    assert only(tmp_path, chat(USER, ANSWER, system="")) == [said[1:]]
    path = write(tmp_path / "b.jsonl", chat(system, USER, ANSWER, system="Be long"), rows[0])
    assert read_conversations(path)[1].counts == {
        "'system' is another text than the system message": 1
    }
    prompts, _ = read_prompts(write(tmp_path / "c.jsonl", *rows))
    assert [prompt.system for prompt in prompts] == ["Be brief"] * 4
    assert read_prompts(write(tmp_path / "d.jsonl", {"prompt": []}, rows[0]))[1].total == 1


def test_the_history_of_a_question_is_read_and_other_media_are_refused(tmp_path: Path) -> None:
    alpaca = {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief"}
    ((*opening, asked, told),) = only(tmp_path, {**alpaca, "history": [["One?", "1"]]})
    assert opening == [
        Message("system", "Be brief"),
        Message("user", "One?"),
        Message("assistant", "1"),
    ]
    assert (asked.content, told.content) == ("Hi", "Hello")
    bad = ({**alpaca, "history": ["One?"]}, chat(USER, ANSWER, images=["a.png"]), {"turns": ["Hi"]})
    _, skips = read_conversations(write(tmp_path / "b.jsonl", *bad, alpaca))
    assert skips.counts == {
        "'history' holds what is no pair of question and answer": 1,
        "the row holds images, video or sound, which are not read": 1,
        "'turns' are prompts without answers; `drafthead regenerate` adds them": 1,
    }


def test_roles_in_capitals_and_the_one_call_of_old_are_read(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": "{}"}
    capitals = chat({**USER, "role": "User"}, {**ANSWER, "role": "ASSISTANT"})
    (plain, (_, called)) = only(
        tmp_path, capitals, chat(USER, {"role": "assistant", "function_call": call})
    )
    assert plain == [Message("user", "Hi"), Message("assistant", "Hello")]
    assert called.tool_calls[0]["function"] == {"name": "weather", "arguments": {}}


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\ud800", "\u202e"])
def test_an_id_that_a_terminal_would_obey_is_none(tmp_path: Path, name: str) -> None:
    bad = chat({"role": name * 99, "content": ""}, ANSWER, id=name)
    path = write(tmp_path / "a.jsonl", chat(USER, ANSWER, id=name, category=name), bad)
    ((found,), skips) = read_conversations(path)
    assert (found.id, found.category) == ("a-1", "other")
    assert skips.summary().isprintable()
    assert len(skips.summary()) < 150


def test_calls_in_sharegpt_rows_are_calls(tmp_path: Path) -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    turns = [("human", "Rain?"), ("function_call", call), ("observation", "No"), ("gpt", "Dry.")]
    row = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    ((asked, called, result, told),) = only(tmp_path, row)
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert called == Message("assistant", "", ({"type": "function", "function": function},))
    assert [m.role for m in (asked, result, told)] == ["user", "tool", "assistant"]


def test_rows_of_ids_are_taken_as_they_are_or_refused_by_what_is_wrong(tmp_path: Path) -> None:
    good = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "id": "r"},
        {"ids": [5, 6, 7], "mask": [False, True, True], "id": "r"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": "r"},
        {
            "input_ids": [5, 6, 7, 0],
            "labels": [-100, 6, 7, -100],
            "attention_mask": [1, 1, 1, 0],
            "id": "r",
        },
    ]
    bad = {
        "'loss_mask' has 2 entries for 3 ids": {"input_ids": [5, 6, 7], "loss_mask": [0, 1]},
        "'input_ids' without 'loss_mask' or 'labels'": {"input_ids": [5, 6, 7]},
        "'input_ids' holds what is no token id": {"input_ids": [5, -6], "loss_mask": [0, 1]},
        "'input_ids' is not a list of token ids": {"input_ids": "5 6", "loss_mask": [0, 1]},
        "'loss_mask' holds something else than 0 and 1": {
            "input_ids": [5, 6],
            "loss_mask": [0, 2],
        },
        "'labels' are neither the ids themselves nor -100": {
            "input_ids": [5, 6, 7],
            "labels": [6, 7, -100],
        },
        "the mask is all zeros: no token is trained": {"input_ids": [5, 6], "loss_mask": [0, 0]},
        "the mask is all ones: the prompt would be trained too": {
            "input_ids": [5, 6],
            "loss_mask": [1, 1],
        },
    }
    found, skips = read_conversations(write(tmp_path / "a.jsonl", *good, *bad.values()))
    assert found == [Tokenised("r", "other", (5, 6, 7), (False, True, True))] * 4
    assert skips.counts == dict.fromkeys(bad, 1)
