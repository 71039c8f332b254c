"""A conversation with a target: its exchanges, what is sent of them, and what its answers took.

It knows no terminal and runs no model: ids go out, answers come in. Nothing is ever dropped from a
conversation but by `undo` and `clear`; one that no longer fits the target's context is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, RowError
from drafthead.inference.metrics import Round, survival
from drafthead.inference.stream import Finish, Stream

FEWEST = 8
"""Rounds without a draft from which a rate is told."""


class ContextFullError(ValueError):
    """A message, with what was said before and room for its answer, exceeds the context."""


@dataclass(frozen=True)
class Figures:
    """What one answer took, or several together (see `inference.metrics` for the terms)."""

    answers: int
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    """Seconds until the first token was there; of several answers, their mean."""
    rounds: tuple[Round, ...]
    round_seconds: tuple[float, ...]

    @classmethod
    def of(cls, stream: Stream) -> Figures:
        rounds = tuple(stream.row.rounds)
        # A round that an interrupt cut off has left no seconds, or seconds alone.
        whole = min(len(rounds), len(stream.round_seconds))
        return cls(
            answers=1,
            prompt_tokens=stream.row.prompt,
            new_tokens=len(stream.row.new_ids),
            first_token_s=stream.first_token_s,
            rounds=rounds[:whole],
            round_seconds=tuple(stream.round_seconds[:whole]),
        )

    @classmethod
    def together(cls, parts: Sequence[Figures]) -> Figures:
        """All tokens over all rounds and seconds; ValueError for no part."""
        if not parts:
            raise ValueError("no answer yet")
        answers = sum(p.answers for p in parts)
        return cls(
            answers=answers,
            prompt_tokens=sum(p.prompt_tokens for p in parts),
            new_tokens=sum(p.new_tokens for p in parts),
            first_token_s=sum(p.first_token_s * p.answers for p in parts) / answers,
            rounds=tuple(r for p in parts for r in p.rounds),
            round_seconds=tuple(s for p in parts for s in p.round_seconds),
        )

    @property
    def seconds(self) -> float:
        """Wall clock of the rounds: the prefill and its token are left out."""
        return sum(self.round_seconds)

    @property
    def tokens(self) -> int:
        """Tokens that the rounds emitted."""
        return sum(r.emitted for r in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        return self.tokens / len(self.rounds) if self.rounds else 1.0

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def survival(self) -> tuple[float, ...]:
        return survival([r.accepted for r in self.rounds], len(self.rounds)) if self.rounds else ()

    @property
    def undrafted_per_s(self) -> float | None:
        """The rate of the rounds without a draft, which are plain ones; None for a handful."""
        pairs = zip(self.rounds, self.round_seconds, strict=True)
        seconds = [s for r, s in pairs if not r.drafted]
        return len(seconds) / sum(seconds) if len(seconds) >= FEWEST else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "tau": self.tau,
            "tokens_per_s": self.tokens_per_s,
            "rounds": len(self.rounds),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "survival": list(self.survival),
            "first_token_s": self.first_token_s,
        }


@dataclass(frozen=True)
class Exchange:
    """A message and its answer."""

    said: str
    reply: str
    finish: Finish
    """`stopped`: the reply is what had been shown when it was stopped."""
    noise: int = 0
    """The stream of noise that it was drawn from."""


class Chat:
    """A conversation under one chat template.

    Raises ValueError for a system prompt that the template refuses or does not show.
    """

    def __init__(
        self, chat: ChatFormat, *, context: int, new_tokens: int, system: str | None = None
    ) -> None:
        """`context`: of the target, in tokens; `new_tokens`: the most an answer may have."""
        self._format = chat
        self.context, self.new_tokens = context, new_tokens
        self.exchanges: list[Exchange] = []
        self.figures: list[Figures] = []
        """Of all answers, those taken back included."""
        self.system: str | None = None
        self.use_system(system)

    def use_system(self, text: str | None) -> None:
        """Put a system prompt before everything, from the next answer on; None takes it away.

        What was there stays where a ValueError is raised.
        """
        if text is not None:
            self._check_system(text)
        self.system = text

    def _check_system(self, text: str) -> None:
        """Some templates raise an error for a system message, others leave it out."""
        question = Message("user", "Hello")
        try:
            shown, other = (
                self._format.prompt_ids([Message("system", content), question])
                for content in (text, f"{text} And more.")
            )
        except RowError as error:
            raise ValueError(
                f"no system prompt can be given to this target ({error}): say it in the first "
                "message"
            ) from error
        if shown == other:
            raise ValueError(
                "the target's chat template leaves a system prompt out: say it in the first message"
            )

    @property
    def messages(self) -> list[Message]:
        """The conversation as a template reads it."""
        said = [] if self.system is None else [Message("system", self.system)]
        for exchange in self.exchanges:
            said += [Message("user", exchange.said), Message("assistant", exchange.reply)]
        return said

    def ask(self, said: str) -> list[int]:
        """The ids that have `said` answered; it joins the conversation with its answer.

        Raises ContextFullError, and ValueError where the template refuses the conversation.
        """
        ids = self._format.prompt_ids([*self.messages, Message("user", said)])
        if len(ids) + self.new_tokens > self.context:
            what = "the conversation with this message" if self.exchanges else "this message"
            raise ContextFullError(
                f"{what} takes {len(ids)} tokens; with an answer of up to {self.new_tokens} that "
                f"exceeds the target's context of {self.context}"
            )
        return ids

    def answered(self, exchange: Exchange, figures: Figures) -> bool:
        """Take an answer in; False where it was stopped before it said anything, as if unasked."""
        if exchange.finish == "stopped" and not exchange.reply:
            return False
        self.exchanges.append(exchange)
        self.figures.append(figures)
        return True

    def undo(self) -> Exchange | None:
        """Take back the last exchange and give it; None where there is none."""
        return self.exchanges.pop() if self.exchanges else None

    def clear(self) -> int:
        """Forget all exchanges, not the system prompt; how many they were."""
        count = len(self.exchanges)
        self.exchanges.clear()
        return count
