"""Every answer is supervised exactly, after exactly the ids that a server would send."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from chats import (
    ALTERNATING,
    FORGETFUL,
    PLAIN,
    THINKING,
    TOOLS,
    ask,
    chat_format,
    encode,
    supervised,
    talk,
    tool_talk,
)
from tiny import CHATML, CORPUS, tiny_tokenizer
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from drafthead.data.chat import ChatFormat, build_rows, rows_key
from drafthead.data.conversations import Conversation, Message, RowError, read_conversations


def test_f01_a_conversation_that_cannot_be_rendered_is_skipped_and_counted() -> None:
    good = [ask("Hi", "Hello", name=f"good-{i}") for i in range(3)]
    bad = talk(("assistant", "Hello"), name="bad")
    rows, skips = build_rows([*good, bad], chat_format(), 512)
    assert [row.id for row in rows] == ["good-0", "good-1", "good-2"]
    assert list(skips.rows.values()) == [["bad"]]


@pytest.mark.parametrize(
    "roles", [("user", "user", "assistant"), ("user", "assistant", "assistant")]
)
def test_f02_roles_that_do_not_alternate_are_kept_or_counted(roles: tuple[str, ...]) -> None:
    turns = [(role, f"text {i}") for i, role in enumerate(roles)]
    fmt = chat_format(PLAIN)
    ((row,), _) = build_rows([talk(*turns)], fmt, 512)
    assert supervised(fmt, row) == [
        f"{text}<|im_end|>" for role, text in turns if role == "assistant"
    ]
    good = ask("Hi", "Hello", name="good")
    (rows, skips) = build_rows([good, talk(*turns)], chat_format(ALTERNATING), 512)
    assert [row.id for row in rows] == ["good"]
    assert skips.rows == {"the chat template refuses it: roles must alternate": ["c"]}


def test_f03_the_mask_is_the_answers_and_their_terminators_without_markers() -> None:
    fmt = chat_format()
    turns = (("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"))
    conversation = talk(*turns, ("user", "And\n\nnow?"), ("assistant", "\n Paris, é 日本 🎈\n"))
    ((row,), _) = build_rows([conversation], fmt, 512)
    assert supervised(fmt, row) == ["Hello<|im_end|>", "\n Paris, é 日本 🎈\n<|im_end|>"]
    rendered = fmt.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in conversation.messages], tokenize=False
    )
    assert fmt.tokenizer.decode(row.ids) + "\n" == rendered


def test_f03_an_answer_cut_by_a_limit_has_no_terminator() -> None:
    fmt = chat_format()
    turns = (("user", "Hi"), ("assistant", "One"), ("user", "Hi"), ("assistant", "Two and"))
    ((row,), _) = build_rows([talk(*turns, finish="length")], fmt, 512)
    assert supervised(fmt, row) == ["One<|im_end|>", "Two and"]


def test_f03_messages_after_the_last_answer_are_left_out() -> None:
    fmt = chat_format()
    turns = (("user", "Hi"), ("assistant", "Hello"))
    assert fmt.rows(talk(*turns, ("user", "Bye")), 512) == fmt.rows(talk(*turns), 512)


def test_f03_a_template_without_terminator_is_said_and_supervises_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fmt = chat_format("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    assert "ends an answer with no token" in caplog.text
    ((row,), _) = build_rows([ask("Hi", "Hello")], fmt, 512)
    assert supervised(fmt, row) == ["Hello"]
    assert not all(row.mask)


def test_f04_rows_truncated_to_no_answer_are_dropped_and_counted() -> None:
    long = [ask("x y " * 100, "No", name=f"long-{i}") for i in range(8)]
    good = [ask("Hi", "Hello", name=f"good-{i}") for i in range(4)]
    with pytest.raises(ValueError, match="no row is left with max_length 64; 8 rows skipped"):
        build_rows(long, chat_format(), 64)
    rows, skips = build_rows([*long[:4], *good], chat_format(), 64)
    assert [row.id for row in rows] == [f"good-{i}" for i in range(4)]
    assert skips.counts == {"fewer than 1 supervised tokens in max_length 64": 4}


def test_f04_a_row_is_cut_at_max_length_and_must_keep_min_supervised() -> None:
    fmt = chat_format()
    (whole,) = fmt.rows(ask("Hi", "Hello there, this is an answer"), 512)
    start = whole.mask.index(True)
    ((cut,), _) = build_rows([ask("Hi", "Hello there, this is an answer")], fmt, start + 2, 2)
    assert (cut.ids, cut.mask) == (whole.ids[: start + 2], whole.mask[: start + 2])
    with pytest.raises(ValueError, match="fewer than 3 supervised tokens"):
        build_rows([ask("Hi", "Hello there, this is an answer")], fmt, start + 2, 3)


def test_f05_the_mask_marks_the_tokens_themselves_unshifted() -> None:
    fmt = chat_format()
    (row,) = fmt.rows(ask("Hi", "Paris"), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    answer = encode(tiny_tokenizer(), "Paris<|im_end|>")
    assert row.ids == prompt + answer
    assert row.mask == [False] * len(prompt) + [True] * len(answer)


def test_f06_the_terminator_is_supervised_where_pad_equals_eos() -> None:
    fmt = chat_format()
    assert fmt.tokenizer.pad_token_id == fmt.tokenizer.eos_token_id
    (row,) = fmt.rows(ask("Hi", "Paris"), 512)
    assert (row.ids[-1], row.mask[-1]) == (fmt.tokenizer.eos_token_id, True)


@pytest.mark.parametrize("think", [True, False])
def test_f07_training_ids_are_prompt_answer_terminator_under_the_same_switch(think: bool) -> None:
    fmt = chat_format(THINKING, think=think)
    (row,) = fmt.rows(ask("Hi", "Paris"), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    assert ("<think></think>" in fmt.tokenizer.decode(prompt)) is not think
    assert row.ids == prompt + encode(tiny_tokenizer(), "Paris<|im_end|>")
    assert supervised(fmt, row) == ["Paris<|im_end|>"]


@pytest.mark.parametrize("template", [THINKING, FORGETFUL])
def test_f07_a_rewritten_history_puts_each_answer_after_its_serving_prompt(template: str) -> None:
    fmt = chat_format(template)
    answers = ("<think>a</think>One", "<think>b</think>Two")
    turns = (("user", "Hi"), ("assistant", answers[0]), ("user", "Go"), ("assistant", answers[1]))
    conversation = talk(*turns)
    rows, skips = build_rows([conversation], fmt, 512)
    assert [row.id for row in rows] == ["c", "c#2"]
    assert not skips.total
    for row, answer, seen in zip(rows, answers, (1, 3), strict=True):
        prompt = fmt.prompt_ids(conversation.messages[:seen])
        assert row.ids[: len(prompt)] == prompt
        assert supervised(fmt, row) == [f"{answer}<|im_end|>"]


def test_f07_a_setting_the_template_never_reads_is_said(caplog: pytest.LogCaptureFixture) -> None:
    chat_format(THINKING, thinking=True, think=True)
    assert [record.getMessage() for record in caplog.records] == [
        "template_kwargs.thinking: the chat template never reads it"
    ]
    with pytest.raises(ValueError, match=r"template_kwargs\.tokenize: not a setting"):
        chat_format(tokenize=True)


@pytest.mark.parametrize("word", ["memory", "日本", "🎈"])
def test_f08_a_token_that_grows_over_the_seam_gives_serving_equal_ids(word: str) -> None:
    words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\s+|[^\s\p{L}]+"), "isolated")
    split = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    template = PLAIN.replace("assistant\n", "assistant.").replace(
        "['role'] + '\n'", "['role'] + '.'"
    )
    tokenizer = tiny_tokenizer(template=template, corpus=[*CORPUS, f".{word} " * 99], split=split)
    assert len(encode(tokenizer, f".{word}")) == 1
    fmt = ChatFormat(tokenizer)
    turns = (("user", "Hi"), ("assistant", word), ("user", "Hi"), ("assistant", "Fine"))
    first, second = fmt.rows(talk(*turns), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    assert first.ids == prompt + encode(tokenizer, f"{word}<|im_end|>")
    assert supervised(fmt, first) == [f"{word}<|im_end|>"]
    assert second.ids[: -sum(second.mask)] == fmt.prompt_ids(talk(*turns).messages[:3])
    assert supervised(fmt, second) == ["Fine<|im_end|>"]


@pytest.mark.parametrize("answer", ["🎈 party", "日本語", "\nnew line", " space", "é", "."])
def test_f08_the_prompt_of_a_row_is_the_prompt_served_whatever_the_answer(answer: str) -> None:
    fmt = chat_format()
    (row,) = fmt.rows(ask("Hi", answer), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    assert row.ids == prompt + encode(tiny_tokenizer(), answer + "<|im_end|>")


def test_f08_a_tokenizer_that_opens_texts_with_a_space_adds_none_at_the_seam() -> None:
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = tiny_tokenizer(template=PLAIN.replace("\n", ":"), split=metaspace)
    (row,) = ChatFormat(tokenizer).rows(ask("Hi", "Paris"), 512)
    answer = [token for token, on in zip(row.ids, row.mask, strict=True) if on]
    assert "".join(tokenizer.convert_ids_to_tokens(answer)) == "Paris<|im_end|>"
    assert tokenizer.tokenize("Paris")[0].startswith("▁")


def test_f09_one_bos_and_the_same_ids_in_training_and_serving() -> None:
    tokenizer = tiny_tokenizer(template="{{ bos_token }}" + PLAIN)
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer("Hi")["input_ids"][0] == bos
    fmt = ChatFormat(tokenizer)
    (row,) = fmt.rows(ask("Hi", "Paris"), 512)
    prompt = fmt.prompt_ids([Message("user", "Hi")])
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True
    )
    assert prompt == served["input_ids"] == row.ids[: len(prompt)]
    assert row.ids.count(bos) == 1


def test_f10_rendered_tool_calls_are_supervised_and_their_results_are_not() -> None:
    fmt = chat_format(TOOLS)
    ((row,), _) = build_rows([tool_talk()], fmt, 512)
    call = json.dumps({"name": "weather", "arguments": {"city": 'the "old" town', "days": 3}})
    assert supervised(fmt, row) == [f"<tool_call>{call}</tool_call><|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize(
    "template", [CHATML, TOOLS.replace("call.function |", "call.function.name |")]
)
def test_f10_calls_the_template_leaves_out_are_skipped_and_counted(template: str) -> None:
    rows, skips = build_rows([ask("Hi", "Yes"), tool_talk()], chat_format(template), 512)
    assert len(rows) == 1
    assert skips.counts == {"the chat template leaves out tool calls": 1}


def test_f13_the_key_changes_with_all_that_decides_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    key = rows_key(path, chat_format(), 64)
    longer = tiny_tokenizer()
    longer(["a", "b c d"], padding=True)
    assert rows_key(path, ChatFormat(longer), 64) == key, "a padded call changed the key"
    other_merges = tiny_tokenizer(corpus=[*CORPUS[::-1], "zigzag " * 9])
    other_eos = tiny_tokenizer()
    other_eos.eos_token = "<|endoftext|>"
    changed = [
        rows_key(path, chat_format(), 65),
        rows_key(path, chat_format(), 64, min_supervised=2),
        rows_key(path, chat_format(PLAIN), 64),
        rows_key(path, chat_format(think=True), 64),
        rows_key(path, ChatFormat(other_merges), 64),
        rows_key(path, ChatFormat(other_eos), 64),
    ]
    path.write_text("ons")
    changed.append(rows_key(path, chat_format(), 64))
    assert len({key, *changed}) == len(changed) + 1


def test_the_answer_keeps_the_space_a_template_opens_it_with() -> None:
    fmt = chat_format(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '[/I]' }}"
        "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
    )
    turns = (("user", "Hi"), ("assistant", "One"), ("user", "Hi"), ("assistant", "Two"))
    ((row,), _) = build_rows([talk(*turns)], fmt, 512)
    assert supervised(fmt, row) == [" One <|im_end|>", " Two <|im_end|>"]


def test_a_tokenizer_without_a_usable_template_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        ChatFormat(tiny_tokenizer(template=None))
    with pytest.raises(ValueError, match=r"no plain chat can be rendered: .*: no chats$"):
        chat_format("{{ raise_exception('no chats') }}")
    with pytest.raises(ValueError, match="does not show the assistant's messages"):
        chat_format("{{ messages[0].content }}")
    parts = "{% for part in message['content'] %}{{ part.text }}{% endfor %}"
    with pytest.raises(ValueError, match="does not show the user's messages as text"):
        chat_format(
            "{% for message in messages %}{% if message.role == 'user' %}" + parts + "{% else %}"
            "{{ message.content }}{% endif %}<|im_end|>{% endfor %}"
        )
    with pytest.raises(ValueError, match="shows nothing before an answer"):
        chat_format("{% if messages[1] %}{{ messages[1].content }}{% endif %}")


@pytest.mark.parametrize(
    "fault",
    ["1 // 0", "range(10 ** 9)", "messages[99].x.y", "'%s%s' | format(1)", "raise_exception(bad)"],
)
def test_f02_whatever_a_template_raises_costs_one_row(fault: str) -> None:
    template = "{% if messages | length > 2 %}{{ " + fault + " }}{% endif %}" + PLAIN
    fmt = chat_format(template, bad="no\x1b[2J way " + "x" * 999)
    turns = (("user", "Hi"), ("assistant", "One"), ("user", "Hi"), ("assistant", "Two"))
    rows, skips = build_rows([ask("Hi", "Yes"), talk(*turns)], fmt, 512)
    assert (len(rows), skips.total) == (1, 1)
    assert "the chat template refuses it: " in skips.summary()
    assert skips.summary().isprintable()
    assert len(skips.summary()) < 300


def test_a_template_that_refuses_a_prompt_is_named() -> None:
    fmt = chat_format(ALTERNATING)
    twice = [Message("user", "Hi"), Message("user", "Hi")]
    with pytest.raises(RowError, match="the chat template refuses it: roles must alternate"):
        fmt.prompt_ids(twice)
    with pytest.raises(RowError, match="the chat template refuses it: roles must alternate"):
        fmt.rows(Conversation("c", "chat", [*twice, Message("assistant", "Hello")]), 512)


def test_the_number_of_rows_that_may_be_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="drafthead.data.chat"):
        build_rows([ask("Hi", "Hello there, this is an answer")], chat_format(), 40)
    assert "1 of 1 rows fill max_length 40" in caplog.text


def test_the_tools_of_a_row_are_what_the_template_is_given() -> None:
    fmt = chat_format("{{ tools | tojson if tools else '' }}" + PLAIN)
    tool = {"type": "function", "function": {"name": "weather"}}
    exchange = ask("Hi", "Hello")
    given = Conversation("c", "chat", exchange.messages, tools=(tool,))
    (row,) = fmt.rows(given, 512)
    assert row.ids[: row.mask.index(True)] == fmt.prompt_ids(exchange.messages[:1], [tool])
    assert fmt.tokenizer.decode(row.ids).startswith('[{"type": "function"')
    assert not fmt.tokenizer.decode(fmt.rows(exchange, 512)[0].ids).startswith("[")


REASONING = PLAIN.replace(
    "+ message['content'] +",
    "+ (('<think>' + message.reasoning_content + '</think>') if message.reasoning_content else '')"
    " + message['content'] +",
)


def test_reasoning_is_emitted_before_the_answer_or_the_row_is_refused() -> None:
    answer = Message("assistant", "Paris", reasoning="The capital.")
    thinking = Conversation("c", "chat", [Message("user", "Hi"), answer])
    fmt = chat_format(REASONING)
    (row,) = fmt.rows(thinking, 512)
    assert supervised(fmt, row) == ["<think>The capital.</think>Paris<|im_end|>"]
    with pytest.raises(RowError, match="leaves out the reasoning"):
        chat_format(PLAIN).rows(thinking, 512)


def test_a_template_that_may_write_the_date_is_said(caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ date_string if date_string else strftime_now('%d %b %Y') }}" + PLAIN
    chat_format(template, date_string="26 Jul 2024")
    assert not caplog.records
    chat_format(template)
    assert "rows of another day are other rows" in caplog.text


def test_f07_answers_made_under_other_template_arguments_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    made = [row | {"made": {"template_kwargs": {"think": think}}} for think in (False, True)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [row, *made]))
    examples, _ = read_conversations(path)
    build_rows(examples[:2], chat_format(THINKING, think=False), 512)
    assert not caplog.records
    build_rows(examples, chat_format(THINKING, think=False), 512)
    assert "1 of 3 conversations were answered with template arguments {'think': True}" in (
        caplog.text
    )
