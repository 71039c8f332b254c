"""Rows of token ids with their loss mask, and how the answers of a conversation become rows.

It knows no tokenizer: ids come in and go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drafthead.data.conversations import RowError, Skips

Origin = Literal["text", "kept", "re-encoded", "ids"]
"""Where an answer's ids come from: its text, its own ids, its text although it has ids (they are
another tokenizer's), or a row that came as ids."""


@dataclass(frozen=True)
class Row:
    """Ids and mask of one sequence, of equal length.

    `mask[t]` is True where token t itself belongs to an answer or ends its turn: nothing is
    shifted. `id` is the conversation's, with `#2`, `#3` ... for its further rows.
    """

    id: str
    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Piece:
    """One answer: the ids a server sends for it, those the target emits, which are supervised."""

    prompt: list[int]
    answer: list[int]
    mask: list[bool]
    origin: Origin


def join(name: str, pieces: Sequence[Piece]) -> list[Row]:
    """Chain the answers of a conversation while each prompt repeats the ids before it.

    Returns rows of any length. Raises RowError where a mask is all ones, or all are all zeros
    (F03).
    """
    rows: list[Row] = []
    for piece in pieces:
        ids, mask = (rows[-1].ids, rows[-1].mask) if rows else ([], [])
        if rows and piece.prompt[: len(ids)] == ids:
            rows.pop()
        else:
            ids, mask = [], []
        number = len(rows) + 1
        rows.append(
            Row(
                f"{name}#{number}" if number > 1 else name,
                piece.prompt + piece.answer,
                mask + [False] * (len(piece.prompt) - len(ids)) + piece.mask,
            )
        )
    if not any(any(row.mask) for row in rows):
        raise RowError("no token of the answers is supervised")
    if any(all(row.mask) for row in rows):
        raise RowError("every token is supervised, the prompt's too")
    return rows


def fitting(
    rows: Sequence[Row], max_length: int, min_supervised: int, skips: Skips
) -> Iterator[Row]:
    """Cut rows at `max_length`; count as skipped those that keep too few supervised tokens."""
    for row in rows:
        cut = Row(row.id, row.ids[:max_length], row.mask[:max_length])
        if sum(cut.mask) < min_supervised:
            reason = f"fewer than {min_supervised} supervised tokens in max_length"
            skips.add(f"{reason} {max_length}", row.id)
        else:
            yield cut
