"""Measure drafters on prompts, side by side: one run of all prompts at one temperature and batch.

Every drafter, plain decoding first among them, answers the same ids with the same settings, group
by group of prompts in turn, so that a machine that slows down slows all of them. A group is one
turn of one prompt, or for a larger batch a few turns for each slot. Later turns follow plain
decoding's replies. Speed counts the tokens and the seconds of the rounds: prefill and its token are
left out on every side, and each side is warmed up before. The baseline is this same loop without a
draft, which is the fastest plain loop here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt
from drafthead.inference.answering import (
    Answer,
    Settings,
    Turn,
    answer,
    answer_turns,
    end_ids,
    stream_of,
    text_of,
)
from drafthead.inference.decoder import check_prompt
from drafthead.inference.drafters import Drafter
from drafthead.inference.log import Keep, anew, packed, unpacked
from drafthead.inference.target import Target

__all__ = [
    "PLAIN",
    "Answer",
    "Failure",
    "Measured",
    "Settings",
    "answer",
    "end_ids",
    "evaluate",
    "text_of",
]

PLAIN = "plain"

SHARE = 4
"""Turns of a group for each slot: few slots stay empty, and not much is lost at a kill."""

WARM_UP = 8
"""Tokens that each side answers before it is timed."""

Place = tuple[int, int]
"""The number of a prompt, from 0, and of its turn, from 1."""


@dataclass(frozen=True)
class Failure:
    """A turn that was not answered, and why; `drafter` is None where that was so for all."""

    prompt: str
    turn: int
    drafter: str | None
    reason: str


@dataclass
class Measured:
    """What one run came to: answers by drafter, plain decoding's under `plain`."""

    answers: dict[str, list[Answer]]
    failed: list[Failure] = field(default_factory=list)


def evaluate(
    target: Target,
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Drafter],
    settings: Settings,
    *,
    batch: int = 1,
    first: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    keep: Keep = anew,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Have all drafters answer all prompts.

    first: the side that begins, which rotates; keep: what was measured before and goes in as it is.
    """
    if PLAIN in drafters:
        raise ValueError(f"{PLAIN!r} is the baseline's name: call the drafter something else")
    sides: list[tuple[str, Drafter | None]] = [(PLAIN, None), *drafters.items()]
    run = _Run(target, prompts, sides, settings, batch, template_kwargs)
    done, total = 0, sum(len(p.turns) for p in prompts)
    for number, group in enumerate(grouped(prompts, batch)):
        # Another side goes first each time, so that none always finds the caches warm.
        ahead = (first + number) % len(sides)
        order = (*sides[ahead:], *sides[:ahead])
        run.take(keep(str(number), partial(run.measure, group, order)))
        done += len(group)
        progress(done, total)
    return run.measured


def grouped(prompts: Sequence[Prompt], batch: int) -> list[list[Place]]:
    """Turns that are measured together; a turn comes after all earlier ones of its prompt."""
    places = [(i, n) for i, p in enumerate(prompts) for n in range(1, len(p.turns) + 1)]
    if batch == 1:
        return [[place] for place in places]
    groups = []
    for number in sorted({n for _, n in places}):
        wave = [place for place in places if place[1] == number]
        parts = -(-len(wave) // (SHARE * batch))
        ends = [len(wave) * part // parts for part in range(parts + 1)]
        groups += [wave[a:b] for a, b in itertools.pairwise(ends)]
    return groups


class _Run:
    """The conversations of one run, which go on with plain decoding's replies."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        sides: Sequence[tuple[str, Drafter | None]],
        settings: Settings,
        batch: int,
        template_kwargs: dict[str, Any] | None,
    ) -> None:
        assert target.tokenizer is not None
        self.target, self.prompts, self.sides = target, prompts, sides
        self.settings, self.batch = settings, batch
        self.measured = Measured({name: [] for name, _ in sides})
        self._chat = ChatFormat(target.tokenizer, template_kwargs)
        self._replies: dict[Place, str] = {}
        self._warm = False

    def measure(
        self, group: Sequence[Place], order: Sequence[tuple[str, Drafter | None]]
    ) -> dict[str, Any]:
        """Have all sides answer these turns; JSON, which `take` reads."""
        turns: list[Turn] = []
        asked: list[Place] = []
        failed: list[tuple[int, int, str | None, str]] = []
        for place in group:
            try:
                turns.append(self._turn(place))
                asked.append(place)
            except ValueError as error:
                failed.append((*place, None, str(error)))
        if turns and not self._warm:
            self._warm_up(turns)
        answers: dict[str, list[Any]] = {}
        for name, drafter in order if turns else ():
            answers[name] = []
            # Where texts may differ by rounding only, it matters how near the choice was.
            near = name == PLAIN and self.settings.temperature == 0
            given = answer_turns(
                self.target, drafter, turns, self.settings, batch=self.batch, keep_gaps=near
            )
            for place, one in zip(asked, given, strict=True):
                failed += [(*place, name, one)] if isinstance(one, str) else []
                answers[name].append(None if isinstance(one, str) else packed(one))
        ids = [list(turn.ids) for turn in turns]
        return {"asked": asked, "ids": ids, "answers": answers, "failed": failed}

    def take(self, line: Mapping[str, Any]) -> None:
        """Add what was measured, now or before."""
        try:
            for index, number, name, reason in line["failed"]:
                failure = Failure(self.prompts[index].id, number, name, reason)
                self.measured.failed.append(failure)
            for name, _ in self.sides if line["asked"] else ():
                self.measured.answers[name] += self._answers(line, name)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"what was kept of an evaluation is damaged ({error!r})") from error

    def _answers(self, line: Mapping[str, Any], name: str) -> Iterator[Answer]:
        """One side's answers of a group; those of plain decoding are replied with."""
        for (index, number), ids, packed_ in zip(
            line["asked"], line["ids"], line["answers"][name], strict=True
        ):
            if packed_ is None:
                continue
            prompt = self.prompts[index]
            given = unpacked(
                packed_,
                ids,
                prompt=prompt.id,
                category=prompt.category,
                language=prompt.language,
                turn=number,
            )
            if name == PLAIN:
                self._replies[index, number] = text_of(self.target, given)
            yield given

    def _turn(self, place: Place) -> Turn:
        """One turn as it is served; ValueError where it cannot be put."""
        index, number = place
        prompt, messages = self.prompts[index], list(self.prompts[index].opening)
        for before in range(1, number):
            if (index, before) not in self._replies:
                raise ValueError(f"its turn {before} got no reply from plain decoding")
            messages.append(Message("assistant", self._replies[index, before]))
            messages.append(Message("user", prompt.turns[before]))
        ids = self._chat.prompt_ids(messages)
        check_prompt(self.target, ids, self.settings.max_new_tokens)
        stream = stream_of(index, number)
        return Turn(ids, stream, prompt.id, prompt.category, prompt.language, number)

    def _warm_up(self, turns: Sequence[Turn]) -> None:
        short = replace(self.settings, max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
        for _, drafter in self.sides:  # what fails here fails again when it counts
            answer_turns(self.target, drafter, turns[: self.batch], short, batch=self.batch)
        self._warm = True
