"""Answers that came with their own ids keep them; rows of ids are taken as they are."""

from __future__ import annotations

import logging

import pytest
from chats import ANSWER_PART, PLAIN, TOOLS, ask, chat_format, encode, supervised, tool_talk
from tiny import CORPUS, tiny_tokenizer

from drafthead.data.chat import ChatFormat, build_rows
from drafthead.data.conversations import Conversation, Finish, Message, Tokenised

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def by_letters(text: str) -> list[int]:
    """Ids that say the text, but not those that encoding it gives: a target may emit them."""
    ids = [token for letter in text for token in encode(TOKENIZER, letter)]
    assert ids != encode(TOKENIZER, text)
    return ids


def answered(ids: list[int], text: str = "Paris", finish: Finish = "stop") -> Conversation:
    answer = Message("assistant", text, ids=tuple(ids))
    return Conversation("c", "chat", [Message("user", "Hi"), answer], finish)


@pytest.mark.parametrize(
    ("ids", "finish"),
    [([*by_letters("Paris"), END], "stop"), (by_letters("Paris"), "length"), ([END + 1], "stop")],
)
def test_the_ids_that_were_emitted_are_trained_as_they_are(ids: list[int], finish: Finish) -> None:
    text = "Paris" if len(ids) > 1 else TOKENIZER.decode(ids)
    fmt = chat_format(PLAIN)
    (row,) = fmt.rows(answered(ids, text, finish), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    assert row.ids == prompt + ids
    assert row.mask == [False] * len(prompt) + [True] * len(ids)


def test_an_answer_that_the_history_shows_otherwise_begins_a_row_of_its_own() -> None:
    fmt = chat_format(PLAIN)
    first = answered([*by_letters("Paris"), END])
    turns = [*first.messages, Message("user", "Go"), Message("assistant", "Fine")]
    one, two = fmt.rows(Conversation("c", "chat", turns), 512)
    assert one == fmt.rows(first, 512)[0]
    assert two.ids[: -sum(two.mask)] == fmt.prompt_ids(turns[:3])
    assert supervised(fmt, two) == ["Fine<|im_end|>"]


@pytest.mark.parametrize(
    "ids",
    [[*by_letters("Parts"), END], [5000, END], [END], by_letters("Paris!")],
    ids=["text", "beyond", "end", "more"],
)
def test_ids_of_another_tokenizer_are_encoded_anew_and_counted(
    ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    fmt = chat_format(PLAIN)
    good = answered([*by_letters("Paris"), END])
    with caplog.at_level(logging.WARNING, logger="drafthead.data.chat"):
        ((row, _), _) = build_rows([answered(ids), good], fmt, 512)
    assert row == fmt.rows(ask("Hi", "Paris"), 512)[0]
    assert "1 of 2 answers with ids of their own were encoded anew" in caplog.text


def test_another_vocabulary_reads_the_ids_as_another_text() -> None:
    other = ChatFormat(tiny_tokenizer(template=PLAIN, corpus=[*CORPUS[::-1], "zigzag " * 9]))
    ids = [*encode(TOKENIZER, "What is the capital"), END]
    piece, *_ = other.pieces(answered(ids, "What is the capital"))
    assert piece.origin == "re-encoded"
    assert piece.answer == encode(other.tokenizer, "What is the capital<|im_end|>")


def test_ids_of_a_tool_call_are_kept_where_the_template_shows_that_text() -> None:
    fmt = chat_format(TOOLS)
    talk = tool_talk()
    text = fmt.tokenizer.decode([t for t, on in _tokens(fmt, talk) if on]).split("<|im_end|>")[0]
    called = Message("assistant", "", talk.messages[1].tool_calls, ids=(*by_letters(text), END))
    kept = Conversation("c", "tools", [talk.messages[0], called])
    ((piece,), plain) = fmt.pieces(kept), fmt.pieces(talk)[0]
    assert (piece.origin, piece.answer) == ("kept", [*by_letters(text), END])
    assert piece.answer != plain.answer


def _tokens(fmt: ChatFormat, talk: Conversation) -> list[tuple[int, bool]]:
    (row,) = fmt.rows(talk, 512)
    return list(zip(row.ids, row.mask, strict=True))


def test_markers_choose_among_kept_ids_too() -> None:
    text = "<think>So</think>Paris"
    fmt = chat_format(ANSWER_PART)
    (row,) = fmt.rows(answered([*by_letters(text), END], text), 512)
    assert supervised(fmt, row) == ["Paris<|im_end|>"]
    assert sum(row.mask) == len("Paris") + 1


def test_a_row_of_ids_is_cut_and_otherwise_taken_as_it_is() -> None:
    fmt = chat_format(PLAIN)
    given = Tokenised("r", "other", (5, 6, 7, 8), (False, True, True, False))
    beyond = Tokenised("b", "other", (5, 512), (False, True))
    rows, skips = build_rows([given, beyond, ask("Hi", "Hello")], fmt, 512)
    assert (rows[0].id, rows[0].ids, rows[0].mask) == ("r", list(given.ids), list(given.mask))
    assert skips.rows == {"an id is not one of the tokenizer's 512": ["b"]}
    assert fmt.rows(given, 2)[0].mask == [False, True]
