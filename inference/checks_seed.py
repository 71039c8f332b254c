"""Coupled sampling: the same seed and streams give the same text, whoever drafts, in any batch.

The truth is plain decoding of each prompt alone, without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drafthead.inference.checks_drafters import Scripted
from drafthead.inference.checks_subject import Check, Subject, written
from drafthead.inference.drafters import Drafter
from drafthead.inference.noise import Noise
from drafthead.inference.rounding import Rounding, first_difference
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.warps import Warps

STREAMS = 3
"""Rows of a batch, each a prompt with a stream of its own; prompts repeat where they are fewer."""
Key = Callable[[int, int], int]
"""Which number keys the noise of a row, from its stream and its slot in the batch."""


@dataclass(frozen=True)
class Setting:
    """How tokens are drawn, and in which order the prompts are put into a batch."""

    temperature: float
    top_k: int
    top_p: float
    reverse: bool

    @property
    def warps(self) -> Warps:
        return Warps.of(self.temperature, self.top_k, self.top_p)

    def __str__(self) -> str:
        cut = f", top-k {self.top_k}, top-p {self.top_p:g}" if self.top_k else ""
        return f"temperature {self.temperature:g}{cut}{', in reverse order' * self.reverse}"


SETTINGS = (Setting(0.8, 0, 1.0, reverse=False), Setting(1.0, 20, 0.9, reverse=True))


def by_stream(stream: int, slot: int) -> int:
    """As it should be: where a row stands in its batch changes nothing."""
    return stream


def by_slot(stream: int, slot: int) -> int:
    """Fault: its place in the batch decides a row's noise."""
    return slot


@dataclass
class _Count:
    texts: int = 0
    equal: int = 0
    tied: int = 0


def check_seeds(
    subject: Subject,
    measured: Rounding,
    drafters: Mapping[str, Drafter],
    tokens: int,
    settings: Sequence[Setting] = SETTINGS,
    key: Key = by_stream,
) -> Check:
    """Every drafter and none, in batches of both orders, and alone, against plain texts alone."""
    count, streams, names = _Count(), range(STREAMS), list[str]()
    for setting in settings:
        own = [_drawn(subject, setting, [i], None, tokens, by_stream)[0] for i in streams]
        everyone: dict[str, Drafter | None] = {"no drafter": None, **drafters}
        if drafters:
            scripted = Scripted([row.ids for row in own], subject.target.vocab_size)
            everyone["scripted"] = scripted
        names = [*everyone]
        order = [*reversed(streams)] if setting.reverse else [*streams]
        for drafter in everyone.values():
            alone = setting.reverse and drafter is not None
            for rows in (order, order[:1]) if alone else (order,):
                drawn = _drawn(subject, setting, rows, drafter, tokens, key)
                for stream, row in zip(rows, drawn, strict=True):
                    _note(count, subject, setting, own[stream], row, stream, measured)
    bound = 0.0 if subject.exact else measured.tie
    detail = (
        f"{STREAMS} streams, {tokens} new tokens, coupled sampling, seed {subject.seed}, in "
        f"{subject.dtype}: {', '.join(names)}; {'; '.join(map(str, settings))}; alone and as one "
        "batch, against plain decoding of each stream's prompt alone."
    )
    if count.tied:
        detail += f" {count.tied} differ at a tie within {bound:.3g} (rounding, as measured)."
    figure = f"{count.equal} of {count.texts} texts equal"
    return Check("same seed, same text", count.equal + count.tied == count.texts, figure, detail)


def _drawn(
    subject: Subject,
    setting: Setting,
    streams: Sequence[int],
    drafter: Drafter | None,
    tokens: int,
    key: Key,
) -> list[Row]:
    """The texts of these prompts as one batch, each with the noise of its own stream."""
    target = subject.target
    noise = [
        Noise(subject.seed, key(stream, slot), target.vocab_size, target.device)
        for slot, stream in enumerate(streams)
    ]
    prompts = [subject.prompts[stream % len(subject.prompts)] for stream in streams]
    sampler = Sampler(setting.warps, noise)
    return written(target, prompts, sampler, drafter, tokens, logits=drafter is None)


def _note(
    count: _Count,
    subject: Subject,
    setting: Setting,
    own: Row,
    row: Row,
    stream: int,
    measured: Rounding,
) -> None:
    count.texts += 1
    if row.new_ids == own.new_ids:
        count.equal += 1
        return
    place = first_difference(row.new_ids, own.new_ids)
    if place is None or subject.exact or own.logits is None:
        return
    target = subject.target
    noise = Noise(subject.seed, stream, target.vocab_size, target.device)
    scores = setting.warps(own.logits[place][None])[0] + noise.gumbel(own.prompt + place)
    gap = float(scores.max() - scores[row.new_ids[place]])
    count.tied += gap <= measured.tie / setting.temperature
