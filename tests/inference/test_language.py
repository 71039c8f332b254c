"""A prompt's language is its row's, else a guess, and unknown where there is nothing to go by."""

from __future__ import annotations

import pytest

from drafthead.data.conversations import Prompt
from drafthead.inference.language import UNKNOWN, with_languages

TEXTS = {
    "en": "What is the capital of France, and which river does it lie on?",
    "fr": "Bonjour, comment allez-vous aujourd'hui ?",
    "de": "Wie heißt die Hauptstadt von Frankreich?",
    UNKNOWN: "12 + 30 =",
}


def test_languages_are_told_or_guessed() -> None:
    prompts = [Prompt(name, "a", [text]) for name, text in TEXTS.items()]
    found = with_languages([*prompts, Prompt("own", "a", ["Hello there"], language="nds")])
    assert [p.language for p in found] == [*TEXTS, "nds"]
    assert [p.turns for p in found[:-1]] == [[text] for text in TEXTS.values()]


def test_without_the_library_nothing_is_guessed_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "py3langid.langid", None)
    (found,) = with_languages([Prompt("a", "a", [TEXTS["en"]])])
    assert found.language == UNKNOWN
    assert "pip install py3langid" in caplog.text
