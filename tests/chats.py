"""Chats and templates that tests of rendering share."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import CHATML, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from drafthead.data.chat import ChatFormat, Row
from drafthead.data.conversations import Conversation, Finish, Message

HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'"
PLAIN = "{% for message in messages %}{{ " + TURN + " }}{% endfor %}" + HEADER
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ "
    + TURN
    + " }}{% endfor %}"
    + HEADER
)
THINKING = PLAIN.replace(
    HEADER,
    HEADER.replace(
        "{% endif %}", "{% if not think %}{{ '<think></think>' }}{% endif %}{% endif %}"
    ),
)
FORGETFUL = PLAIN.replace("message['content']", "message['content'].split('</think>')[-1]")
TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] }}{% for call in message.tool_calls %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + HEADER
)

ANSWER_PART = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[0] + '</think>' }}"
    "{% generation %}{{ m['content'].split('</think>')[1] }}{% endgeneration %}"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + HEADER
)
"""Only what follows the thoughts of an answer stands inside generation markers."""


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*messages: object, **more: object) -> dict[str, object]:
    return {"messages": list(messages), **more}


def talk(*turns: tuple[str, str], finish: Finish = "stop", name: str = "c") -> Conversation:
    return Conversation(name, "chat", [Message(role, text) for role, text in turns], finish)


def ask(question: str, answer: str, name: str = "c") -> Conversation:
    return talk(("user", question), ("assistant", answer), name=name)


def chat_format(template: str = CHATML, **kwargs: object) -> ChatFormat:
    return ChatFormat(tiny_tokenizer(template=template), kwargs)


def supervised(fmt: ChatFormat, row: Row) -> list[str]:
    """Return the text of each run of supervised tokens."""
    runs: list[list[int]] = []
    for t, (token, on) in enumerate(zip(row.ids, row.mask, strict=True)):
        if on and not (t and row.mask[t - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [fmt.tokenizer.decode(run) for run in runs]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tool_talk() -> Conversation:
    function = {"name": "weather", "arguments": {"city": 'the "old" town', "days": 3}}
    return Conversation(
        "c",
        "tools",
        [
            Message("user", "Rain?"),
            Message("assistant", "", ({"type": "function", "function": function},)),
            Message("tool", "21 degrees"),
            Message("assistant", "No."),
        ],
    )
