"""Which part of an answer a template's `{% generation %}` markers name, and which tokens hold it.

The markers' own offsets are not trusted: the template is rendered a second time with a text that
occurs nowhere else in place of each marker, and counts only if without those texts it is the exact
rendering, character by character. So text of a user that looks like a marker is text. It knows no
conversation and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_BROKEN = "\ufffd"
"""What decoding shows for a character that is not complete."""
_LONGEST = 8
"""Tokens that are decoded together at most: a character has four bytes."""


@dataclass(frozen=True)
class Marked:
    """A rendered text and, for each of its characters, whether it stands inside markers."""

    text: str
    inside: list[bool]

    def within(self, prompt: str, answer: str, closing: str) -> list[bool] | None:
        """Say for each character of an emitted answer whether it stands inside markers.

        The text is the rendering of the whole chat, which ends with the answer and `closing`. None
        where it does not show the answer there.
        """
        start = len(prompt)
        if self.text.startswith(prompt) and self.text.startswith(answer, start):
            return self.inside[start : start + len(answer)]
        # The template changed the history, another header, or white space around the answer.
        core = answer.strip()
        body = self.text.removesuffix(closing).rstrip()
        if not core or not body.endswith(core):
            return None
        place, lead = len(body) - len(core), answer.index(core)
        marks = self.inside[place : place + len(core)]
        tail = len(answer) - lead - len(core)
        return [marks[0]] * lead + marks + [marks[-1]] * tail


def has_markers(template: str) -> bool:
    """Whether a template has generation markers outside its comments."""
    return _BEGIN.search(re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)) is not None


def marked(template: str, plain: str, render: Callable[[str], str]) -> Marked | None:
    """Find what is inside markers in `plain`, the rendering of `template`.

    `render` renders the same chat with another template. None where the markers cannot be followed.
    """
    number = 0
    while f"\ue000{number}" in plain:
        number += 1
    begin, end = f"\ue000{number}<\ue001", f"\ue000{number}>\ue001"
    shown = render(_END.sub(_text_block(end), _BEGIN.sub(_text_block(begin), template)))
    text, inside, depth = [], [], 0
    for part in re.split(f"({begin}|{end})", shown):
        if part in (begin, end):
            depth += 1 if part == begin else -1
            continue
        text.append(part)
        inside += [depth > 0] * len(part)
    return Marked(plain, inside) if "".join(text) == plain else None


def _text_block(text: str) -> str:
    """A block tag, so that white space around it is cut as around the marker, that shows a text."""
    return rf"{{%\1 if true %}}{text}{{% endif \2%}}"


def tokens_inside(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str, inside: Sequence[bool]
) -> list[bool] | None:
    """Say for each token whether any of its characters is inside; None if they cannot be told.

    `text` is what the ids say, `inside` has one entry for each of its characters. Tokens of one
    character (four bytes of an emoji) go together.
    """
    mask: list[bool] = []
    read = ""
    for group, more in shown(tokenizer, ids):
        mask += [any(inside[len(read) : len(read) + len(more)])] * len(group)
        read += more
    return mask if read == text else None


def shown(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> Iterator[tuple[list[int], str]]:
    """Split ids into the smallest groups of whole characters; yield each with the text it adds.

    A group's text is what decoding shows more with it than without: by itself, a token that opens
    a word would lose its space in SentencePiece.
    """
    before: list[int] = []
    group: list[int] = []
    for token in ids:
        group.append(token)
        known = _decode(tokenizer, before)
        text = _decode(tokenizer, [*before, *group])
        if text.endswith(_BROKEN) and len(group) < _LONGEST:
            continue
        yield group, text[len(known) :]
        before, group = group, []
    if group:
        known = _decode(tokenizer, before)
        yield group, _decode(tokenizer, [*before, *group])[len(known) :]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
