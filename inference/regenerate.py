"""Answers by the target itself: what a draft head should be trained on.

Prompts are answered in a batch whose slots refill as rows end, each turn with keyed noise of its
own, so an answer depends on the seed and the prompt's place in the file, not on the batch, nor on
a head that drafts (but for rounding in half precision). Prompts of similar length share a batch:
its store has room for the longest, and a forward looks at as many slots as the longest row has.
A conversation that goes round in a loop ends there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Prompt
from drafthead.data.loops import loops
from drafthead.data.sources import RowError
from drafthead.heads.contract import fingerprint, outline, template_hash
from drafthead.inference.answers import (
    DROPPED,
    Answer,
    Answering,
    Report,
    Talk,
    answer_all,
)
from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter
from drafthead.inference.evaluate import end_ids
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.warps import Warps

FRAME = 8
"""Tokens that a template may put around a message."""

WORTH_A_STORE = 4
"""Batches of conversations that are worth a smaller store: opening one drains the one before."""


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    answering: Answering,
    template_kwargs: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    drafter: Drafter | None = None,
    drop: Iterable[str] = DROPPED,
) -> Report:
    """Answer all turns of all prompts and write conversations with their ids (see `answer_all`).

    drafter: speeds it up, and changes no answer; drop: kinds of conversations to leave out.
    """
    assert target.tokenizer is not None
    assert answering.seed is not None
    chat = ChatFormat(target.tokenizer, template_kwargs)
    drawn = {k: v for k, v in asdict(answering).items() if k != "batch"}
    drawn |= {"dtype": str(target.dtype).removeprefix("torch.")}
    header = {
        "made": drawn,
        "target": fingerprint(target.model),
        "template": template_hash(target.tokenizer, chat.template_kwargs),
    }
    made = {"target": outline(target.model, None).target, **drawn}
    return answer_all(
        _Target(target, chat, answering, drafter),
        prompts,
        out,
        header,
        made | {"template_kwargs": chat.template_kwargs},
        drop=drop,
        progress=progress,
    )


REFUSED = "refused by the chat template"


@dataclass
class _Target:
    """Answers talks by batches of similar length, the longest first."""

    target: Target
    chat: ChatFormat
    answering: Answering
    drafter: Drafter | None = None

    def __call__(self, talks: Sequence[Talk]) -> Iterator[Talk]:
        waiting = []
        for talk in talks:
            try:
                waiting.append((self._room(talk), talk))
            except RowError:
                talk.give_up(REFUSED)
                yield talk
        while waiting:
            waiting.sort(key=lambda pair: (-pair[0], pair[1].index))
            count = _share_a_store([room for room, _ in waiting], self.answering.batch)
            batch = deque(talk for _, talk in waiting[:count])
            session = _Session(self, waiting[0][0])
            waiting = waiting[count:]
            while batch or session.busy:
                yield from session.step(batch)
            waiting += [(self._room(talk), talk) for talk in session.outgrown]

    def _room(self, talk: Talk) -> int:
        """Tokens that a conversation is expected to come to, within the target's context."""
        left = talk.prompt.turns[len(talk.answers) + 1 :]
        sizes = [len(self.chat.prompt_ids(talk.messages))]
        sizes += [len(self.chat.tokenizer(turn)["input_ids"]) for turn in left]
        answers = len(sizes) * (self.answering.max_new_tokens + FRAME)
        return min(sum(sizes) + answers, self.target.context)


def _share_a_store(rooms: Sequence[int], batch: int) -> int:
    """How many of the rooms, largest first, go into a store that has room for the first.

    Those that need no more than half of it get another, if they are enough to be worth it.
    """
    large = sum(2 * room > rooms[0] for room in rooms)
    return large if len(rooms) - large >= WORTH_A_STORE * batch else len(rooms)


class _Session:
    """The batch: slots, what runs in them, and refilling."""

    def __init__(self, by: _Target, capacity: int) -> None:
        self.target, self.chat, self.answering = by.target, by.chat, by.answering
        self.capacity = capacity
        batch = self.answering.batch
        if self.answering.temperature == 0:
            self.sampler = Sampler()
        else:
            warps = Warps.of(self.answering.temperature, self.answering.top_k, self.answering.top_p)
            self.sampler = Sampler(warps, [self._noise(slot) for slot in range(batch)])
        self.decoder = Decoder(
            self.target, self.sampler, by.drafter, batch=batch, capacity=capacity
        )
        self.talks: list[Talk | None] = [None] * batch
        self.outgrown: list[Talk] = []
        """Conversations that need a larger store than was expected."""
        self.ends = frozenset(end_ids(self.target))

    def _noise(self, stream: int) -> Noise:
        assert self.answering.seed is not None
        return Noise(self.answering.seed, stream, self.target.vocab_size, self.target.device)

    @property
    def busy(self) -> bool:
        return any(talk is not None for talk in self.talks)

    def step(self, waiting: deque[Talk]) -> list[Talk]:
        """Fill free slots, run one round, and return the conversations that ended."""
        ended = []
        for slot in range(len(self.talks)):
            while self.talks[slot] is None and waiting:
                ended += self._begin(slot, waiting.popleft())
        if self.decoder.running:
            self.decoder.round()
        for slot, talk in enumerate(self.talks):
            row = self.decoder.rows[slot]
            if talk is not None and row is not None and row.done:
                self.talks[slot] = self.decoder.rows[slot] = None
                ended += [talk] if talk.take(self._answer(row)) else self._begin(slot, talk)
        return ended

    def _begin(self, slot: int, talk: Talk) -> list[Talk]:
        """Start the next answer in a free slot; the talk itself where there is no room for one."""
        try:
            ids = self.chat.prompt_ids(talk.messages)
        except RowError:
            talk.give_up(REFUSED)
            return [talk]
        limit = min(self.answering.max_new_tokens, self.target.context - len(ids))
        if limit < 1:
            talk.give_up("too long")
            return [talk]
        if len(ids) + limit > self.capacity:
            self.outgrown.append(talk)
            return []
        if self.sampler.noise is not None:
            self.sampler.noise[slot] = self._noise(talk.stream)
        self.talks[slot] = talk
        self.decoder.start(slot, Row(ids, limit, self._stop))
        return []

    def _stop(self, row: Row) -> bool:
        ids = row.ids
        return ids[-1] in self.ends or (len(ids) % 16 == 0 and loops(ids))

    def _answer(self, row: Row) -> Answer:
        new = row.new_ids
        if new[-1] in self.ends:
            return Answer(str(self.chat.tokenizer.decode(new[:-1])), "stop", len(new), new)
        finish = "loop" if loops(row.ids) else "length"
        text, ids = self._whole(new)
        return Answer(text, finish, len(new), ids)

    def _whole(self, ids: list[int]) -> tuple[str, list[int]]:
        """Text and ids without a character that the limit cut: four bytes at most."""
        full = str(self.chat.tokenizer.decode(ids))
        text = full.rstrip("\ufffd")
        for count in range(4):
            kept = ids[: len(ids) - count]
            if str(self.chat.tokenizer.decode(kept)) == text:
                return text, kept
        return text, ids
