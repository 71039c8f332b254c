"""Turn messages into token ids and loss masks: the one place that renders a chat template.

Every answer is placed after exactly the ids a server sends for it: the template with its
generation header, tokenised once without further special tokens. So training, evaluation and
generation share ids, and no template needs generation markers. This module knows no model.

Which tokens are supervised, in one rule: those that the target emits for an answer, its end of turn
included unless the answer was cut by a limit; where the template has generation markers, only those
of them that stand inside markers, and the end of turn of an answer of which any does. (A serving
engine waits for that end, so a draft must learn it, though many templates leave it outside.)

Where a template shows an earlier answer otherwise than it was emitted (it drops the thoughts, or
a token grows over the seam), the later answers go into a row of their own, after the prompt that a
server would send: every answer is supervised once, always after the context it is served with.
An answer's text that repeats what its header has begun (`<think>` in some) is taken without it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from drafthead.data import markers
from drafthead.data.calls import shows_call
from drafthead.data.conversations import Conversation, Message, RowError, Skips, Tokenised
from drafthead.data.rows import Origin, Piece, Row, fitting, join
from drafthead.data.sources import content_of

__all__ = ["ChatFormat", "Row", "build_rows", "check_settings", "rows_key"]

logger = logging.getLogger(__name__)

ROWS_VERSION = 2
"""Raise it whenever the same conversation would give other ids or another mask."""

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
_QUESTION, _PROBE = "Hello", "drafthead"
"""An exchange no template changes; where the answer stands shows how the template wraps one."""
_HEADER = 100
"""Characters at a prompt's end among which the beginning of an answer is looked for."""
_REASON = 200
"""Characters of a template's own message that are repeated."""


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
        self._added_ids = frozenset(tokenizer.added_tokens_encoder.values())
        self._lead, self._closing, self.example = self._answer_frame()
        end = self._added_token.search(self._closing)
        self._terminator = self._closing[: end.end()] if end else ""
        self._end = end[0] if end else ""
        if not self._terminator:
            logger.warning("the chat template ends an answer with no token: no end is supervised")
        self.by_markers = self._markers_work()
        """Whether generation markers decide which tokens of an answer are supervised."""

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """Return the ids a server sends to have these messages answered.

        Raises RowError where the template cannot render them.
        """
        return self._encode(self._render(messages, header=True, tools=tools))

    def rows(self, example: Conversation | Tokenised, max_length: int) -> list[Row]:
        """Return the conversation as rows of at most `max_length` tokens: mostly one.

        Raises RowError where the template cannot render the conversation.
        """
        return [
            Row(row.id, row.ids[:max_length], row.mask[:max_length])
            for row in join(example.id, self.pieces(example))
        ]

    def pieces(self, example: Conversation | Tokenised) -> list[Piece]:
        """Return a conversation's answers in order; RowError where it cannot be rendered."""
        if isinstance(example, Tokenised):
            if max(example.ids) >= len(self.tokenizer):
                raise RowError(f"an id is not one of the tokenizer's {len(self.tokenizer)}")
            return [Piece([], list(example.ids), list(example.mask), "ids")]
        return list(self._pieces(example))

    def _pieces(self, conversation: Conversation) -> Iterator[Piece]:
        messages, tools = conversation.messages, conversation.tools
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not answers:
            raise RowError("no assistant message")
        # The last answer is in no prompt: only this shows whether the template refuses it.
        self._render(messages[: answers[-1] + 1], header=False, tools=tools)
        for i in answers:
            prompt = self._render(messages[:i], header=True, tools=tools)
            text, terminator = self._emitted(messages[: i + 1], prompt, tools)
            cut = i == answers[-1] and conversation.finish == "length"
            prompt_ids = self._encode(prompt)
            inside = self._inside(messages[: i + 1], prompt, text, tools)
            kept = self._kept(messages[i], text)
            if kept is not None:
                ids, ended = kept
                mask = self._mask(ids[: len(ids) - ended], text, inside) + [any(inside)] * ended
            elif self._end and self._end in messages[i].content:
                raise RowError(f"the text of an answer holds the end of a turn, {self._end}")
            else:
                terminator = "" if cut else terminator
                ids = self._continuation(prompt, prompt_ids, text + terminator)
                ends = [any(inside)] * len(terminator)
                mask = self._mask(ids, text + terminator, inside + ends)
            origin: Origin = "kept" if kept else "re-encoded" if messages[i].ids else "text"
            yield Piece(prompt_ids, ids, mask, origin)

    def _emitted(
        self, messages: Sequence[Message], prompt: str, tools: Sequence[Mapping[str, object]]
    ) -> tuple[str, str]:
        """Return what the target emits for the last message, and how it ends the turn."""
        answer = messages[-1]
        if not answer.tool_calls and not answer.reasoning:
            text = _continued(prompt, answer.content)
            return text if text.startswith(self._lead) else self._lead + text, self._terminator
        closed = self._render(messages, header=False, tools=tools)
        tail = closed.removeprefix(prompt)
        what = "tool calls" if answer.tool_calls else "the reasoning"
        if tail == closed:
            raise RowError(f"the chat template shows {what} after another header")
        if not all(shows_call(tail, call) for call in answer.tool_calls):
            raise RowError("the chat template leaves out tool calls")
        if (answer.reasoning or "").strip() not in tail or answer.content.strip() not in tail:
            raise RowError("the chat template leaves out the reasoning or the text of an answer")
        if self._closing and tail.endswith(self._closing):
            return tail.removesuffix(self._closing), self._terminator
        ends = list(self._added_token.finditer(tail))
        return (tail[: ends[-1].start()], ends[-1][0]) if ends else (tail.rstrip(), "")

    def _kept(self, answer: Message, text: str) -> tuple[list[int], bool] | None:
        """Return the message's own ids, and whether the last one ends the turn.

        None where there are none, or where this tokenizer reads them as another text.
        """
        if not answer.ids or max(answer.ids) >= len(self.tokenizer):
            return None
        ids, texts = list(answer.ids), (answer.content, text)
        ended = ids[-1] in self._added_ids
        if self.tokenizer.decode(ids) in texts:
            return ids, False
        if ended and self.tokenizer.decode(ids[:-1]) in texts:
            return ids, True
        # Some who write ids down leave special tokens out of the text.
        if self.tokenizer.decode(ids, skip_special_tokens=True) in texts:
            return ids, ended
        return None

    def _inside(
        self,
        messages: Sequence[Message],
        prompt: str,
        text: str,
        tools: Sequence[Mapping[str, object]],
    ) -> list[bool]:
        """Say for each character of the last message, as emitted, whether it is supervised."""
        if not self.by_markers:
            return [True] * len(text)
        closed = self._render(messages, header=False, tools=tools)
        marked = markers.marked(
            self._template(tools),
            closed,
            lambda template: self._render(messages, header=False, tools=tools, template=template),
        )
        inside = marked and marked.within(prompt, text, self._closing)
        if not inside:
            raise RowError("the chat template's generation markers cannot be followed")
        return inside

    def _mask(self, ids: Sequence[int], text: str, inside: Sequence[bool]) -> list[bool]:
        """Say for each id of a text whether it is supervised, given which characters are."""
        if all(inside):
            return [True] * len(ids)
        mask = markers.tokens_inside(self.tokenizer, ids, text, inside)
        if mask is None:
            raise RowError("the tokens inside the chat template's generation markers are not clear")
        return mask

    def _continuation(self, prompt: str, prompt_ids: list[int], emitted: str) -> list[int]:
        """Return the ids of emitted text; a token that would grow over the seam cannot occur."""
        ids = self._encode(prompt + emitted)
        if ids[: len(prompt_ids)] == prompt_ids:
            # Not the text alone: SentencePiece would open it with a space that is not there.
            return ids[len(prompt_ids) :]
        return self._encode(emitted)

    def _answer_frame(self) -> tuple[str, str, str]:
        """Return the white space before an answer, all that follows it, and a rendered exchange."""
        exchange = [Message("user", _QUESTION), Message("assistant", _PROBE)]
        try:
            prompt = self._render(exchange[:1], header=True)
            closed = self._render(exchange, header=False)
        except RowError as error:
            raise ValueError(f"no plain chat can be rendered: {error}") from error
        before, probe, after = closed.rpartition(_PROBE)
        if not prompt:
            raise ValueError("the chat template shows nothing before an answer")
        if not probe:
            raise ValueError("the chat template does not show the assistant's messages")
        if _QUESTION not in prompt:
            raise ValueError("the chat template does not show the user's messages as text")
        lead = before.removeprefix(prompt)
        return lead if lead.isspace() else "", after, prompt + closed

    def _markers_work(self) -> bool:
        if not markers.has_markers(self._template(())):
            return False
        exchange = [Message("user", _QUESTION), Message("assistant", _PROBE)]
        self.by_markers = True
        prompt = self._render(exchange[:1], header=True)
        try:
            return any(self._inside(exchange, prompt, self._lead + _PROBE, ()))
        except RowError:
            logger.warning("the chat template's generation markers cannot be followed: ignored")
            return False

    def _template(self, tools: Sequence[Mapping[str, object]]) -> str:
        """Return the template of a chat; some tokenizers have another one for chats with tools."""
        given = list(map(dict, tools)) or self.template_kwargs.get("tools")
        return str(self.tokenizer.get_chat_template(tools=given))

    def _render(
        self,
        messages: Sequence[Message],
        header: bool,
        tools: Sequence[Mapping[str, object]] = (),
        template: str | None = None,
    ) -> str:
        chat: list[Any] = [message.as_dict() for message in messages]
        settings = self.template_kwargs | ({"tools": list(tools)} if tools else {})
        try:
            text = self.tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=header,
                chat_template=template,
                **settings,
            )
            assert isinstance(text, str)
            text.encode()  # half of a surrogate pair in a call or a tool
        except _TEMPLATE_ERRORS as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:_REASON]
            said = "".join(letter if letter.isprintable() else " " for letter in said)
            raise RowError(f"the chat template refuses it: {said}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        # The template has written every special token: a BOS added here would be a second one.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _check_kwargs(self) -> None:
        reserved = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        template = str(self.tokenizer.chat_template)
        for name in self.template_kwargs:
            if name in reserved - {"tools", "documents"}:
                raise ValueError(
                    f"template_kwargs.{name}: not a setting of the template; "
                    "give only what the template itself reads"
                )
            if name not in template:
                logger.warning("template_kwargs.%s: the chat template never reads it", name)
        if "strftime_now" in template and "date_string" not in self.template_kwargs:
            logger.warning(
                "the chat template may write today's date: rows of another day are other rows; "
                "fix it where the template allows, such as by template_kwargs.date_string"
            )


def _continued(prompt: str, content: str) -> str:
    """Return an answer without what the prompt's header has begun, such as `<think>`."""
    said = content.lstrip()
    white = prompt[len(prompt.rstrip()) :]
    for mark in re.finditer("<", prompt[-_HEADER:]):
        begun = prompt[-_HEADER:][mark.start() :].rstrip()
        if said.startswith(begun):
            return said.removeprefix(begun).removeprefix(white)
    return content


def build_rows(
    examples: Sequence[Conversation | Tokenised],
    fmt: ChatFormat,
    max_length: int,
    min_supervised: int = 1,
) -> tuple[list[Row], Skips]:
    """Turn conversations into rows; leave out, counted, those with too little to learn from.

    Raises ValueError when no row is left.
    """
    check_settings(examples, fmt)
    rows: list[Row] = []
    skips = Skips()
    origins: Counter[Origin] = Counter()
    for example in examples:
        try:
            pieces = fmt.pieces(example)
            made = join(example.id, pieces)
        except RowError as error:
            skips.add(str(error), example.id)
            continue
        origins.update(piece.origin for piece in pieces)
        rows += fitting(made, max_length, min_supervised, skips)
    if not rows:
        raise ValueError(f"no row is left with max_length {max_length}; {skips.summary()}")
    cut = sum(len(row.ids) == max_length for row in rows)
    if cut:
        logger.info("%d of %d rows fill max_length %d and may be cut", cut, len(rows), max_length)
    if origins["re-encoded"]:
        logger.warning(
            "%d of %d answers with ids of their own were encoded anew: "
            "this tokenizer reads those ids as another text",
            origins["re-encoded"],
            origins["re-encoded"] + origins["kept"],
        )
    return rows, skips


def check_settings(examples: Sequence[Conversation | Tokenised], fmt: ChatFormat) -> None:
    """Warn of answers that were written under other template arguments than these (F07)."""
    told = [example.answered_with for example in examples if isinstance(example, Conversation)]
    others = [found for found in told if found not in (None, fmt.template_kwargs)]
    if others:
        logger.warning(
            "%d of %d conversations were answered with template arguments %s, not with %s: "
            "give the same, or answer the prompts anew",
            len(others),
            len(told),
            others[0],
            fmt.template_kwargs,
        )


def rows_key(source: str | Path, fmt: ChatFormat, max_length: int, min_supervised: int = 1) -> str:
    """Return the sha256 that names the rows built from this source with these settings."""
    parts = {
        "version": ROWS_VERSION,
        "files": content_of(source),  # their names are part of made-up row ids
        "tokenizer": _tokenizer_content(fmt.tokenizer),
        "special_tokens": fmt.tokenizer.special_tokens_map,
        "template": fmt.tokenizer.chat_template,
        "template_kwargs": fmt.template_kwargs,
        "rendered": fmt.example,  # some templates write the date
        "mask": "markers" if fmt.by_markers else "rendering",
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
