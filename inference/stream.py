"""One answer as a stream of text: whole characters only, and which of them were drafted.

It may be stopped between two pieces, as by Ctrl-C: what was shown until then is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from drafthead.inference.answering import Settings, end_ids
from drafthead.inference.decoder import Decoder, check_prompt
from drafthead.inference.drafters import Drafter
from drafthead.inference.row import Row, stop_at
from drafthead.inference.target import Target

Finish = Literal["stop", "length", "stopped"]
"""Why an answer ended: by the target's own end, by the limit, or by whoever read it."""


@dataclass(frozen=True)
class Piece:
    """A run of whole characters; `drafted` if a drafter proposed the token that completed it."""

    text: str
    drafted: bool


@dataclass
class Stream:
    """Iterate over it for the pieces, once; the figures are complete when it ends."""

    target: Target
    drafter: Drafter | None
    ids: Sequence[int]
    settings: Settings
    noise: int = 0
    """Which of the seed's streams of noise: another one gives another answer."""
    text: str = field(default="", init=False)
    """The pieces so far: of a stopped answer only whole characters."""
    stopping: bool = field(default=False, init=False)
    first_token_s: float = field(default=0.0, init=False)
    """From the beginning until the first token was there: mostly the prefill."""
    round_seconds: list[float] = field(default_factory=list, init=False)
    """Wall clock of each round so far; the prefill is none."""

    def __post_init__(self) -> None:
        check_prompt(self.target, self.ids, self.settings.max_new_tokens)
        if self.target.tokenizer is None:
            raise ValueError("this target has no tokenizer: load it with one to stream text")
        limit = self.settings.max_new_tokens
        self.row = Row(list(self.ids), limit, stop_at(end_ids(self.target)))
        self._whole = False

    def stop(self) -> None:
        """End before the next piece; harmless where it has ended, and in a signal handler."""
        self.stopping = True

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces():
            if self.stopping:
                return
            self.text += piece.text
            yield piece
        self._whole = self.row.done

    def _pieces(self) -> Iterator[Piece]:
        assert self.target.tokenizer is not None
        text = _Text(self.target.tokenizer)
        began = time.perf_counter()
        sampler = self.settings.sampler(self.noise, self.target)
        capacity = len(self.ids) + self.settings.max_new_tokens
        decoder = Decoder(self.target, sampler, self.drafter, capacity=capacity)
        decoder.start(0, self.row)
        self.first_token_s = time.perf_counter() - began
        yield from text.add(self.row.new_ids, [False])
        while decoder.running and not self.stopping:
            shown, since = len(self.row.ids), time.perf_counter()
            decoder.round()
            self.round_seconds.append(time.perf_counter() - since)
            last = self.row.rounds[-1]
            fresh = self.row.ids[shown:]
            yield from text.add(fresh, [i < last.accepted for i in range(len(fresh))])
        yield from text.rest()

    @property
    def finish(self) -> Finish:
        """Complete when the pieces are."""
        if not self._whole:
            return "stopped"
        return "stop" if self.row.stop(self.row) else "length"

    @property
    def seconds(self) -> float:
        """Wall clock of the rounds so far, prefill excluded."""
        return sum(self.round_seconds)

    @property
    def tokens(self) -> int:
        """Tokens that the rounds emitted."""
        return sum(r.emitted for r in self.row.rounds)

    @property
    def tau(self) -> float:
        return self.tokens / len(self.row.rounds) if self.row.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Text:
    """Turns ids into text as soon as the characters are whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._before: list[int] = []  # shown last, as decoding may depend on what precedes

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def add(self, ids: Sequence[int], drafted: Sequence[bool]) -> Iterator[Piece]:
        for token, mark in zip(ids, drafted, strict=True):
            self._pending.append(token)
            fresh = self._fresh()
            if fresh and not fresh.endswith("\ufffd"):
                yield Piece(fresh, mark)
                self._before, self._pending = self._pending, []

    def rest(self) -> Iterator[Piece]:
        """What never became whole, as the tokenizer shows it."""
        if fresh := self._fresh():
            yield Piece(fresh, False)
        self._pending = []

    def _fresh(self) -> str:
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]
