"""Conversations while they are answered, and the file that grows with them.

Whoever answers (`regenerate` with the target, `endpoint` through a server) takes talks and gives
them back when they are over. Each is appended to `OUT.part` at once and flushed to the disk, so a
run that was killed continues after the last whole line; the complete file is sorted by the prompts'
order and renamed into place. What is left out of it is decided only then, so no answer is lost to
a filter. This module knows no model and no server.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drafthead.data.conversations import Message, Prompt
from drafthead.data.files import held, sound_lines, write_atomically

log = logging.getLogger(__name__)

VERSION = 2
"""Raise it whenever the same settings would give other answers, or lines another form."""

LOOP, CUT, EMPTY = "loop", "cut", "empty"
KINDS = (LOOP, CUT, EMPTY)
"""Answers that a head may not want to learn: each is counted, and dropped where that is asked."""
DROPPED = frozenset({LOOP, EMPTY})
"""What is dropped where nothing else is asked for."""


@dataclass(frozen=True)
class Answering:
    """How answers are drawn; recorded with them."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int | None = 0
    """None: whatever a server does by itself; here it must be a number."""
    batch: int = 32
    """Conversations under way at a time; answers do not depend on it."""
    top_k: int = 0
    """0: off."""


@dataclass(frozen=True)
class Answer:
    """One reply as it was emitted."""

    text: str
    """Without what ended it."""
    finish: str
    """`stop`: it ended by itself; `length`: a limit cut it; `loop`: it was going round."""
    tokens: int
    ids: list[int] | None = None
    """As emitted, the id that ended it included; None where a server does not tell."""


@dataclass
class Talk:
    """One conversation under way: the prompt's turns, each with its reply."""

    index: int
    """The prompt's place in the file."""
    prompt: Prompt
    messages: list[Message]
    answers: list[Answer] = field(default_factory=list)
    finish: str = ""

    @classmethod
    def of(cls, index: int, prompt: Prompt) -> Talk:
        return cls(index, prompt, prompt.opening)

    @property
    def stream(self) -> int:
        """Keys the noise of the next answer: a number of its own for each turn.

        A template may drop earlier thoughts, so that a later answer starts before the place where
        an earlier one ended: with one number for both, they would share noise.
        """
        return self.index + (len(self.answers) << 40)

    def take(self, answer: Answer) -> bool:
        """Take a reply; True when the conversation is over, else the next turn has been put."""
        self.answers.append(answer)
        self.messages.append(Message("assistant", answer.text))
        self.finish = answer.finish
        turn = len(self.answers)
        if answer.finish != "stop" or turn == len(self.prompt.turns):
            return True
        self.messages.append(Message("user", self.prompt.turns[turn]))
        return False

    def give_up(self, why: str) -> None:
        """The turn that was put gets no reply: the conversation ends before it."""
        if self.answers:
            self.messages.pop()
        else:
            self.finish = why

    @property
    def kind(self) -> str:
        """One of KINDS, `fine`, or why there is no reply at all."""
        if not self.answers:
            return self.finish
        if self.finish == "loop":
            return LOOP
        if not all(answer.text for answer in self.answers):
            return EMPTY
        return CUT if self.finish == "length" else "fine"

    def row(self, made: Mapping[str, Any]) -> dict[str, Any] | None:
        """The conversation as `data.conversations` reads it; None without any reply."""
        if not self.answers:
            return None
        replies = iter(self.answers)
        messages = []
        for message in self.messages:
            shown: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant" and (ids := next(replies).ids) is not None:
                shown["ids"] = ids
            messages.append(shown)
        row: dict[str, Any] = {"id": self.prompt.id, "category": self.prompt.category}
        # A loop was ended from outside: no end of turn follows it, as after any cut.
        row |= {"finish": "stop" if self.finish == "stop" else "length"}
        row |= {"loop": True} if self.finish == "loop" else {}
        return row | {"messages": messages, "made": dict(made)}


@dataclass
class Report:
    """What came of the prompts."""

    written: int = 0
    new_tokens: int = 0
    """All that were emitted, those of dropped conversations included."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Conversations left out, by what was wrong."""
    kept: Counter[str] = field(default_factory=Counter)
    """Conversations written although they are of one of KINDS."""


Answerer = Callable[[Sequence[Talk]], Iterator[Talk]]
"""Answers talks, in any order, and gives each back as soon as it is over."""


def answer_all(
    answerer: Answerer,
    prompts: Sequence[Prompt],
    out: Path,
    header: Mapping[str, Any],
    made: Mapping[str, Any],
    *,
    drop: Iterable[str] = DROPPED,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Have all prompts answered and write conversations as JSON lines (gzip if `out` ends in .gz).

    header: all that answers depend on; made: what rows say about it. Raises FileExistsError where
    `out` is there already, and ValueError where its part file was made with another header, is
    damaged or is written by another process.
    """
    named = hashlib.sha256(json.dumps([asdict(p) for p in prompts]).encode()).hexdigest()
    with _part(out, {"version": VERSION, "prompts": named, **header}) as part:
        talks = [Talk.of(i, p) for i, p in enumerate(prompts) if i not in part.finished]
        for talk in answerer(talks):
            part.add(talk, made)
            progress(len(part.finished), len(prompts))
        return part.finish(frozenset(drop))


def check_out(out: Path) -> None:
    """Refuse to write over a file, unless its part file says that it is being made."""
    if out.exists() and not part_path(out).exists():
        raise FileExistsError(f"{out}: is there already; remove it, or name another --out")


def kinds(text: str) -> frozenset[str]:
    """Read a list of KINDS, as `loop,empty`; `none` for none of them. ValueError for another."""
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if names == {"none"}:
        return frozenset()
    if unknown := sorted(names - set(KINDS)):
        raise ValueError(f"--drop {unknown[0]!r}: choose from {', '.join(KINDS)}, or none")
    return names


def part_path(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def begun(out: Path) -> bool:
    """Whether the part file holds a conversation."""
    try:
        with part_path(out).open("rb") as file:
            return len(list(islice(file, 2))) == 2
    except FileNotFoundError:
        return False


@contextmanager
def _part(out: Path, header: Mapping[str, Any]) -> Iterator[_Part]:
    """The part file of `out`, kept to this process inside the block."""
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = part_path(out)
    path.touch()
    with held(path):
        part = _Part(out, header)
        try:
            yield part
        finally:
            if not part.finished:  # a header alone is worth nothing
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Line:
    """One finished conversation in the part file."""

    index: int
    kind: str
    tokens: int
    row: dict[str, Any] | None


_LINES = TypeAdapter(_Line)


class _Part:
    """The growing part file: a header line with the settings, then one conversation a line."""

    def __init__(self, out: Path, header: Mapping[str, Any]) -> None:
        self.out = out
        self.path = part_path(out)
        self.finished: dict[int, _Line] = {}
        """By the prompt's place, as ids may repeat."""
        if not self._resume(header):
            self.path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _resume(self, header: Mapping[str, Any]) -> bool:
        """Take over what a part file holds; False where not even its header is whole."""
        lines, sound = sound_lines(self.path)
        if not lines:
            return False
        if lines[0] != json.loads(json.dumps(header)):
            raise ValueError(
                f"{self.path} was begun with another target, prompts or settings: "
                "remove it, or name another --out"
            )
        os.truncate(self.path, sound)
        for line in lines[1:]:
            taken = _line_of(self.path, line)
            self.finished[taken.index] = taken
        log.info("%s: continuing after %d conversations", self.path, len(self.finished))
        return True

    def add(self, talk: Talk, made: Mapping[str, Any]) -> None:
        """Append a conversation, and return when it is on the disk."""
        tokens = sum(answer.tokens for answer in talk.answers)
        line = _Line(talk.index, talk.kind, tokens, talk.row(made))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.finished[talk.index] = line

    def finish(self, drop: frozenset[str]) -> Report:
        """Write the whole file in the prompts' order, and drop the part."""
        report, rows = Report(), []
        for _, line in sorted(self.finished.items()):
            report.new_tokens += line.tokens
            if line.row is None or line.kind in drop:
                report.skipped[line.kind] += 1
                continue
            report.written += 1
            rows.append(json.dumps(line.row, ensure_ascii=False) + "\n")
            if line.kind in KINDS:
                report.kept[line.kind] += 1
        text = "".join(rows).encode()
        packed = gzip.compress(text, mtime=0) if self.out.suffix == ".gz" else text
        write_atomically(self.out, packed)
        self.path.unlink()
        return report


def _line_of(path: Path, found: object) -> _Line:
    """A line as it was appended; ValueError where it is sound JSON but no conversation."""
    try:
        return _LINES.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: damaged (a line is no conversation: {where} {first['msg']}); remove it"
        ) from error
