"""A few prompts of a run's own rows, as training rendered them and as a server will be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Conversation, Message, RowError, Tokenised


@dataclass(frozen=True)
class Sample:
    """A prompt that an answer of the rows follows."""

    id: str
    trained: list[int]
    """Its ids as training rendered it."""
    messages: tuple[Message, ...] = ()
    """What a server renders; none for a row that came as ids, which are sent as they are."""
    tools: tuple[Mapping[str, object], ...] = ()

    def served(self, chat: ChatFormat) -> list[int]:
        """Its ids as a server with this format renders it."""
        if not self.messages:
            return list(self.trained)
        return chat.prompt_ids(self.messages, self.tools)


def samples_of(
    examples: Sequence[Conversation | Tokenised], chat: ChatFormat, count: int, longest: int
) -> list[Sample]:
    """Prompts of first answers, evenly over the examples; shorter than `longest` tokens."""
    if not count or not examples:
        return []
    found: list[Sample] = []
    step = max(1, len(examples) // count)
    # One in each part of them; where some are of no use, others fill up.
    order = [n for first in range(step) for n in range(first, len(examples), step)]
    for number in order:
        sample = _sample(examples[number], chat)
        if sample is not None and len(sample.trained) < longest:
            found.append(sample)
        if len(found) == count:
            break
    return found


def _sample(example: Conversation | Tokenised, chat: ChatFormat) -> Sample | None:
    if isinstance(example, Tokenised):
        first = example.mask.index(True) if any(example.mask) else 0
        return Sample(example.id, list(example.ids[:first])) if first else None
    try:
        prompt = chat.pieces(example)[0].prompt
    except RowError:
        return None
    roles = [message.role for message in example.messages]
    asked = tuple(example.messages[: roles.index("assistant")])
    return Sample(example.id, prompt, asked, example.tools)
