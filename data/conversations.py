"""Read conversations and prompts from files, row by row, and say which rows could not be used.

Files are `.jsonl`, `.jsonl.gz` (one object a line) or `.json` (one array of objects). A bad row
costs that row only: it is skipped with a reason, or refused with its line where `strict` is set.
This module knows no tokenizer and no template: what a template cannot render is found in `chat`.

One rule for roles that do not alternate: messages are kept as they are, never merged or reordered,
so each assistant message is one answer, also the second of two in a row. A conversation needs a
user message before its first answer; messages after its last answer have nothing to teach.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, cast

Finish = Literal["stop", "length"]
Item = TypeVar("Item")

_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
}
_SHOWN_ROWS = 3
"""Row references that a summary names for each reason."""


class RowError(ValueError):
    """One row that cannot be used; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Message:
    """One turn; `tool_calls` are the calls an assistant made, their arguments as objects."""

    role: str
    content: str
    tool_calls: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """Messages with at least one answer.

    `finish` says how the last answer ended: "length" means cut by a limit, so no end of turn
    follows it.
    """

    id: str
    category: str
    messages: Sequence[Message]
    finish: Finish = "stop"


@dataclass(frozen=True)
class Prompt:
    """User turns to send one after another, each after the reply to the one before."""

    id: str
    category: str
    turns: Sequence[str]
    system: str | None = None

    @property
    def opening(self) -> list[Message]:
        """The messages before the first reply."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, Message("user", self.turns[0])]


@dataclass
class Skips:
    """What was left out: reason -> references of the rows ("file:line (id)")."""

    rows: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, reference: str) -> None:
        self.rows.setdefault(reason, []).append(reference)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """Rows by reason."""
        return {reason: len(references) for reason, references in self.rows.items()}

    def summary(self) -> str:
        """Say in one line how many rows were skipped, why, and where the first of them are."""
        if not self.rows:
            return "0 rows skipped"
        reasons = (
            f"{reason}: {len(refs)} [{', '.join(refs[:_SHOWN_ROWS])}"
            + (", ...]" if len(refs) > _SHOWN_ROWS else "]")
            for reason, refs in self.rows.items()
        )
        return f"{self.total} rows skipped: " + "; ".join(reasons)


def read_conversations(path: str | Path, strict: bool = False) -> tuple[list[Conversation], Skips]:
    """Read rows with `messages` or `conversations`: `role`/`content` or `from`/`value` each.

    Raises ValueError when no row is left, or for the first bad row where `strict` is set.
    """
    return _read(Path(path), _conversation, strict)


def read_prompts(path: str | Path) -> tuple[list[Prompt], Skips]:
    """Read rows with `turns` (texts) and an optional `system`; of conversations, the user turns.

    Raises ValueError when no row is left.
    """
    return _read(Path(path), _prompt, strict=False)


def _read(
    path: Path, parse: Callable[[dict[str, object], str], Item], strict: bool
) -> tuple[list[Item], Skips]:
    """Parse every row of the file; `parse` gets the row and the id it has if it names none."""
    items: list[Item] = []
    skips = Skips()
    stem = path.name.split(".")[0]
    unit = "item " if path.suffix == ".json" else ""
    for number, entry in _entries(path):
        named = ""
        try:
            row = _row(entry)
            named = _id(row, "")
            items.append(parse(row, f"{stem}-{number}"))
        except RowError as error:
            if strict:
                raise ValueError(f"{path}:{unit}{number}: {error}") from error
            named = f" ({named})" if named else ""
            skips.add(str(error), f"{path.name}:{unit}{number}{named}")
    if not items:
        raise ValueError(f"{path}: no usable row; {skips.summary()}")
    return items, skips


def _entries(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (line, its bytes) or, for an array, (place from 1, element)."""
    if path.name.endswith(".json"):
        yield from enumerate(_array(path), start=1)
    elif path.name.endswith(".jsonl"):
        with path.open("rb") as file:
            yield from _lines(file)
    elif path.name.endswith(".jsonl.gz"):
        try:
            with gzip.open(path, "rb") as file:
                yield from _lines(cast(BinaryIO, file))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from error
    else:
        raise ValueError(f"{path}: unknown kind of file; use .jsonl, .jsonl.gz or .json")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, start=1):
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if text:
            yield number, text


def _array(path: Path) -> list[object]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not one JSON array ({error.msg}); "
            "a file with one object a line is named .jsonl"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not one JSON array ({error})") from error
    if not isinstance(value, list):
        raise ValueError(f"{path}: holds {_kind(value)}; a .json file holds one array of rows")
    return value


def _row(entry: object) -> dict[str, object]:
    value = entry
    if isinstance(entry, bytes):
        try:
            value = json.loads(entry.decode())
        except UnicodeDecodeError as error:
            raise RowError("not UTF-8 text") from error
        except (ValueError, RecursionError) as error:
            raise RowError("not valid JSON") from error
    if not isinstance(value, dict):
        raise RowError(f"the row is {_kind(value)}, not an object")
    return value


def _conversation(row: dict[str, object], default_id: str) -> Conversation:
    messages = _messages(row)
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise RowError("no assistant message")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("no user message before the first answer")
    finish = row.get("finish") or "stop"
    if finish not in ("stop", "length"):
        raise RowError("'finish' is neither 'stop' nor 'length'")
    return Conversation(_id(row, default_id), _category(row), tuple(messages), finish)


def _prompt(row: dict[str, object], default_id: str) -> Prompt:
    if "turns" in row:
        turns = [_text(turn, "a turn") for turn in _list(row, "turns")]
        system = None if row.get("system") is None else _text(row["system"], "'system'")
    elif not {"messages", "conversations"} & set(row):
        raise RowError("no 'turns', 'messages' or 'conversations'")
    else:
        messages = _messages(row)
        turns = [message.content for message in messages if message.role == "user"]
        system = messages[0].content if messages[0].role == "system" else None
    if not turns:
        raise RowError("no user turn")
    return Prompt(_id(row, default_id), _category(row), tuple(turns), system)


def _messages(row: dict[str, object]) -> list[Message]:
    key = next((key for key in ("messages", "conversations") if key in row), None)
    if key is None:
        raise RowError("no 'messages' or 'conversations'")
    messages = [_message(message) for message in _list(row, key)]
    if not messages:
        raise RowError("no messages")
    return messages


def _message(message: object) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"a message is {_kind(message)}, not an object")
    name = message.get("role", message.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"unknown role {name!r}")
    calls = _tool_calls(message) if role == "assistant" else ()
    content = message["content"] if "content" in message else message.get("value")
    if content is None and calls:
        return Message(role, "", calls)
    text = _text(content, f"the content of the {role}")
    if role == "assistant" and not text and not calls:
        raise RowError("empty assistant message")
    return Message(role, text, calls)


def _text(content: object, what: str) -> str:
    """Return the text of a string or of a list of text parts, joined with nothing between."""
    if not isinstance(content, str | list):
        raise RowError(f"{what} is {_kind(content)}, not text")
    parts = [content] if isinstance(content, str) else content
    text = "".join(_part(part, what) for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} holds half of a surrogate pair") from error
    return text


def _part(part: object, what: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError(f"{what} is {_kind(part)}, not text")
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RowError(f"{what} has a part of type {part.get('type')!r}, not text")
    return cast(str, part["text"])


def _tool_calls(message: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowError("'tool_calls' is not a list")
    return tuple(_tool_call(call) for call in calls)


def _tool_call(call: object) -> Mapping[str, object]:
    """Return the call with its arguments as an object, which is what templates render."""
    if not isinstance(call, dict):
        raise RowError(f"a tool call is {_kind(call)}, not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError("the arguments of a tool call are not valid JSON") from error
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if "id" in call else made


def _list(row: dict[str, object], key: str) -> list[object]:
    value = row[key]
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {_kind(value)}, not a list")
    return value


def _id(row: dict[str, object], default: str) -> str:
    value = row.get("id")
    return str(value) if isinstance(value, str | int) and value != "" else default


def _category(row: dict[str, object]) -> str:
    value = row.get("category")
    return value if isinstance(value, str) and value else "other"


def _kind(value: object) -> str:
    """Name the type of a JSON value in a message."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text"}
    names |= {list: "a list", dict: "an object"}
    return names[type(value)]
