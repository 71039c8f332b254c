"""A few answers token by token: which were drafted and how deep, and where a draft fell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.inference.answering import Answer

PROMPTS = 3
TOKENS = 256
"""Most of a sample."""


def samples(
    answers: Mapping[str, Sequence[Answer]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The first answers to a few prompts of different categories, by these drafters."""
    chosen: dict[str, str] = {}
    for given in next(iter(answers.values()), ()):
        if given.turn == 1:
            chosen.setdefault(given.category, given.prompt)
    prompts = list(chosen.values())[:PROMPTS]
    return [
        {
            "prompt": given.prompt,
            "category": given.category,
            "drafter": drafter,
            "tokens": tokens_of(given, tokenizer),
        }
        for prompt in prompts
        for drafter, found in answers.items()
        for given in found
        if given.prompt == prompt and given.turn == 1
    ]


def tokens_of(given: Answer, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Text, depth and `fell` of each token.

    depth: at which it was drafted and accepted, 0 for the target's own; fell: something was drafted
    at that place and refused. A character of several tokens is told with its last.
    """
    places = [(0, False)]  # the prefill's token
    for made in given.rounds:
        kept = min(made.accepted, made.emitted)
        places += [(depth, False) for depth in range(1, kept + 1)]
        if made.emitted > made.accepted:
            places.append((0, made.depth > made.accepted))
    shown, tokens = "", []
    for end, (depth, fell) in enumerate(places[:TOKENS], start=1):
        text = str(tokenizer.decode(given.new_ids[:end], skip_special_tokens=True))
        whole = not text.endswith("\ufffd")
        tokens.append({"text": text[len(shown) :] if whole else "", "depth": depth, "fell": fell})
        shown = text if whole else shown
    return tokens
