"""Answers by the target itself: what a draft head should be trained on.

Prompts are answered in a batch whose slots refill as rows end, each with its own keyed noise, so
an answer depends on the seed and the prompt's place in the file, not on the batch (but for rounding
in half precision). Finished conversations are appended to `OUT.part` at once; a later run with the
same settings continues from there, and the complete file is sorted and renamed into place. A
conversation that ends in a loop is dropped and counted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt
from drafthead.data.files import held, write_atomically
from drafthead.heads.contract import fingerprint, template_hash
from drafthead.inference.decoder import Decoder
from drafthead.inference.evaluate import end_ids
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.warps import Warps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answering:
    """How answers are drawn; recorded with them."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    batch: int = 32


@dataclass
class _Talk:
    """One conversation under way."""

    index: int
    prompt: Prompt
    messages: list[Message]
    row: Row | None = None
    finish: str = ""
    tokens: int = 0


@dataclass
class Report:
    """What came of the prompts."""

    written: int = 0
    new_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    answering: Answering,
    template_kwargs: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Answer all turns of all prompts and write conversations as JSON lines (gzip if `out` ends in
    .gz).

    Raises FileExistsError where `out` is there already, and ValueError where its part file was made
    with other settings or another process writes to it.
    """
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, template_kwargs)
    longest = longest_context(target, chat, prompts, answering)
    with _part(out, _header(target, prompts, answering, template_kwargs or {})) as part:
        waiting = deque(
            _Talk(i, p, p.opening) for i, p in enumerate(prompts) if i not in part.finished
        )
        session = _Session(target, chat, answering, longest)
        while waiting or session.busy:
            for talk in session.step(waiting):
                part.add(talk)
                progress(len(part.finished), len(prompts))
        return part.finish()


def check_out(out: Path) -> None:
    """Refuse to write over a file, unless its part file says that it is being made."""
    if out.exists() and not _part_path(out).exists():
        raise FileExistsError(f"{out}: is there already; remove it, or name another --out")


def longest_context(
    target: Target, chat: ChatFormat, prompts: Sequence[Prompt], answering: Answering
) -> int:
    """Most tokens any conversation can come to, within the target's context."""
    longest = 0
    for prompt in prompts:
        turns = [prompt.opening, *([Message("user", turn)] for turn in prompt.turns[1:])]
        user = sum(len(chat.prompt_ids(turn)) for turn in turns)
        longest = max(longest, user + len(turns) * (answering.max_new_tokens + 8))
    return min(longest, target.context)


class _Session:
    """The batch: slots, what runs in them, and refilling."""

    def __init__(
        self, target: Target, chat: ChatFormat, answering: Answering, capacity: int
    ) -> None:
        self.target, self.chat, self.answering, self.capacity = target, chat, answering, capacity
        batch = answering.batch
        if answering.temperature == 0:
            self.sampler = Sampler()
        else:
            warps = Warps.of(answering.temperature, top_p=answering.top_p)
            self.sampler = Sampler(warps, [self._noise(slot) for slot in range(batch)])
        self.decoder = Decoder(target, self.sampler, batch=batch, capacity=capacity)
        self.talks: list[_Talk | None] = [None] * batch
        self.ends = frozenset(end_ids(target))

    def _noise(self, stream: int) -> Noise:
        return Noise(self.answering.seed, stream, self.target.vocab_size, self.target.device)

    @property
    def busy(self) -> bool:
        return any(talk is not None for talk in self.talks)

    def step(self, waiting: deque[_Talk]) -> list[_Talk]:
        """Fill free slots, run one round, and return the conversations that ended."""
        ended = []
        for slot, talk in enumerate(self.talks):
            while talk is None and waiting:
                talk = waiting.popleft()
                if not self._begin(slot, talk):
                    ended.append(talk)
                    talk = None
            self.talks[slot] = talk
        if self.decoder.running:
            self.decoder.round()
        for slot, talk in enumerate(self.talks):
            if (
                talk is not None
                and talk.row is not None
                and talk.row.done
                and self._answered(slot, talk)
            ):
                ended.append(talk)
                self.talks[slot] = None
                self.decoder.rows[slot] = None
        return ended

    def _begin(self, slot: int, talk: _Talk) -> bool:
        """Start the next turn's answer; False where the conversation no longer fits."""
        ids = self.chat.prompt_ids(talk.messages)
        limit = min(self.answering.max_new_tokens, self.capacity - len(ids))
        if limit < 1:
            talk.finish = "too long"
            return False
        if self.sampler.noise is not None:
            self.sampler.noise[slot] = self._noise(talk.index)
        talk.row = Row(ids, limit, self._stop)
        self.decoder.start(slot, talk.row)
        return True

    def _stop(self, row: Row) -> bool:
        ids = row.ids
        return ids[-1] in self.ends or (len(ids) % 16 == 0 and loops(ids))

    def _answered(self, slot: int, talk: _Talk) -> bool:
        """Take a finished answer; True when the conversation is over, else its next turn begins."""
        assert talk.row is not None
        new = talk.row.new_ids
        ended = new[-1] in self.ends
        talk.tokens += len(new)
        talk.finish = "stop" if ended else "loop" if loops(talk.row.ids) else "length"
        text = str(self.chat.tokenizer.decode(new[:-1] if ended else new))
        if not ended:
            text = text.rstrip("\ufffd")  # a character that the limit cut
        talk.messages.append(Message("assistant", text))
        turns = [m for m in talk.messages if m.role == "user"]
        if talk.finish != "stop" or len(turns) == len(talk.prompt.turns):
            return True
        talk.messages.append(Message("user", talk.prompt.turns[len(turns)]))
        return not self._begin(slot, talk)


def loops(ids: Sequence[int], longest: int = 40, copies: int = 4, least: int = 48) -> bool:
    """Whether a sequence ends in a loop: one run again and again.

    The run has at most `longest` tokens and stands there at least `copies` times, over at least
    `least` tokens.
    """
    for period in range(1, longest + 1):
        span = max(copies * period, least)
        if span <= len(ids):
            tail = ids[len(ids) - span :]
            if tail[period:] == tail[:-period]:
                return True
    return False


def _header(
    target: Target,
    prompts: Sequence[Prompt],
    answering: Answering,
    template_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """All that answers depend on: a part file continues only what was begun with the same."""
    assert target.tokenizer is not None
    named = hashlib.sha256(json.dumps([asdict(p) for p in prompts]).encode()).hexdigest()
    return {
        "answering": asdict(answering) | {"batch": None},
        "prompts": named,
        "target": fingerprint(target.model),
        "dtype": str(target.dtype),
        "template": template_hash(target.tokenizer, template_kwargs),
    }


@contextmanager
def _part(out: Path, header: Mapping[str, Any]) -> Iterator[_Part]:
    """The part file of `out`, kept to this process inside the block."""
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = _part_path(out)
    path.touch()
    with held(path):
        yield _Part(out, header)


def _part_path(out: Path) -> Path:
    return out.with_name(out.name + ".part")


class _Part:
    """The growing part file: a header line with the settings, then one conversation a line."""

    def __init__(self, out: Path, header: Mapping[str, Any]) -> None:
        self.out = out
        self.path = _part_path(out)
        self.report = Report()
        self.finished: dict[int, dict[str, Any] | None] = {}
        """Rows by the prompt's place, as ids may repeat; None where it was dropped."""
        if not self._resume(header):
            self.path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _resume(self, header: Mapping[str, Any]) -> bool:
        """Take over what a part file holds; False where not even its header is whole."""
        # A kill may have cut the last line: everything before the last line end is sound.
        sound = self.path.read_bytes().rpartition(b"\n")[0]
        try:
            lines = [json.loads(line) for line in sound.splitlines()]
        except ValueError as error:
            raise ValueError(f"{self.path}: damaged ({error}); remove it") from error
        if not lines:
            return False
        if lines[0] != header:
            raise ValueError(
                f"{self.path} was begun with another target, prompts or settings: "
                "remove it, or name another --out"
            )
        os.truncate(self.path, len(sound) + 1)
        for line in lines[1:]:
            self._count(line["index"], line["row"], line["finish"], line["tokens"])
        log.info("%s: continuing after %d conversations", self.path, len(self.finished))
        return True

    def _count(self, index: int, row: dict[str, Any] | None, finish: str, tokens: int) -> None:
        self.finished[index] = row
        self.report.new_tokens += tokens
        if row is None:
            self.report.skipped[finish] += 1
        else:
            self.report.written += 1

    def add(self, talk: _Talk) -> None:
        """Append a conversation, or that it was dropped and why."""
        dropped = talk.finish in ("too long", "loop")
        answers = [m.content for m in talk.messages if m.role == "assistant"]
        row = (
            None
            if dropped or not all(answers)
            else {
                "id": talk.prompt.id,
                "category": talk.prompt.category,
                "finish": talk.finish,
                "messages": [{"role": m.role, "content": m.content} for m in talk.messages],
            }
        )
        finish = "empty" if row is None and not dropped else talk.finish
        line = {"index": talk.index, "finish": finish, "tokens": talk.tokens, "row": row}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._count(talk.index, row, finish, talk.tokens)

    def finish(self) -> Report:
        """Write the whole file in the prompts' order, and drop the part."""
        rows = [row for _, row in sorted(self.finished.items()) if row is not None]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        packed = gzip.compress(text, mtime=0) if self.out.suffix == ".gz" else text
        write_atomically(self.out, packed)
        self.path.unlink()
        return self.report
