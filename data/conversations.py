"""Read conversations and prompts row by row, and say which rows could not be used.

A bad row costs that row only: it is skipped with a reason, or refused with its place where `strict`
is set. Where rows come from is `sources`' part; what a template cannot render is found in `chat`.

| row | read as |
| --- | --- |
| `messages` or `conversations` | turns of `role`/`content` or `from`/`value`; `tools` if there |
| `prompt` with `completion` or `response` | one exchange; either may be a list of messages |
| `instruction` (`input`) with `output` or `response` | one exchange; so too question and answer |
| `input_ids` with `loss_mask` or `labels` | ids and mask as they are |
| `turns`, or a list of texts as `prompt` | prompts only; `language` if there |

`system` (or `system_prompt`) of a row comes before its messages, and the pairs of its `history`
before its question.

One rule for roles that do not alternate: messages are kept as they are, never merged or reordered,
so each assistant message is one answer, also the second of two in a row. A conversation needs a
user message before its first answer; messages after its last answer have nothing to teach.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from drafthead.data.messages import Message, message_of, parsed, text_of, token_ids, tools_of
from drafthead.data.sources import RowError, entries, kind

__all__ = [
    "Conversation",
    "Finish",
    "Message",
    "Prompt",
    "RowError",
    "Skips",
    "Tokenised",
    "read_conversations",
    "read_prompts",
]

Finish = Literal["stop", "length"]
Item = TypeVar("Item")

_QUESTIONS = ("prompt", "instruction", "question", "query")
_CONTEXTS = ("input", "context")
_ANSWERS = ("completion", "response", "output", "answer")
_SYSTEMS = ("system", "system_prompt")
_NAMES = ("id", "question_id", "prompt_id")
_LANGUAGES = ("language", "lang")
_OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_IDS = ("input_ids", "ids")
_MASKS = ("loss_mask", "mask", "assistant_masks", "completion_mask")
_IGNORED = -100
"""The label of a position that is not trained."""
_SHOWN_ROWS = 3
"""Row references that a summary names for each reason."""


@dataclass(frozen=True)
class Conversation:
    """Messages with at least one answer.

    `finish` says how the last answer ended: "length" means cut by a limit, so no end of turn
    follows it. `tools` are those the assistant could call. `answered_with` are the template
    arguments under which the answers were written, where the row tells.
    """

    id: str
    category: str
    messages: Sequence[Message]
    finish: Finish = "stop"
    tools: tuple[Mapping[str, object], ...] = ()
    answered_with: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Tokenised:
    """A row that came as token ids; `mask[t]` is True where token t itself is trained."""

    id: str
    category: str
    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class Prompt:
    """User turns to send one after another, each after the reply to the one before."""

    id: str
    category: str
    turns: Sequence[str]
    system: str | None = None
    language: str = ""
    """As the row names it; empty where it does not."""

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


def read_conversations(
    source: str | Path, strict: bool = False
) -> tuple[list[Conversation | Tokenised], Skips]:
    """Read a file, folder or data set of conversations, or of rows that are token ids already.

    Raises ValueError when no row is left, or for the first bad row where `strict` is set.
    """
    return _read(source, _example, strict)


def read_prompts(source: str | Path) -> tuple[list[Prompt], Skips]:
    """Read rows with `turns` (texts) and an optional `system`; of conversations, the user turns.

    Raises ValueError when no row is left.
    """
    return _read(source, _prompt, strict=False)


def _read(
    source: str | Path, parse: Callable[[dict[str, object], str], Item], strict: bool
) -> tuple[list[Item], Skips]:
    """Parse every row of the source; `parse` gets the row and the id it has if it names none."""
    items: list[Item] = []
    skips = Skips()
    for entry in entries(source):
        named = ""
        try:
            row = _row(entry.value)
            named = _id(row, "")
            items.append(parse(row, entry.default_id))
        except RowError as error:
            if strict:
                raise ValueError(f"{entry.path}:{entry.place}: {error}") from error
            named = f" ({named})" if named else ""
            skips.add(str(error), f"{Path(entry.path).name}:{entry.place}{named}")
    if not items:
        found = f"no usable row; {skips.summary()}" if skips.total else "no row at all"
        raise ValueError(f"{source}: {found}")
    return items, skips


def _row(value: object) -> dict[str, object]:
    """Return the row's keys and values, without those that hold null."""
    if isinstance(value, RowError):
        raise value
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode())
        except UnicodeDecodeError as error:
            raise RowError("not UTF-8 text") from error
        except (ValueError, RecursionError) as error:
            raise RowError("not valid JSON") from error
    if not isinstance(value, dict):
        raise RowError(f"the row is {kind(value)}, not an object")
    return {key: item for key, item in value.items() if item is not None}


def _example(row: dict[str, object], default_id: str) -> Conversation | Tokenised:
    if not _holds_messages(row) and _key(row, _IDS):
        return _tokenised(row, default_id)
    messages = _messages(row)
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise RowError("no assistant message")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("no user message before the first answer")
    finish = row.get("finish") or "stop"
    if finish not in ("stop", "length"):
        raise RowError("'finish' is neither 'stop' nor 'length'")
    return Conversation(
        _id(row, default_id),
        _category(row),
        tuple(messages),
        finish,
        tools_of(row.get("tools")),
        _answered_with(row),
    )


def _answered_with(row: dict[str, object]) -> Mapping[str, object] | None:
    made = row.get("made")
    found = made.get("template_kwargs") if isinstance(made, dict) else None
    found = row.get("chat_template_kwargs") if found is None else found
    return found if isinstance(found, dict) else None


def _prompt(row: dict[str, object], default_id: str) -> Prompt:
    if row.get("tools"):
        raise RowError("a prompt with tools, which are not read")
    said = "turns" if "turns" in row else _turns_as_texts(row)
    if said is not None:
        turns = [text_of(turn, "a turn") for turn in _list(row, said)]
        system = _system(row)
    elif not _holds_messages(row) and not _key(row, _QUESTIONS):
        raise RowError("no 'turns', 'messages', 'conversations' or 'prompt'")
    else:
        messages = _messages(row) if _holds_messages(row) else _opened(row, _asked(row))
        if any(message.role == "tool" or message.tool_calls for message in messages):
            raise RowError("a prompt with tools, which are not read")
        turns = [message.content for message in messages if message.role == "user"]
        system = messages[0].content if messages and messages[0].role == "system" else None
    if not turns:
        raise RowError("no user turn")
    language = _word(row, _LANGUAGES)
    return Prompt(_id(row, default_id), _category(row), tuple(turns), system, language)


def _turns_as_texts(row: dict[str, object]) -> str | None:
    """The key of a question that is a list of texts, which are turns; a list of messages is not."""
    key = None if _holds_messages(row) else _key(row, _QUESTIONS)
    value = None if key is None else row[key]
    texts = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    return key if texts else None


def _holds_messages(row: Mapping[str, object]) -> bool:
    return _key(row, ("messages", "conversations")) is not None


def _messages(row: dict[str, object]) -> list[Message]:
    key = _key(row, ("messages", "conversations"))
    if key is not None:
        messages = [message_of(message) for message in _list(row, key)]
        if not messages:
            raise RowError("no messages")
        return _opened(row, messages)
    answer = _key(row, _ANSWERS)
    if _key(row, _QUESTIONS) is None or answer is None:
        if "turns" in row:
            raise RowError("'turns' are prompts without answers; `drafthead regenerate` adds them")
        raise RowError("no 'messages', 'conversations', or 'prompt' with 'completion'")
    said = row[answer]
    if not isinstance(said, list):
        said = [{"role": "assistant", "content": said}]
    return _opened(row, [*_asked(row), *(message_of(message) for message in said)])


def _opened(row: dict[str, object], messages: list[Message]) -> list[Message]:
    """Put the row's own system text before its messages."""
    if any(row.get(key) for key in _OTHER_MEDIA):
        raise RowError("the row holds images, video or sound, which are not read")
    system = _system(row)
    if system is None:
        return messages
    if not messages or messages[0].role != "system":
        return [Message("system", system), *messages]
    if messages[0].content != system:
        raise RowError("'system' is another text than the system message")
    return messages


def _system(row: dict[str, object]) -> str | None:
    key = _key(row, _SYSTEMS)
    return None if key is None else text_of(row[key], f"{key!r}") or None


def _asked(row: dict[str, object]) -> list[Message]:
    """Return the messages of a row's question: a list of them, or a text with what it is about."""
    key = _key(row, _QUESTIONS)
    assert key is not None
    question = row[key]
    if isinstance(question, list):
        return [message_of(message) for message in question]
    texts = [text_of(question, f"{key!r}")]
    about = _key(row, _CONTEXTS)
    if about is not None and row[about]:
        texts.append(text_of(row[about], f"{about!r}"))
    return [*_history(row), Message("user", "\n\n".join(texts))]


def _history(row: dict[str, object]) -> list[Message]:
    """Return the exchanges before a question, which are pairs of texts."""
    messages = []
    for pair in _list(row, "history") if row.get("history") else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("'history' holds what is no pair of question and answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append(Message(role, text_of(text, "'history'")))
    return messages


def _tokenised(row: dict[str, object], default_id: str) -> Tokenised:
    """Read ids with their mask; padding that an attention mask names is cut off."""
    key = _key(row, _IDS)
    assert key is not None
    ids = token_ids(row[key], f"{key!r}")
    mask = _loss_mask(row, key, ids)
    if "attention_mask" in row:
        real = _bits(row, "attention_mask", len(ids))
        ids = tuple(token for token, keep in zip(ids, real, strict=True) if keep)
        mask = tuple(on for on, keep in zip(mask, real, strict=True) if keep)
    if not any(mask):
        raise RowError("the mask is all zeros: no token is trained")
    if all(mask):
        raise RowError("the mask is all ones: the prompt would be trained too")
    return Tokenised(_id(row, default_id), _category(row), ids, mask)


def _loss_mask(row: dict[str, object], key: str, ids: Sequence[int]) -> tuple[bool, ...]:
    named = _key(row, _MASKS)
    if named is not None:
        return _bits(row, named, len(ids))
    if "labels" not in row:
        raise RowError(f"{key!r} without 'loss_mask' or 'labels'")
    labels = _list(row, "labels")
    if len(labels) != len(ids):
        raise RowError(f"'labels' has {len(labels)} entries for {len(ids)} ids")
    if any(label not in (_IGNORED, token) for label, token in zip(labels, ids, strict=True)):
        raise RowError(f"'labels' are neither the ids themselves nor {_IGNORED}")
    return tuple(label != _IGNORED for label in labels)


def _bits(row: dict[str, object], key: str, length: int) -> tuple[bool, ...]:
    bits = _list(row, key)
    if len(bits) != length:
        raise RowError(f"{key!r} has {len(bits)} entries for {length} ids")
    if not all(isinstance(bit, int) and bit in (0, 1) for bit in bits):
        raise RowError(f"{key!r} holds something else than 0 and 1")
    return tuple(bool(bit) for bit in bits)


def _key(row: Mapping[str, object], keys: Sequence[str]) -> str | None:
    """Return the first of the keys that the row has."""
    return next((key for key in keys if key in row), None)


def _list(row: dict[str, object], key: str) -> list[object]:
    value = parsed(row[key])
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind(value)}, not a list")
    return value


def _id(row: dict[str, object], default: str) -> str:
    value = row.get(_key(row, _NAMES) or "id")
    # Ids go into messages and names: one that would move a terminal's cursor is none.
    usable = isinstance(value, str | int) and value != "" and str(value).isprintable()
    return str(value) if usable else default


def _category(row: dict[str, object]) -> str:
    return _word(row, ("category",)) or "other"


def _word(row: dict[str, object], keys: Sequence[str]) -> str:
    """The text under the first of these keys that the row has; empty where it is no label."""
    value = row.get(_key(row, keys) or keys[0])
    return value if isinstance(value, str) and value.isprintable() else ""
