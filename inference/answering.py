"""Turns answered by one drafter, one by one or in slots that are refilled, with each round's time.

A round's time is shared equally among the rows that run in it, so that figures of any group of
prompts are sums over its own rounds. Prefill is in no round: it ends with the first token, whose
time is kept apart. A turn that cannot be answered costs itself only, and says why.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafthead.inference.decoder import PARTS, Decoder, check_prompt
from drafthead.inference.drafters import Drafter
from drafthead.inference.metrics import Round
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.warps import Warps

FAILURES = (ValueError, ArithmeticError, RuntimeError)
"""What one prompt may cause: no room, logits that are not finite, memory that is not there."""


@dataclass(frozen=True)
class Settings:
    """How the prompts are answered."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rule: str = "coupled"
    lossy: bool = False
    """Allow a rule that changes the text; it must then be one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: give a number of 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p}: give a share above 0 and at most 1, 1 for all")

    def sampler(self, stream: int, target: Target, slots: int = 1) -> Sampler:
        """A sampler for rows whose noise is keyed by `stream` until they are given their own."""
        if self.temperature == 0:
            return Sampler(rule=self.rule, lossy=self.lossy)
        warps = Warps.of(self.temperature, self.top_k, self.top_p)
        noise = [self.noise(stream, target) for _ in range(slots)]
        return Sampler(warps, noise, self.rule, self.lossy)

    def noise(self, stream: int, target: Target) -> Noise:
        return Noise(self.seed, stream, target.vocab_size, target.device)


@dataclass(frozen=True)
class Turn:
    """One turn to be answered."""

    ids: Sequence[int]
    """All that comes before the answer, template included."""
    stream: int = 0
    """Keys the noise: the text depends on it, never on a slot."""
    prompt: str = ""
    category: str = ""
    language: str = ""
    number: int = 1


def stream_of(prompt: int, turn: int) -> int:
    """What keys the noise of a turn: the prompt's number, from 0, and the turn's own, from 1.

    Each turn has another: a template may drop what stood before, and two turns may look alike.
    """
    return prompt + (turn - 1 << 40)


@dataclass(frozen=True)
class Spent:
    """Seconds of one round: a row's share where several were running."""

    seconds: float
    cpu_seconds: float
    parts: tuple[float, ...]
    """By `PARTS`; what is missing is the loop's own bookkeeping."""


@dataclass
class Answer:
    """One answered turn."""

    prompt: str
    category: str
    ids: list[int]
    prompt_length: int
    rounds: list[Round]
    spent: list[Spent]
    """Of each round; prefill is not in it."""
    first_token_seconds: float = 0.0
    """Prefill until the first token is there."""
    gaps: list[float] | None = None
    """Between the target's two best logits behind each new token, where they were asked for."""
    language: str = ""
    turn: int = 1

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def timed_tokens(self) -> int:
        """Tokens the rounds emitted: all new ones but the prefill's."""
        return sum(r.emitted for r in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall clock of the rounds."""
        return sum(s.seconds for s in self.spent)

    @property
    def cpu_seconds(self) -> float:
        return sum(s.cpu_seconds for s in self.spent)

    @property
    def place(self) -> tuple[str, int]:
        """Prompt and turn, which answers of different drafters are compared by."""
        return self.prompt, self.turn


def answer(
    target: Target,
    drafter: Drafter | None,
    ids: Sequence[int],
    settings: Settings,
    *,
    stream: int = 0,
    name: str = "",
    category: str = "",
    keep_gaps: bool = False,
) -> Answer:
    """Answer one prompt and time its rounds; what is wrong with it is raised."""
    check_prompt(target, ids, settings.max_new_tokens)
    turn = Turn(ids, stream, name, category)
    return _Slots(target, drafter, [turn], settings, 1, keep_gaps).run(deque([0]))[0]


def answer_turns(
    target: Target,
    drafter: Drafter | None,
    turns: Sequence[Turn],
    settings: Settings,
    *,
    batch: int = 1,
    keep_gaps: bool = False,
) -> list[Answer | str]:
    """Answer turns in `batch` slots; a slot whose answer ends takes the next turn.

    In place of an answer stands the reason why there is none.
    """
    given: dict[int, Answer | str] = {}
    for index, turn in enumerate(turns):
        try:
            check_prompt(target, turn.ids, settings.max_new_tokens)
        except ValueError as error:
            given[index] = str(error)
    waiting = deque(index for index in range(len(turns)) if index not in given)
    while waiting:
        slots = _Slots(target, drafter, turns, settings, min(batch, len(waiting)), keep_gaps)
        try:
            slots.run(waiting)
        except FAILURES as error:
            begun = [at.index for at in slots.running.values()]
            failed = {n: _alone(target, drafter, turns[n], settings) for n in begun}
            if len(begun) == 1 or not any(failed.values()):
                failed = dict.fromkeys(begun, _reason(error))
            given |= {n: reason for n, reason in failed.items() if reason}
            # The others begin anew: what was timed so far ended in an error.
            waiting.extendleft(n for n in reversed(begun) if n not in given)
        given |= slots.ended
    return [given[index] for index in range(len(turns))]


def _alone(target: Target, drafter: Drafter | None, turn: Turn, settings: Settings) -> str:
    """Why a turn fails by itself; empty where it does not."""
    try:
        answer(target, drafter, turn.ids, settings, stream=turn.stream)
    except FAILURES as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass
class _Running:
    """One turn in a slot."""

    index: int
    row: Row
    first_token_seconds: float = 0.0
    spent: list[Spent] = field(default_factory=list)
    gaps: list[float] | None = None


class _Slots:
    """The batch: a decoder, what runs in its slots, and what has ended."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        turns: Sequence[Turn],
        settings: Settings,
        slots: int,
        keep_gaps: bool,
    ) -> None:
        self.target, self.turns, self.settings = target, turns, settings
        self.running: dict[int, _Running] = {}
        self.ended: dict[int, Answer] = {}
        self._slots, self._keep_gaps = slots, keep_gaps
        self._stop = stop_at(end_ids(target))
        self._sampler = settings.sampler(0, target, slots)
        capacity = max(len(turn.ids) for turn in turns) + settings.max_new_tokens
        room = min(capacity, target.context)  # a longer turn is refused before
        self._decoder = Decoder(target, self._sampler, drafter, batch=slots, capacity=room)

    def run(self, waiting: deque[int]) -> dict[int, Answer]:
        """Answer the turns of these numbers, which leave the queue as they begin."""
        while waiting or self.running:
            for slot in range(self._slots):
                while slot not in self.running and waiting:
                    self._begin(slot, waiting.popleft())
            if self.running:
                self._round()
        return self.ended

    def _begin(self, slot: int, index: int) -> None:
        turn = self.turns[index]
        gaps: list[float] | None = [] if self._keep_gaps else None
        row = Row(
            list(turn.ids),
            self.settings.max_new_tokens,
            self._stop,
            logits=None if gaps is None else [],
        )
        self.running[slot] = _Running(index, row, gaps=gaps)
        if self._sampler.noise is not None:
            self._sampler.noise[slot] = self.settings.noise(turn.stream, self.target)
        since = self._now()[0]
        self._decoder.start(slot, row)
        self.running[slot].first_token_seconds = self._now()[0] - since
        self._look(slot)

    def _round(self) -> None:
        """One round of all rows, its time shared among those that run."""
        known, (wall, cpu) = dict(self._decoder.seconds), self._now()
        self._decoder.round()
        after = self._now()
        share = 1 / len(self.running)
        parts = tuple((self._decoder.seconds[part] - known[part]) * share for part in PARTS)
        spent = Spent((after[0] - wall) * share, (after[1] - cpu) * share, parts)
        for slot in list(self.running):
            self.running[slot].spent.append(spent)
            self._look(slot)

    def _look(self, slot: int) -> None:
        """Take what a row gave beside its tokens, and the row itself where it is done."""
        at = self.running[slot]
        if at.gaps is not None and at.row.logits is not None:
            at.gaps += [_gap(logits) for logits in at.row.logits]
            at.row.logits.clear()
        if not at.row.done:
            return
        turn, row = self.turns[at.index], at.row
        self.ended[at.index] = Answer(
            turn.prompt,
            turn.category,
            row.ids,
            row.prompt,
            row.rounds,
            at.spent,
            at.first_token_seconds,
            at.gaps,
            turn.language,
            turn.number,
        )
        del self.running[slot]

    def _now(self) -> tuple[float, float]:
        """Wall and CPU clock, when the device has done what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter(), time.process_time()


def _gap(logits: Tensor) -> float:
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def end_ids(target: Target) -> list[int]:
    """The ids that end an answer: the generation config's, with the tokenizer's own."""
    config = target.model.generation_config
    declared = config.eos_token_id if config else None
    ends = {declared} if isinstance(declared, int) else set(declared or ())
    if target.tokenizer is not None and target.tokenizer.eos_token_id is not None:
        ends.add(target.tokenizer.eos_token_id)
    return sorted(ends)


def text_of(target: Target, given: Answer) -> str:
    """What an answer says, without special tokens."""
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(given.new_ids, skip_special_tokens=True))
