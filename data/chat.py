"""Turn messages into token ids and loss masks: the one place that renders a chat template.

Every answer is placed after exactly the ids a server sends for it: the template with its
generation header, tokenised once without further special tokens. So training, evaluation and
generation share ids, and no template needs generation markers. This module knows no model.

Where a template shows an earlier answer otherwise than it was emitted (it drops the thoughts, or
a token grows over the seam), the later answers go into a row of their own, after the prompt that a
server would send: every answer is supervised once, always after the context it is served with.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from drafthead.data.conversations import Conversation, Message, RowError, Skips

logger = logging.getLogger(__name__)

ROWS_VERSION = 1
"""Raise it whenever the same conversation would give other ids or another mask."""

_TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, KeyError, TypeError)
_PROBE = "drafthead"
"""An answer no template changes; where it stands shows how the template wraps an answer."""


@dataclass(frozen=True)
class Row:
    """Ids and mask of one sequence, of equal length.

    `mask[t]` is True where token t itself belongs to an answer or ends its turn: nothing is
    shifted. `id` is the conversation's, with `#2`, `#3` ... for its further rows.
    """

    id: str
    ids: list[int]
    mask: list[bool]


class ChatFormat:
    """A tokenizer's chat template with the settings that training and serving share.

    Raises ValueError for a tokenizer without a template, one whose template cannot render a plain
    exchange, and settings that are arguments of the tokenizer and not of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "the tokenizer"
            raise ValueError(f"{name} has no chat template; use an instruction-tuned target")
        self.tokenizer = tokenizer
        self.template_kwargs: dict[str, Any] = dict(template_kwargs or {})
        self._check_kwargs()
        added = sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)
        self._added_token = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._lead, self._terminator = self._answer_frame()
        if not self._terminator:
            logger.warning("the chat template ends an answer with no token: no end is supervised")

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids a server sends to have these messages answered.

        Raises what the template raises (jinja2.TemplateError, ValueError, KeyError, TypeError).
        """
        return self._encode(self._render(messages, header=True))

    def rows(self, conversation: Conversation, max_length: int) -> list[Row]:
        """Return the conversation as rows of at most `max_length` tokens: mostly one.

        Raises RowError where the template cannot render the conversation.
        """
        try:
            pieces = list(self._pieces(conversation))
        except RowError:
            raise
        except _TEMPLATE_ERRORS as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise RowError(f"the chat template refuses it: {text}") from error
        return [
            Row(f"{conversation.id}#{n}" if n > 1 else conversation.id, ids, mask)
            for n, (ids, mask) in enumerate(_join(pieces, max_length), start=1)
        ]

    def _pieces(self, conversation: Conversation) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (prompt ids, answer ids) for each assistant message."""
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not answers:
            raise RowError("no assistant message")
        # The last answer is in no prompt: only this shows whether the template refuses it.
        self._render(messages[: answers[-1] + 1], header=False)
        for i in answers:
            prompt = self._render(messages[:i], header=True)
            text, terminator = self._emitted(messages[: i + 1], prompt)
            if i == answers[-1] and conversation.finish == "length":
                terminator = ""
            prompt_ids = self._encode(prompt)
            yield prompt_ids, self._continuation(prompt, prompt_ids, text + terminator)

    def _emitted(self, messages: Sequence[Message], prompt: str) -> tuple[str, str]:
        """Return what the target emits for the last message, and how it ends the turn."""
        answer = messages[-1]
        if not answer.tool_calls:
            return self._lead + answer.content, self._terminator
        closed = self._render(messages, header=False)
        tail = closed.removeprefix(prompt)
        if tail == closed:
            raise RowError("the chat template shows tool calls after another header")
        if not all(_shows(tail, leaf) for call in answer.tool_calls for leaf in _leaves(call)):
            raise RowError("the chat template leaves out tool calls")
        ends = list(self._added_token.finditer(tail))
        return (tail[: ends[-1].start()], ends[-1][0]) if ends else (tail.rstrip(), "")

    def _continuation(self, prompt: str, prompt_ids: list[int], emitted: str) -> list[int]:
        """Return the ids of emitted text; a token that would grow over the seam cannot occur."""
        ids = self._encode(prompt + emitted)
        if ids[: len(prompt_ids)] == prompt_ids:
            # Not the text alone: SentencePiece would open it with a space that is not there.
            return ids[len(prompt_ids) :]
        return self._encode(emitted)

    def _answer_frame(self) -> tuple[str, str]:
        """Return the white space the template opens an answer with, and the text that ends it."""
        exchange = [Message("user", "Hello"), Message("assistant", _PROBE)]
        try:
            prompt = self._render(exchange[:1], header=True)
            closed = self._render(exchange, header=False)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template cannot render a plain chat: {error}") from error
        before, probe, after = closed.rpartition(_PROBE)
        if not prompt:
            raise ValueError("the chat template shows nothing before an answer")
        if not probe:
            raise ValueError("the chat template does not show the assistant's messages")
        lead = before.removeprefix(prompt)
        end = self._added_token.search(after)
        return lead if lead.isspace() else "", after[: end.end()] if end else ""

    def _render(self, messages: Sequence[Message], header: bool) -> str:
        chat: list[Any] = [_as_dict(message) for message in messages]
        text = self.tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=header,
            **self.template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        # The template has written every special token: a BOS added here would be a second one.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _check_kwargs(self) -> None:
        reserved = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        for name in self.template_kwargs:
            if name in reserved - {"tools", "documents"}:
                raise ValueError(
                    f"template_kwargs.{name}: not a setting of the template; "
                    "give only what the template itself reads"
                )
            if name not in str(self.tokenizer.chat_template):
                logger.warning("template_kwargs.%s: the chat template never reads it", name)


def build_rows(
    conversations: Sequence[Conversation],
    fmt: ChatFormat,
    max_length: int,
    min_supervised: int = 1,
) -> tuple[list[Row], Skips]:
    """Turn conversations into rows; leave out, counted, those with too little to learn from.

    Raises ValueError when no row is left.
    """
    rows: list[Row] = []
    skips = Skips()
    for conversation in conversations:
        try:
            made = fmt.rows(conversation, max_length)
        except RowError as error:
            skips.add(str(error), conversation.id)
            continue
        for row in made:
            if sum(row.mask) < min_supervised:
                reason = f"fewer than {min_supervised} supervised tokens in max_length"
                skips.add(f"{reason} {max_length}", row.id)
            else:
                rows.append(row)
    if not rows:
        raise ValueError(f"no row is left with max_length {max_length}; {skips.summary()}")
    cut = sum(len(row.ids) == max_length for row in rows)
    if cut:
        logger.info("%d of %d rows fill max_length %d and may be cut", cut, len(rows), max_length)
    return rows, skips


def rows_key(path: str | Path, fmt: ChatFormat, max_length: int, min_supervised: int = 1) -> str:
    """Return the sha256 that names the rows built from this file with these settings."""
    with Path(path).open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    parts = {
        "version": ROWS_VERSION,
        "file": [Path(path).name, content],  # the name is part of made-up row ids
        "tokenizer": _tokenizer_content(fmt.tokenizer),
        "special_tokens": fmt.tokenizer.special_tokens_map,
        "template": fmt.tokenizer.chat_template,
        "template_kwargs": fmt.template_kwargs,
        "max_length": max_length,
        "min_supervised": min_supervised,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> object:
    """Return what decides the ids of a text, without the padding set by the last call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab()
    content = json.loads(backend.to_str())
    return {key: value for key, value in content.items() if key not in ("padding", "truncation")}


def _join(
    pieces: Sequence[tuple[list[int], list[int]]], max_length: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Chain (prompt, answer) pairs while each prompt repeats the ids before it; yield the chains.

    Each chain is cut at `max_length`.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for prompt, answer in pieces:
        if prompt[: len(ids)] != ids:
            yield ids[:max_length], mask[:max_length]
            ids, mask = [], []
        mask = mask + [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
    yield ids[:max_length], mask[:max_length]


def _as_dict(message: Message) -> dict[str, object]:
    calls = {"tool_calls": list(message.tool_calls)} if message.tool_calls else {}
    return {"role": message.role, "content": message.content, **calls}


def _leaves(call: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts that a rendered call must show: its name, its arguments' keys and values."""
    function = call["function"]
    assert isinstance(function, Mapping)
    open_values: list[object] = [function["name"], function["arguments"]]
    while open_values:
        value = open_values.pop()
        if isinstance(value, Mapping):
            open_values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            open_values += value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield str(value)


def _shows(text: str, leaf: str) -> bool:
    """Say whether the text holds the leaf, plainly or as JSON writes it."""
    written = (json.dumps(leaf, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return leaf in text or any(form in text for form in written)
