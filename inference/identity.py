"""Drafted text against plain decoding's, meant for a target in float32: equal, tied, or a fault.

In float32 a drafted text is plain decoding's but for a tie: where the target's two best tokens lie
nearer together than its own forwards of one, few and all tokens round (`rounding`), either may come
out, and what follows is another text. Both tokens are held against transformers' own forwards, so a
fault of the plain loop is none of drafting's ties either. Where ties were many, or a difference is
no tie, `certify` looks closer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafthead.inference.answering import Answer, Settings, Turn, answer, answer_turns
from drafthead.inference.drafters import Drafter
from drafthead.inference.rounding import Truth, first_difference, one_by_one, rounding
from drafthead.inference.target import Target
from drafthead.inference.warps import Warps


def identity(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, Drafter],
    settings: Settings,
    *,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """How many prompts get plain decoding's ids, by drafter, and how many of the others are ties.

    Plain decoding has each prompt to itself, whatever the batch of the drafters. `largest_gap`: how
    far a token of a first difference is below the best at most, None where it was no token that
    differed; `tie`: how far it may be. Both None where all are equal.
    """
    turns = [Turn(ids, stream) for stream, ids in enumerate(prompts)]
    plain = [answer(target, None, t.ids, settings, stream=t.stream) for t in turns]
    texts = _Texts(target, settings, turns, plain)
    dtype = str(target.dtype).removeprefix("torch.")
    table = {}
    for name, drafter in drafters.items():
        given = answer_turns(target, drafter, turns, settings, batch=batch)
        news = [one.new_ids if isinstance(one, Answer) else None for one in given]
        other = [i for i, new in enumerate(news) if new != plain[i].new_ids]
        gaps = {i: texts.gap(i, new) for i in other if (new := news[i]) is not None}
        ties = {i: texts.tie(i) for i in gaps}
        widest = max(gaps.values(), default=None)
        table[name] = {
            "equal": len(plain) - len(other),
            "of": len(plain),
            "tied": sum(gap <= ties[i] for i, gap in gaps.items()),
            "largest_gap": widest,
            "tie": max(ties.values(), default=None),
            "new_tokens": settings.max_new_tokens,
            "dtype": dtype,
        }
    return table


@dataclass
class _Texts:
    """Plain decoding's texts, and of those that a drafter missed how the target rounds on them."""

    target: Target
    settings: Settings
    turns: Sequence[Turn]
    plain: Sequence[Answer]
    _truths: dict[int, Truth] = field(default_factory=dict)
    _ties: dict[int, float] = field(default_factory=dict)

    def gap(self, number: int, new: Sequence[int]) -> float:
        """How far the lower of both tokens of the first difference is below the best one."""
        own = self.plain[number].new_ids
        place = first_difference(new, own)
        if place is None:  # a text that only ends elsewhere has no tie to blame
            return math.inf
        scores = self._truth(number).logits[place]
        if self.settings.temperature > 0:
            s, turn = self.settings, self.turns[number]
            noise = s.noise(turn.stream, self.target).gumbel(len(turn.ids) + place)
            scores = Warps.of(s.temperature, s.top_k, s.top_p)(scores[None])[0] + noise
        scores = scores.double()
        return float(scores.max() - scores[[new[place], own[place]]].min())

    def tie(self, number: int) -> float:
        """A gap that may be a tie: in terms of logits, which a temperature divides."""
        if number not in self._ties:
            self._ties[number] = rounding(self.target, [self._truth(number)]).tie
        return self._ties[number] / (self.settings.temperature or 1.0)

    def _truth(self, number: int) -> Truth:
        if number not in self._truths:
            ids, new = self.turns[number].ids, self.plain[number].new_ids
            self._truths[number] = one_by_one(self.target, ids, new)
        return self._truths[number]
