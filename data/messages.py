"""One turn of a conversation, read from the spellings that data sets use for it.

It knows no file and no template. Keys that it does not know are ignored; what would change the text
of a turn is kept or refused, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from drafthead.data.sources import RowError, kind

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Message:
    """One turn.

    `tool_calls` are the calls an assistant made, their arguments as objects; `reasoning` is what it
    thought where that is not part of `content`. `ids` are an answer's own token ids as the target
    emitted them, its end included where it came to one. `name` and `call_id` say which call a
    tool's result belongs to.
    """

    role: str
    content: str
    tool_calls: tuple[Mapping[str, object], ...] = ()
    ids: tuple[int, ...] | None = None
    reasoning: str | None = None
    name: str | None = None
    call_id: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the message as templates read it: keys without a value are absent."""
        values = {
            "reasoning_content": self.reasoning,
            "tool_calls": list(self.tool_calls),
            "name": self.name,
            "tool_call_id": self.call_id,
        }
        given = {key: value for key, value in values.items() if value}
        return {"role": self.role, "content": self.content, **given}


def message_of(value: object) -> Message:
    """Read `role`/`content` or `from`/`value`; RowError for what is no message."""
    message = parsed(value)
    if not isinstance(message, dict):
        raise RowError(f"a message is {kind(message)}, not an object")
    spoken = _first(message, ("role", "from"))
    role = _ROLES.get(spoken.lower()) if isinstance(spoken, str) else None
    if role is None:
        raise RowError(f"unknown role {_named(spoken)}")
    content = _first(message, ("content", "value"))
    if spoken == "function_call":
        return Message(role, "", _call_list(content))
    # One call, as it was written before there were several.
    made = _first(message, ("tool_calls", "function_call"))
    calls = _call_list(made) if role == "assistant" else ()
    text = "" if content is None and calls else text_of(content, f"the content of the {role}")
    if role == "tool":
        return Message(
            role, text, name=_name(message, "name"), call_id=_name(message, "tool_call_id")
        )
    if role != "assistant":
        return Message(role, text)
    thought = _first(message, _REASONING)
    reasoning = None if thought is None else text_of(thought, "the reasoning of the assistant")
    if not (text.strip() or calls or reasoning):
        raise RowError("empty assistant message")
    return Message(role, text, calls, _ids(message.get("ids")), reasoning or None)


def text_of(content: object, what: str) -> str:
    """Return the text of a string or of a list of text parts, joined with nothing between."""
    if not isinstance(content, str | list):
        raise RowError(f"{what} is {kind(content)}, not text")
    parts = [content] if isinstance(content, str) else content
    text = "".join(_part(part, what) for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} holds half of a surrogate pair") from error
    return text


def tools_of(value: object) -> tuple[Mapping[str, object], ...]:
    """Read the tools a conversation could call: objects, or JSON texts of them."""
    value = parsed(value)
    if not value:
        return ()
    tools = [parsed(tool) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("'tools' is not a list of tools")
    # Servers are given, and templates show, the form with `function`.
    return tuple(
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in cast(list[dict[str, object]], tools)
    )


def token_ids(value: object, what: str) -> tuple[int, ...]:
    """Read a list of token ids; RowError for anything else."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{what} is not a list of token ids")
    if not all(type(item) is int and item >= 0 for item in value):
        raise RowError(f"{what} holds what is no token id")
    return tuple(value)


def parsed(value: object) -> object:
    """Return the list or object that a text holds as JSON; every other value as it is.

    Tables often hold messages, tools and calls as texts: only lists and objects are meant there.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _first(message: Mapping[str, object], keys: Iterable[str]) -> object:
    """Return the first value that is there: tables fill the keys a message has not with null."""
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _name(message: Mapping[str, object], key: str) -> str | None:
    value = message.get(key)
    return value if isinstance(value, str) and value else None


def _named(value: object) -> str:
    """Return a value as a reason shows it: short, and with control characters as their codes."""
    return f"{value!r:.40}"


def _ids(value: object) -> tuple[int, ...] | None:
    return None if value is None else token_ids(value, "'ids' of an assistant message")


def _part(part: object, what: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError(f"{what} is {kind(part)}, not text")
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RowError(f"{what} has a part of type {_named(part.get('type'))}, not text")
    return cast(str, part["text"])


def _call_list(value: object) -> tuple[Mapping[str, object], ...]:
    calls = parsed(value) or []
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise RowError("'tool_calls' is not a list")
    return tuple(_call(parsed(call)) for call in calls)


def _call(call: object) -> Mapping[str, object]:
    """Return the call with its arguments as an object, which is what templates render."""
    if not isinstance(call, dict):
        raise RowError(f"a tool call is {kind(call)}, not an object")
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError("the arguments of a tool call are not valid JSON") from error
    arguments = {} if arguments is None else arguments
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made if call.get("id") is None else {"id": call["id"], **made}
