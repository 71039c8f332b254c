"""Templates as families ship them: ids are a server's, and what is trained is what they emit.

Each template is written anew after the family's manner; the expectation is computed apart from the
code under test, from the rendered prompt and the text of the answer.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from chats import talk
from tiny import tiny_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Conversation, Message, RowError

LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{%- if m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start|>assistant<|stop|>\\n\\n{"name": "' + call.name }}
    {{- '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {{- '<|eom|>' if tools else '<|eot|>' }}
{%- else %}
    {{- '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}"""
QWEN3 = """{%- set ns = namespace(query=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.query %}
        {{- m.content.split('</think>')[-1].lstrip('\\n') }}
    {%- elif m.role == 'assistant' and loop.index0 > ns.query and '</think>' not in m.content %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
    {{- '[TOOL_CALLS] [' + (m.tool_calls[0].function | tojson) + ']' + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('no system role') }}{%- endif %}
{%- for m in messages %}
    {{- '<|start|>' + ('model' if m.role == 'assistant' else m.role) }}
    {{- '\\n' + m.content | trim + '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>model\\n' }}{%- endif %}"""
PHI = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}
    {%- for call in m.tool_calls %}{{- '<|call|>' + (call.function | tojson) }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""
R1 = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>' + m.content }}
{%- else %}{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"""
LLAMA2 = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

ENDS = {"llama3": "<|eot|>", "qwen3": "<|im_end|>", "mistral": "</s>", "gemma": "<|stop|>"}
ENDS |= {"phi": "<|end|>", "r1": "</s>", "llama2": " </s>"}
TEMPLATES = {"llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA}
TEMPLATES |= {"phi": PHI, "r1": R1, "llama2": LLAMA2}
SPECIAL = (
    "<s>",
    "</s>",
    "<|start|>",
    "<|stop|>",
    "<|eot|>",
    "<|eom|>",
    "<|user|>",
    "<|assistant|>",
)
SPECIAL += ("<|end|>", "<|call|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|tool|>", "<think>")


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(template=TEMPLATES[name])
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


def family(name: str, **settings: object) -> ChatFormat:
    return ChatFormat(tokenizer_of(name), settings)


def trained(fmt: ChatFormat, conversation: Conversation) -> list[tuple[list[int], str]]:
    """The ids before each run of trained tokens in its row, and the text of the run."""
    found = []
    for row in fmt.rows(conversation, 10_000):
        for on, places in itertools.groupby(range(len(row.ids)), key=lambda t: row.mask[t]):
            if on:
                run = list(places)
                text = fmt.tokenizer.decode([row.ids[t] for t in run])
                found.append((row.ids[: run[0]], text))
    return found


def served(fmt: ChatFormat, conversation: Conversation, upto: int) -> list[int]:
    """What a server sends to have the message with this number answered."""
    chat = [message.as_dict() for message in conversation.messages[:upto]]
    settings = fmt.template_kwargs | ({"tools": conversation.tools} if conversation.tools else {})
    return fmt.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, **settings
    )


ANSWERS = ("Paris.", "Paris \n", "日本 🎈", "<b>x</b>", "a  b .", "drafthead", "<|user|>hey", "\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_f03_what_a_family_emits_is_trained_after_what_a_server_sends(name: str) -> None:
    fmt = family(name)
    lead = " " if name in ("mistral", "llama2") else ""
    for text in ANSWERS:
        turns = (("user", "Hi there"), ("assistant", text), ("user", "And?"), ("assistant", "Fine"))
        whole, cut = talk(*turns), talk(*turns, finish="length")
        prompts = [served(fmt, whole, upto) for upto in (1, 3)]
        first, end = lead + text + ENDS[name], ENDS[name]
        assert trained(fmt, whole) == list(zip(prompts, (first, f"{lead}Fine{end}"), strict=True))
        assert trained(fmt, cut) == list(zip(prompts, (first, f"{lead}Fine"), strict=True))


CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Åre", "x": None}},
}
TOOL = {"type": "function", "function": {"name": "weather"}}
SHOWN = '{"name": "weather", "arguments": {"city": "Åre", "x": null}}'


@pytest.mark.parametrize(
    ("name", "tools", "emitted"),
    [
        ("llama3", (), SHOWN.replace("arguments", "parameters") + "<|eot|>"),
        ("llama3", (TOOL,), SHOWN.replace("arguments", "parameters") + "<|eom|>"),
        ("mistral", (), f"[TOOL_CALLS] [{SHOWN}]</s>"),
        # The text that ends the whole chat is not the end of this turn.
        ("phi", (), f"<|call|>{SHOWN}<|end|>"),
    ],
)
def test_f10_a_call_is_trained_up_to_its_own_end(name: str, tools: tuple, emitted: str) -> None:
    fmt = family(name)
    called = Message("assistant", "", (CALL,))
    messages = [
        Message("user", "Rain?"),
        called,
        Message("tool", "no"),
        Message("assistant", "No."),
    ]
    conversation = Conversation("c", "chat", messages, tools=tools)
    lead = " " if name == "mistral" else ""
    assert trained(fmt, conversation) == [
        (served(fmt, conversation, 1), emitted),
        (served(fmt, conversation, 3), f"{lead}No.{ENDS[name]}"),
    ]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("r1", {}, "<think>\nSo.\n</think>\n\nParis"),
        ("r1", {}, "So.\n</think>\n\nParis"),
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\nParis"),
        ("qwen3", {"enable_thinking": False}, "Paris"),
        ("qwen3", {"enable_thinking": True}, "<think>\nSo.\n</think>\n\nParis"),
    ],
)
def test_f07_thoughts_that_the_header_begins_are_not_begun_again(
    name: str, settings: dict, said: str
) -> None:
    fmt = family(name, **settings)
    conversation = talk(("user", "Hi"), ("assistant", said))
    ((prompt, text),) = trained(fmt, conversation)
    assert prompt == served(fmt, conversation, 1)
    shown = fmt.tokenizer.decode(prompt) + text
    assert shown.count("<think>") == said.count("</think>") or "<think>" not in said
    assert shown.endswith((f"\n{said}{ENDS[name]}", f"<|assistant|>{said}{ENDS[name]}"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["Say {} here", "Say{}", "{}"])
def test_f03_an_answer_that_holds_the_end_of_a_turn_is_refused_unless_it_was_emitted_so(
    name: str, text: str
) -> None:
    fmt = family(name)
    end = ENDS[name].strip()
    with pytest.raises(RowError, match="holds the end of a turn"):
        fmt.rows(talk(("user", "Hi"), ("assistant", text.format(end))), 512)
    # Letter by letter, as a target may write about it.
    ids = [
        token
        for letter in text.format(end)
        for token in fmt.tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]
    answer = Message("assistant", text.format(end), ids=tuple(ids))
    (piece,) = fmt.pieces(Conversation("c", "chat", [Message("user", "Hi"), answer]))
    assert (piece.origin, piece.answer) == ("kept", ids)


def test_f02_a_family_without_system_role_skips_such_a_chat() -> None:
    turns = (("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"))
    with pytest.raises(RowError, match="refuses it: no system role"):
        family("gemma").rows(talk(*turns), 512)


def test_the_white_space_a_template_opens_an_answer_with_is_not_doubled() -> None:
    for text in ("Dry.", " Dry."):
        ((_, shown),) = trained(family("mistral"), talk(("user", "Rain?"), ("assistant", text)))
        assert shown == " Dry.</s>"
