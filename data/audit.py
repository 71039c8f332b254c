"""What a training run would learn from its data: figures, and rows to look at, before any run.

It builds rows exactly as training does and needs only the tokenizer; no model is loaded. How the
figures are shown is `preview`'s part.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthead.data.chat import ChatFormat, check_settings
from drafthead.data.conversations import (
    Conversation,
    RowError,
    Skips,
    Tokenised,
    read_conversations,
)
from drafthead.data.loops import loops
from drafthead.data.markers import shown
from drafthead.data.rows import Origin, Piece, Row, fitting, join

Example = Conversation | Tokenised
Progress = Callable[[int, int], None]

_PERCENTILES = (50, 90, 99)
_SMALLEST_BIN = 64
_CONTEXT = 8
"""Tokens shown on either side of a difference."""


@dataclass(frozen=True)
class Group:
    """The fewest tokens that make whole characters, and whether they are trained."""

    ids: list[int]
    text: str
    trained: bool


@dataclass(frozen=True)
class Preview:
    """One row, token by token."""

    id: str
    groups: list[Group]


@dataclass(frozen=True)
class Difference:
    """Where two renderings of a conversation part: its id, the place, both texts around it."""

    id: str
    position: int
    here: str
    there: str


@dataclass
class Comparison:
    """How the rows change with other settings of the template."""

    settings: dict[str, Any]
    conversations: int = 0
    different: int = 0
    """Conversations whose ids or mask are others."""
    tokens: int = 0
    different_tokens: int = 0
    """Tokens between the first and the last difference of each row."""
    refused: int = 0
    """Conversations that only one of the two can render."""
    first: Difference | None = None


@dataclass
class Audit:
    """What was read, what would be trained, what is left out and why."""

    sources: list[str]
    max_length: int
    by_markers: bool
    read: int = 0
    """Rows that were found, bad ones included."""
    conversations: int = 0
    """Those that give at least one row."""
    split: int = 0
    """Conversations that give more than one row: the template shows an answer otherwise later."""
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    """Rows longer than max_length."""
    cut_tokens: int = 0
    cut_trained: int = 0
    answers: Counter[Origin] = field(default_factory=Counter)
    unfinished: int = 0
    """Conversations whose last answer was cut by a limit (`finish: length`)."""
    looping: list[str] = field(default_factory=list)
    """Conversations with an answer that ends in a loop."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row before it is cut."""
    skips: Skips = field(default_factory=Skips)
    previews: list[Preview] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def share(self) -> float:
        """Share of the tokens that are trained."""
        return self.trained / self.tokens if self.tokens else 0.0

    def percentiles(self) -> dict[str, int]:
        """Length of a row in tokens: half, nine of ten, 99 of 100 and all are at most this long."""
        ordered = sorted(self.lengths)
        at = {f"p{p}": ordered[(len(ordered) - 1) * p // 100] for p in _PERCENTILES}
        return {**at, "max": ordered[-1]}

    def histogram(self) -> list[tuple[int, int]]:
        """(longest, rows): rows longer than the bin before and at most `longest` tokens long."""
        bins: Counter[int] = Counter()
        for length in self.lengths:
            edge = _SMALLEST_BIN
            while edge < length:
                edge *= 2
            bins[edge] += 1
        edges = itertools.takewhile(
            lambda edge: edge <= max(bins), (_SMALLEST_BIN << i for i in itertools.count())
        )
        return [(edge, bins[edge]) for edge in edges]

    def as_dict(self) -> dict[str, Any]:
        """The figures, without the rows to look at."""
        comparison = self.comparison
        return {
            "sources": self.sources,
            "max_length": self.max_length,
            "mask": "markers" if self.by_markers else "rendering",
            "rows_read": self.read,
            "conversations": self.conversations,
            "conversations_split": self.split,
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained,
            "trained_share": self.share,
            "rows_cut": self.cut,
            "tokens_cut": self.cut_tokens,
            "trained_tokens_cut": self.cut_trained,
            "answers": dict(self.answers),
            "finish_length": self.unfinished,
            "loops": {"count": len(self.looping), "first": self.looping[:3]},
            "lengths": self.percentiles(),
            "histogram": self.histogram(),
            "skipped": self.skips.rows,
            "comparison": None if comparison is None else _comparison_dict(comparison),
        }


def audit(
    sources: Sequence[tuple[str, Path]],
    fmt: ChatFormat,
    max_length: int,
    strict: bool = False,
    previews: int = 3,
    other: ChatFormat | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Build the rows of all sources, each with the name it is called by, and say what they hold.

    `previews` rows, evenly spaced, are kept to look at; with `other`, the rows are compared with
    those of another format. Raises ValueError when nothing would be trained, and as reading does.
    """
    found = Audit([name for name, _ in sources], max_length, fmt.by_markers)
    examples: list[Example] = []
    for _, path in sources:
        more, skips = read_conversations(path, strict)
        examples += more
        found.read += len(more) + skips.total
        for reason, references in skips.rows.items():
            found.skips.rows.setdefault(reason, []).extend(references)
    check_settings(examples, fmt)
    rows: list[Row] = []
    for number, example in enumerate(examples, start=1):
        rows += _add(found, example, fmt)
        if progress is not None:
            progress(number, len(examples))
    if not rows:
        raise ValueError(
            f"{', '.join(found.sources)}: nothing would be trained with max_length {max_length}; "
            + found.skips.summary()
        )
    if other is not None:
        found.comparison = _compare(examples, fmt, other)
    found.previews = [preview(row, fmt) for row in _spread(rows, previews)]
    return found


def preview(row: Row, fmt: ChatFormat) -> Preview:
    """Return a row token by token; a group ends where what is trained begins or ends."""
    groups = []
    for trained, places in itertools.groupby(range(len(row.ids)), key=lambda t: row.mask[t]):
        run = [row.ids[t] for t in places]
        groups += [Group(ids, text, trained) for ids, text in shown(fmt.tokenizer, run)]
    return Preview(row.id, groups)


def _add(found: Audit, example: Example, fmt: ChatFormat) -> list[Row]:
    """Add the figures of one conversation; return its rows that would be trained."""
    try:
        pieces = fmt.pieces(example)
        whole = join(example.id, pieces)
    except RowError as error:
        found.skips.add(str(error), example.id)
        return []
    kept = list(fitting(whole, found.max_length, 1, found.skips))
    found.conversations += bool(kept)
    found.split += len(whole) > 1
    found.rows += len(kept)
    found.answers.update(piece.origin for piece in pieces)
    found.unfinished += isinstance(example, Conversation) and example.finish == "length"
    if any(_ends_in_loop(piece) for piece in pieces):
        found.looping.append(example.id)
    for row in whole:
        found.lengths.append(len(row.ids))
        found.cut += len(row.ids) > found.max_length
        found.cut_tokens += max(0, len(row.ids) - found.max_length)
        found.cut_trained += sum(row.mask[found.max_length :])
    found.tokens += sum(len(row.ids) for row in kept)
    found.trained += sum(sum(row.mask) for row in kept)
    return kept


def _ends_in_loop(piece: Piece) -> bool:
    # The end of turn after a loop, if any, is one token.
    return piece.origin != "ids" and (loops(piece.answer) or loops(piece.answer[:-1]))


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return `count` rows at even distances, the first one among them."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def _compare(examples: Sequence[Example], fmt: ChatFormat, other: ChatFormat) -> Comparison:
    changed = {
        name: value
        for name, value in other.template_kwargs.items()
        if fmt.template_kwargs.get(name) != value
    }
    result = Comparison(changed)
    for example in examples:
        here, there = _whole(example, fmt), _whole(example, other)
        if here is None or there is None:
            result.refused += (here is None) != (there is None)
            continue
        result.conversations += 1
        result.tokens += sum(len(row.ids) for row in here)
        result.different += here != there
        for one, two in itertools.zip_longest(here, there, fillvalue=Row("", [], [])):
            _count_difference(result, example.id, one, two, fmt)
    return result


def _count_difference(
    result: Comparison, name: str, here: Row, there: Row, fmt: ChatFormat
) -> None:
    if here == there:
        return
    one = list(zip(here.ids, here.mask, strict=True))
    two = list(zip(there.ids, there.mask, strict=True))
    start = _common(one, two)
    end = _common(one[start:][::-1], two[start:][::-1])
    result.different_tokens += max(len(one), len(two)) - start - end
    if result.first is None:
        around = slice(max(0, start - _CONTEXT), start + _CONTEXT)
        texts = [str(fmt.tokenizer.decode(row.ids[around])) for row in (here, there)]
        result.first = Difference(name, start, *texts)


def _common(one: Sequence[object], two: Sequence[object]) -> int:
    """Return how many items both begin with."""
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _whole(example: Example, fmt: ChatFormat) -> list[Row] | None:
    try:
        return join(example.id, fmt.pieces(example))
    except RowError:
        return None


def _comparison_dict(comparison: Comparison) -> dict[str, Any]:
    first = comparison.first
    return {
        "settings": comparison.settings,
        "conversations": comparison.conversations,
        "different": comparison.different,
        "tokens": comparison.tokens,
        "different_tokens": comparison.different_tokens,
        "rendered_by_one_only": comparison.refused,
        "first": None if first is None else vars(first),
    }
