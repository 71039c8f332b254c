"""A conversation: what is sent of it, what stays of a stopped answer, and what its answers took."""

from __future__ import annotations

import pytest
import torch
from drafts import Oracle, own_greedy, prompt_of
from scripted import scripted
from tiny import CHATML, tiny_tokenizer

from drafthead.data.chat import ChatFormat
from drafthead.inference.answering import Settings
from drafthead.inference.chat import Chat, ContextFullError, Exchange, Figures
from drafthead.inference.metrics import Round
from drafthead.inference.stream import Stream
from drafthead.inference.target import Target

NONE = Figures(1, 0, 0, 0.0, (), ())


def chat_of(template: str = CHATML, system: str | None = None, context: int = 1000) -> Chat:
    tokenizer = tiny_tokenizer(template=template)
    return Chat(ChatFormat(tokenizer), context=context, new_tokens=20, system=system)


def ids_of(*contents: str, system: str | None = None) -> list[int]:
    """What transformers makes of these turns, the user's first."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ids: list[int] = tiny_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids


def test_a_turn_is_sent_with_all_before_it_until_that_is_taken_back() -> None:
    chat = chat_of()
    assert chat.ask("one") == ids_of("one")
    assert chat.ask("other") == ids_of("other"), "a message joins with its answer only"
    chat.answered(Exchange("one", "first", "stop"), NONE)
    chat.answered(Exchange("two", "second", "length"), NONE)
    assert chat.ask("three") == ids_of("one", "first", "two", "second", "three")
    chat.use_system("Be brief.")
    assert chat.ask("x") == ids_of("one", "first", "two", "second", "x", system="Be brief.")
    assert chat.undo() == Exchange("two", "second", "length")
    assert chat.ask("three") == ids_of("one", "first", "three", system="Be brief.")
    assert chat.clear() == 1
    assert chat.undo() is None
    assert chat.ask("x") == ids_of("x", system="Be brief.")
    chat.use_system(None)
    assert chat.ask("x") == ids_of("x")


@pytest.mark.parametrize("tokens", range(1, 8))
def test_a_stopped_answer_is_what_was_shown_in_whole_characters(tokens: int) -> None:
    """An emoji is four tokens: wherever the stop falls, none of them is left alone."""
    target = Target(scripted("So🙂 ité"), tiny_tokenizer())
    chat = chat_of()
    stream = Stream(target, None, chat.ask("go"), Settings(max_new_tokens=40))
    target.model.register_forward_hook(
        lambda *_: stream.stop() if len(stream.row.new_ids) == tokens else None
    )
    shown = "".join(piece.text for piece in stream)
    assert tiny_tokenizer().decode(stream.row.new_ids).startswith(shown)
    whole = [n for n in range(10) if "So🙂 ité"[:n] == shown]
    assert whole, shown
    assert (stream.text, stream.finish) == (shown, "stopped")
    kept = chat.answered(Exchange("go", stream.text, stream.finish), Figures.of(stream))
    assert kept == bool(shown)
    asked = ids_of("go", shown, "next") if shown else ids_of("next")
    assert chat.ask("next") == asked


def test_a_stop_inside_a_block_of_drafts_keeps_only_what_was_shown(chatting: Target) -> None:
    prompt = prompt_of(5)
    text = own_greedy(chatting, prompt, 40)
    stream = Stream(chatting, Oracle([text], 6), prompt, Settings(max_new_tokens=40))
    shown = ""
    for piece in stream:
        shown += piece.text
        if piece.drafted:
            stream.stop()
    assert stream.text == shown
    assert stream.finish == "stopped"
    assert len(stream.row.new_ids) < 40
    stream.stop()
    assert stream.text == shown


def test_an_answer_says_how_it_ended_and_a_late_stop_changes_nothing() -> None:
    target = Target(scripted("So it"), tiny_tokenizer())
    for limit, finish in ((40, "stop"), (2, "length")):
        stream = Stream(target, None, ids_of("go"), Settings(max_new_tokens=limit))
        assert "".join(piece.text for piece in stream) == stream.text
        stream.stop()
        assert stream.finish == finish
    assert Stream(target, None, ids_of("go"), Settings()).finish == "stopped"


def test_a_full_context_is_refused_and_nothing_is_dropped() -> None:
    n = len(ids_of("one", "first", "two"))
    chat = chat_of(context=n + 20)
    chat.answered(Exchange("one", "first", "stop"), NONE)
    assert chat.ask("two") == ids_of("one", "first", "two")
    chat.context -= 1
    with pytest.raises(ContextFullError, match=f"takes {n} tokens; .* up to 20 .* {n + 19}"):
        chat.ask("two")
    assert len(chat.messages) == 2
    with pytest.raises(ContextFullError, match="this message takes"):
        chat_of(context=20).ask("two")


REFUSING = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}",
)
SILENT = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{{ message['role'] + ': ' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(REFUSING, "System role not supported"), (SILENT, "leaves a system prompt out")],
)
def test_a_system_prompt_that_would_not_be_read_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        chat_of(template, system="Be brief.")
    assert "\n" not in str(refused.value)
    chat = chat_of(template)
    with pytest.raises(ValueError, match="say it in the first message"):
        chat.use_system("Be brief.")
    assert chat.system is None
    assert chat_of(system="You are a small assistant").system, (
        "the template's own words may be given"
    )


def test_f61_figures_of_answers_are_those_of_their_rounds() -> None:
    """The scripted rounds of the definition: 5 of 12 accepted, 2.667 tokens a round."""
    rounds = [Round(4, accepted, accepted + 1) for accepted in (1, 4, 0)]
    one = Figures(1, 10, 9, 0.2, tuple(rounds), (0.5, 0.25, 0.25))
    assert (one.drafted, one.accepted, one.tokens) == (12, 5, 8)
    assert one.tau == pytest.approx(8 / 3)
    assert one.survival == pytest.approx((2 / 3, 1 / 3, 1 / 3, 1 / 3))
    assert one.tokens_per_s == pytest.approx(8.0)
    assert one.undrafted_per_s is None
    idle = Figures(1, 12, 11, 0.4, tuple(Round(0, 0, 1) for _ in range(10)), (0.1,) * 10)
    both = Figures.together([one, idle])
    assert (both.answers, both.new_tokens, both.prompt_tokens) == (2, 20, 22)
    assert both.first_token_s == pytest.approx(0.3)
    assert both.tau == pytest.approx(18 / 13)
    assert both.tokens_per_s == pytest.approx(9.0), "all tokens over all seconds"
    assert both.undrafted_per_s == pytest.approx(10.0)
    with pytest.raises(ValueError, match="no answer yet"):
        Figures.together([])


def test_figures_are_those_of_the_stream(chatting: Target) -> None:
    prompt = prompt_of(5)
    text = own_greedy(chatting, prompt, 40)
    stream = Stream(chatting, Oracle([text], 6), prompt, Settings(max_new_tokens=40))
    list(stream)
    figures = Figures.of(stream)
    assert (figures.prompt_tokens, figures.new_tokens, figures.tokens) == (5, 40, 39)
    assert (figures.tau, figures.tokens_per_s) == (stream.tau, stream.tokens_per_s)
    assert figures.first_token_s > 0
    assert len(figures.round_seconds) == len(figures.rounds) == len(stream.row.rounds)
    assert torch.tensor(figures.round_seconds).gt(0).all()
