"""The language of a prompt, where its row does not name one: guessed from its text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from drafthead.data.conversations import Prompt

log = logging.getLogger(__name__)

UNKNOWN = "unknown"

SURE = 0.5
"""Least probability of a guess; short texts, code and formulas have no clear language."""


def with_languages(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, each with its own language or a guess (ISO 639-1), `unknown` where unsure."""
    if all(prompt.language for prompt in prompts):
        return list(prompts)
    guess = _guesser()
    return [p if p.language else replace(p, language=guess("\n".join(p.turns))) for p in prompts]


def _guesser() -> Callable[[str], str]:
    try:
        from py3langid.langid import (  # type: ignore[import-untyped]
            MODEL_FILE,
            LanguageIdentifier,
        )
    except ImportError:
        log.warning("languages of prompts are not guessed: that needs `pip install py3langid`")
        return lambda text: UNKNOWN
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def guess(text: str) -> str:
        language, probability = identifier.classify(text)
        return str(language) if probability >= SURE else UNKNOWN

    return guess
