"""One answer as a stream of text: whole characters only, and which of them were drafted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafthead.inference.decoder import Decoder, check_prompt
from drafthead.inference.drafters import Drafter
from drafthead.inference.evaluate import Settings, end_ids
from drafthead.inference.row import Row, stop_at
from drafthead.inference.target import Target


@dataclass(frozen=True)
class Piece:
    """A run of whole characters; `drafted` if a drafter proposed the token that completed it."""

    text: str
    drafted: bool


@dataclass
class Stream:
    """Iterate over it for the pieces; the figures are complete when it ends."""

    target: Target
    drafter: Drafter | None
    ids: Sequence[int]
    settings: Settings
    seconds: float = 0.0
    """Wall clock of the rounds so far, prefill excluded."""

    def __post_init__(self) -> None:
        check_prompt(self.target, self.ids, self.settings.max_new_tokens)
        if self.target.tokenizer is None:
            raise ValueError("this target has no tokenizer: load it with one to stream text")
        limit = self.settings.max_new_tokens
        self.row = Row(list(self.ids), limit, stop_at(end_ids(self.target)))

    def __iter__(self) -> Iterator[Piece]:
        assert self.target.tokenizer is not None
        text = _Text(self.target.tokenizer)
        capacity = len(self.ids) + self.settings.max_new_tokens
        decoder = Decoder(
            self.target, self.settings.sampler(0, self.target), self.drafter, capacity=capacity
        )
        decoder.start(0, self.row)
        yield from text.add(self.row.new_ids, [False])
        while decoder.running:
            shown, since = len(self.row.ids), time.perf_counter()
            decoder.round()
            self.seconds += time.perf_counter() - since
            last = self.row.rounds[-1]
            fresh = self.row.ids[shown:]
            yield from text.add(fresh, [i < last.accepted for i in range(len(fresh))])
        yield from text.rest()

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
