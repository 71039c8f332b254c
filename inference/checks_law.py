"""Sampled texts have the target's own law: chi-square of many of them, for every exact rule.

What draws is the code that decodes: `Decoder`, sampler, noise, rule, the head's own drafts, the
target's verify passes over trees. The law they are held against comes from plain forwards of the
target over every text it can write. To have few such texts, tokens are cut to the `TOP_K` best.
As thousands of texts meet the same few contexts, the target is a `Remembered` one.

The first token of a text is emitted by the prefill, the others in rounds with drafts, by as many
rounds as it takes: numbers used twice, within a round or in two of them, show in the joint law.

Shapes: V vocabulary, m texts of one length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead
from drafthead.inference.checks_drafters import OwnGuess
from drafthead.inference.checks_remembered import LENGTH, Remembered, Text
from drafthead.inference.checks_subject import Check, Ids, Subject, shapes_for, written
from drafthead.inference.drafters import Drafter
from drafthead.inference.goodness import LEAST_EXPECTED, POWER, least_shift, p_value
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Static, TreeShape
from drafthead.inference.verify import RULES
from drafthead.inference.warps import Warps

TOP_K = 3
CONTEXT = 8
"""Tokens of the prompt that are kept, the last ones: a head reads them for every text anew."""
ROWS = 64
"""Texts drawn as one batch."""
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)
ALPHA = 1e-3
"""Chance that any of the checks refuses what is exact (Bonferroni)."""


# The law


@dataclass(frozen=True)
class Law:
    """The target's own law of the first `LENGTH` tokens after a prompt."""

    prompt: tuple[int, ...]
    temperature: float
    chances: dict[Text, float]
    """Of every text that it can write."""

    @property
    def warps(self) -> Warps:
        return Warps.of(self.temperature, TOP_K)

    def expected(self, draws: int) -> Tensor:
        return draws * torch.tensor(list(self.chances.values()), dtype=torch.float64)

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top-k {TOP_K}"


def law_of(target: Target, prompt: Ids, draws: int) -> Law:
    """Enumerate what the target can write, by plain forwards of whole texts.

    The temperature is the lowest at which every text is likely enough to be counted alone: a law
    that is all but certain has nothing to be held against.
    """
    given = tuple(prompt[-CONTEXT:])
    cut = Warps.of(1.0, TOP_K)
    logits: dict[Text, Tensor] = {}
    level: list[Text] = [()]
    for _ in range(LENGTH):
        with torch.no_grad():
            ids = torch.tensor([(*given, *text) for text in level], device=target.device)
            ends = target.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]  # (m, V)
        logits |= zip(level, ends, strict=True)
        level = [(*text, token) for text in level for token in _left(cut(logits[text][None])[0])]
    for temperature in TEMPERATURES:
        law = Law(given, temperature, _joint(logits, Warps.of(temperature, TOP_K)))
        if float(law.expected(draws).min()) >= LEAST_EXPECTED:
            break
    return law


def _left(scores: Tensor) -> list[int]:
    found: list[int] = (scores > -torch.inf).nonzero()[:, 0].tolist()
    return found


def _joint(logits: dict[Text, Tensor], warps: Warps) -> dict[Text, float]:
    chances: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        chances = {
            (*text, token): share * float(p[token])
            for text, share in chances.items()
            for p in [warps(logits[text][None])[0].double().softmax(-1)]
            for token in _left(p.log())
        }
    return chances


# The check


@dataclass(frozen=True)
class Case:
    """A rule, who drafts for it and with which noise."""

    rule: str
    drafts: str
    """What the drafter is called."""
    make: Callable[[Remembered, Law], Drafter]
    deepest: int
    noise: type[Noise] = Noise


def cases_of(head: DraftHead) -> list[Case]:
    """Every exact rule on the head's own drafts: chains, a static tree, a best-first tree.

    Ratio rules also on guesses of the target's own: those of a bad head may never be kept.
    """
    chain, tree, best = shapes_for(head, 2)
    return [
        _by_head("coupled", head, best),
        _by_head("rejection", head, chain),
        _by_head("rejection", head, tree),
        _by_head("block", head, chain),
        by_guess("rejection"),
        by_guess("block"),
    ]


OWN_TREE = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
LEANING = 0.9
"""The share of the target's best token in its own guesses: about half of them are refused."""


def _by_head(rule: str, head: DraftHead, shape: TreeShape) -> Case:
    return Case(rule, f"head {shape}", lambda *_: HeadDrafter(head, shape), shape.depth)


def by_guess(rule: str, guess: type[OwnGuess] = OwnGuess, noise: type[Noise] = Noise) -> Case:
    """Drafts of the target's own; a control gives other drafts or another noise."""
    shape = Static.chain(2) if RULES[rule].chains_only else OWN_TREE

    def make(known: Remembered, law: Law) -> OwnGuess:
        return guess(known, shape, law.temperature, LEANING)

    return Case(rule, f"own guesses {shape}", make, shape.depth, noise)


def check_law(
    subject: Subject,
    known: Remembered,
    law: Law,
    case: Case,
    draws: int,
    alpha: float,
    number: int = 0,
    name: str = "",
) -> Check:
    """Chi-square of so many texts, each of a stream of its own; `number` keys the case's noise."""
    counts, kept = _sampled(known, law, case, draws, subject.seed + 1 + number)
    cells = torch.tensor([counts.pop(text, 0) for text in law.chances], dtype=torch.float64)
    expected, strange = law.expected(draws), sum(counts.values())
    p = 0.0 if strange else p_value(cells, expected)
    shift = least_shift(expected, alpha)
    detail = (
        f"{draws} texts of {LENGTH} tokens after {len(law.prompt)}, {law}, {len(cells)} possible "
        f"texts, {kept:.2f} drafted tokens kept a round, in {subject.dtype}. Refused below "
        f"p = {alpha:.1e}; a law {shift:.3f} away in total variation is seen with {POWER:.0%}."
    )
    if strange:
        detail += f" {strange} texts are none that the target can write."
    name = name or f"law of samples: {case.rule}, {case.drafts}"
    return Check(name, p > alpha, f"p = {p:.3g}", detail)


def _sampled(
    known: Remembered, law: Law, case: Case, draws: int, seed: int
) -> tuple[Counter[Text], float]:
    """How often each text was drawn, and how many drafted tokens a round kept on average."""
    drafter, counts = case.make(known, law), Counter[Text]()
    accepted: list[int] = []
    for streams in _batches(draws):
        noise = [case.noise(seed, s, known.vocab_size, known.device) for s in streams]
        rows = written(
            known,
            [law.prompt] * len(noise),
            Sampler(law.warps, noise, case.rule),
            drafter,
            # So that no draft is shortened because the text is about to end.
            LENGTH + 1 + case.deepest,
            stop=_long_enough,
        )
        counts.update(tuple(row.new_ids) for row in rows)
        accepted += [r.accepted for row in rows for r in row.rounds]
    return counts, sum(accepted) / max(1, len(accepted))


def _batches(draws: int) -> Iterable[range]:
    return (range(first, min(first + ROWS, draws)) for first in range(0, draws, ROWS))


def _long_enough(row: Row) -> bool:
    return len(row.ids) - row.prompt >= LENGTH
