"""Streamed pieces are whole characters, and together the whole text."""

from __future__ import annotations

import pytest
from drafts import HalfRight, Oracle, own_greedy, prompt_of
from tiny import tiny_tokenizer

from drafthead.inference.evaluate import Settings
from drafthead.inference.stream import Piece, Stream, _Text
from drafthead.inference.target import Target

TEXTS = (
    "plain words, nothing more",
    "naïve café — “quoted”",
    "漢字かな交じり文",
    "👩‍👩‍👧 family, 🏳️‍🌈 flag, 🇩🇪",
    "a🙂b🙂🙂c",
    "  two  spaces\n\nand lines\t",
)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens_come_out_whole(text: str) -> None:
    """The tokenizer has bytes for everything here but words: one emoji is four tokens."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stream = _Text(tokenizer)
    pieces = [p.text for token in ids for p in stream.add([token], [False])]
    pieces += [p.text for p in stream.rest()]
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert all(pieces)


def test_tokens_given_together_come_out_as_if_given_one_by_one() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("".join(TEXTS), add_special_tokens=False).input_ids
    one, many = _Text(tokenizer), _Text(tokenizer)
    singly = [p for token in ids for p in one.add([token], [True])]
    assert list(many.add(ids, [True] * len(ids))) == singly


def test_the_piece_is_marked_by_the_token_that_completes_it() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("🙂", add_special_tokens=False).input_ids
    assert len(ids) == 4
    stream = _Text(tokenizer)
    assert list(stream.add(ids, [True, True, True, False])) == [Piece("🙂", False)]
    assert list(stream.add(ids, [False, False, False, True])) == [Piece("🙂", True)]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("x🙂", add_special_tokens=False).input_ids[:-1]
    stream = _Text(tokenizer)
    assert [p.text for p in stream.add(ids, [False] * len(ids))] == ["x"]
    assert "".join(p.text for p in stream.rest()) == tokenizer.decode(ids)[1:]
    assert list(stream.rest()) == []


@pytest.mark.parametrize("right", [0, 2, 4])
def test_a_streamed_answer_is_the_plain_answer_with_drafted_pieces_marked(
    chatting: Target, right: int
) -> None:
    """A target with random weights: most of its bytes are no characters at all."""
    assert chatting.tokenizer is not None
    prompt = prompt_of(5)
    text = own_greedy(chatting, prompt, 40)
    stream = Stream(chatting, HalfRight([text], right), prompt, Settings(max_new_tokens=40))
    pieces = list(stream)
    whole = chatting.tokenizer.decode(text[5:], skip_special_tokens=True)
    assert "".join(p.text for p in pieces) == whole
    assert any(p.drafted for p in pieces) == (right > 0)
    assert not all(p.drafted for p in pieces)
    assert stream.row.ids == text
    assert stream.tokens == 39
    assert stream.tau == pytest.approx(39 / len(stream.row.rounds))
    assert stream.tokens_per_s > 0


def test_special_tokens_are_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("one<|im_end|>🙂<|endoftext|>", add_special_tokens=False).input_ids
    stream = _Text(tokenizer)
    pieces = [*stream.add(ids, [False] * len(ids)), *stream.rest()]
    assert "".join(p.text for p in pieces) == "one🙂"


def test_f46_nothing_is_streamed_after_an_end_token_inside_a_block(chatting: Target) -> None:
    prompt = prompt_of(5)
    text = own_greedy(chatting, prompt, 30)
    ends = Target(chatting.model, tiny_tokenizer())
    assert ends.tokenizer is not None
    ends.tokenizer.eos_token = ends.tokenizer.convert_ids_to_tokens(text[5 + 8])
    stream = Stream(ends, Oracle([text], 6), prompt, Settings(max_new_tokens=30))
    shown = "".join(p.text for p in stream)
    wanted = text[5 : text.index(text[5 + 8], 5) + 1]
    assert stream.row.new_ids == wanted
    assert shown == ends.tokenizer.decode(wanted, skip_special_tokens=True)


def test_one_token_is_an_answer_without_rounds(chatting: Target) -> None:
    stream = Stream(chatting, None, prompt_of(5), Settings(max_new_tokens=1))
    assert len(list(stream)) <= 1
    assert (stream.tokens, stream.tau, stream.tokens_per_s) == (0, 1.0, 0.0)


def test_streaming_without_a_tokenizer_or_a_prompt_is_refused(target32: Target) -> None:
    with pytest.raises(ValueError, match="this target has no tokenizer"):
        Stream(target32, None, [4], Settings())
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        Stream(target32, None, [], Settings())
