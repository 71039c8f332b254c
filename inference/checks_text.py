"""Greedy text with drafts against the target's own: equal, but for ties within rounding.

The truth is transformers' own loop, one token a forward. A drafted pass runs many tokens at once
and rounds differently, so where the target's two best tokens nearly tie, either may come out. How
near is measured on the same texts: `rounding`.

Shapes: T tokens of a text, n new ones, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from drafthead.inference.checks_subject import Check, Ids, Subject, written
from drafthead.inference.drafters import Drafter
from drafthead.inference.rounding import CHUNK, MARGIN, Rounding, Truth, first_difference
from drafthead.inference.sampling import Sampler
from drafthead.inference.speculate import speculate

Writer = Callable[[Drafter, Sequence[Ids]], list[list[int]]]
"""The new tokens of prompts, drafted for."""


@contextmanager
def plain_settings(subject: Subject) -> Iterator[None]:
    """Let `generate` be greedy and nothing else: no penalty of the model's own settings."""
    model, ends = subject.target.model, subject.end_ids
    own = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    try:
        yield
    finally:
        model.generation_config = own


def truths(subject: Subject, tokens: int) -> list[Truth]:
    """The target's own greedy texts of up to so many tokens."""
    found = []
    for prompt in subject.prompts:
        with plain_settings(subject):
            ids = torch.tensor([list(prompt)], device=subject.target.device)
            out = subject.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        new = out.sequences[0, len(prompt) :].tolist()
        found.append(Truth(list(prompt), new, torch.cat(out.logits)))
    return found


# The check


@dataclass(frozen=True)
class Difference:
    """Where a drafted text first leaves the target's own."""

    drafter: str
    prompt: int
    place: int
    """Of the new token, from 0."""
    gap: float
    """How far the emitted token's logit is below the best one's in plain decoding."""

    def __str__(self) -> str:
        return f"{self.drafter}, prompt {self.prompt}, new token {self.place}: gap {self.gap:.3g}"


def first_gap(new: Sequence[int], text: Truth) -> tuple[int, float] | None:
    """Place and gap of the first token that is another one; None where there is none.

    A text that only ends too early or too late has no tie to blame: its gap is infinite.
    """
    if list(new) == text.new:
        return None
    place = first_difference(new, text.new)
    if place is None:
        return min(len(new), len(text.new)), math.inf
    logits = text.logits[place].double()
    return place, float(logits.max() - logits[new[place]])


def by_both(subject: Subject, tokens: int) -> Writer:
    """The first prompt alone by `generate(custom_generate=…)`, the others as one ragged batch."""

    def write(drafter: Drafter, prompts: Sequence[Ids]) -> list[list[int]]:
        (first, *others), found = prompts, []
        ids = torch.tensor([list(first)], device=subject.target.device)
        with plain_settings(subject):
            out = subject.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                custom_generate=speculate(drafter),
            )
        found.append(out[0, len(first) :].tolist())
        return found + (by_decoder(subject, tokens)(drafter, others) if others else [])

    return write


def by_decoder(subject: Subject, tokens: int, sampler: Callable[[], Sampler] = Sampler) -> Writer:
    """All prompts as one ragged batch."""

    def write(drafter: Drafter, prompts: Sequence[Ids]) -> list[list[int]]:
        ends = subject.end_ids
        rows = written(subject.target, prompts, sampler(), drafter, tokens, ends=ends)
        return [row.new_ids for row in rows]

    return write


def check_texts(
    name: str,
    subject: Subject,
    texts: Sequence[Truth],
    measured: Rounding,
    drafters: Mapping[str, Drafter],
    write: Writer,
) -> Check:
    """Every drafter's greedy texts against the target's own, and what every difference is due to.

    In float64 there is no difference; else the token emitted must be within `Rounding.tie` of the
    best one, which is stricter than that the two best are.
    """
    differences, count = [], 0
    for who, drafter in drafters.items():
        for i, (new, text) in enumerate(
            zip(write(drafter, [t.prompt for t in texts]), texts, strict=True)
        ):
            count += 1
            if (found := first_gap(new, text)) is not None:
                differences.append(Difference(who, i, *found))
    bound = 0.0 if subject.exact else measured.tie
    worst = max(differences, key=lambda difference: difference.gap, default=None)
    passed = worst is None or (not subject.exact and worst.gap <= bound)
    tokens, lengths = sum(len(t.new) for t in texts), [len(t.prompt) for t in texts]
    detail = (
        f"{len(texts)} prompts of {min(lengths)} to {max(lengths)} tokens, {tokens} new tokens "
        f"each for {', '.join(drafters)}, against transformers' own generate(do_sample=False) in "
        f"{subject.dtype}. "
    )
    if subject.exact:
        detail += "No difference is allowed."
    else:
        detail += (
            f"A different token is allowed within {bound:.3g} of the best logit: forwards of one, "
            f"{CHUNK} and all tokens move the best two against each other by up to "
            f"{measured.apart:.3g} here, and passes of other shapes may by {MARGIN} times that."
        )
    if worst is not None:
        told = sorted(differences, key=lambda difference: -difference.gap)[:3]
        detail += f" First differences, the widest first: {'; '.join(map(str, told))}."
    figure = f"{count - len(differences)} of {count} texts equal"
    if worst is not None:
        figure += f", largest gap {worst.gap:.3g}"
    return Check(name, passed, figure, detail)
