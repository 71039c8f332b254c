"""Greedy text with drafts against the target's own: equal, but for ties within rounding.

The truth is transformers' own loop, one token a forward. A drafted pass runs many tokens at once
and rounds differently, so where the target's two best tokens nearly tie, either may come out. How
near is measured, on the same texts and by transformers' own forwards alone, so that a fault in this
package cannot widen it: `Rounding`.

Shapes: T tokens of a text, n new ones, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from drafthead.inference.checks_subject import Check, Ids, Subject, written
from drafthead.inference.drafters import Drafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target

CHUNK = 5
"""Tokens of one forward where rounding is measured, besides one and all of them: as in a round."""

Writer = Callable[[Drafter, Sequence[Ids]], list[list[int]]]
"""The new tokens of prompts, drafted for."""


@dataclass(frozen=True)
class Truth:
    """What transformers' own greedy loop makes of a prompt."""

    prompt: list[int]
    new: list[int]
    logits: Tensor
    """(n, V) behind each new token, from forwards of one token."""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new]


@dataclass(frozen=True)
class Rounding:
    """How far the target's own forwards of one, few and all tokens of a text differ."""

    logits: float
    """The largest change of the logit of one of the two best tokens; one rounding step at least."""
    states: float
    """The largest change of a key or value, as a share of the largest of its layer; as above."""

    @property
    def tie(self) -> float:
        """Two tokens so near may change places: each of them can move by `logits`."""
        return 2 * self.logits


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


def rounding(target: Target, texts: Sequence[Truth]) -> Rounding:
    """Measured on these texts, the widest over all of them."""
    measured = [_rounding(target, text) for text in texts]
    return Rounding(max(r.logits for r in measured), max(r.states for r in measured))


@torch.no_grad()
def _rounding(target: Target, text: Truth) -> Rounding:
    ids = torch.tensor([text.ids[:-1]], device=target.device)
    whole, parts, start = DynamicCache(), DynamicCache(), len(text.prompt)
    cuts = [start, *[CHUNK] * ((ids.shape[1] - start) // CHUNK), (ids.shape[1] - start) % CHUNK]
    at_once = target.model(ids, cache=whole, use_cache=True).logits[0, start - 1 :]
    pieces = [
        target.model(piece, cache=parts, use_cache=True).logits[0]
        for piece in ids.split([cut for cut in cuts if cut], dim=1)
    ]
    chunked = torch.cat(pieces)[start - 1 :]
    step = torch.finfo(target.dtype).eps
    states = step
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for name in ("keys", "values"):
            states = max(states, relative_change(getattr(one, name), getattr(other, name)))
    moved = max(_moved(text.logits, many) for many in (at_once, chunked))
    return Rounding(max(moved, step * float(text.logits.amax(-1).abs().max())), states)


def _moved(one: Tensor, many: Tensor) -> float:
    """Of two (n, V) logits: the largest change of a token that is among the two best of either."""
    best = torch.cat([one.topk(2).indices, many.topk(2).indices], dim=1)
    return float((one.double().gather(1, best) - many.double().gather(1, best)).abs().max())


def relative_change(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors as a share of the largest number in `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    largest = float(theirs.abs().max())
    change = float((ours - theirs).abs().max())
    if not math.isfinite(change):
        return math.inf
    return change / largest if largest > 0 else change


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


def first_difference(new: Sequence[int], text: Truth) -> tuple[int, float] | None:
    """Place and gap of the first token that is another one; None where there is none.

    A text that only ends too early or too late has no tie to blame: its gap is infinite.
    """
    if list(new) == text.new:
        return None
    for place, (ours, own) in enumerate(zip(new, text.new, strict=False)):
        if ours != own:
            logits = text.logits[place].double()
            return place, float(logits.max() - logits[ours])
    return min(len(new), len(text.new)), math.inf


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
            if (found := first_difference(new, text)) is not None:
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
            f"{CHUNK} and all tokens move a leading logit by up to {measured.logits:.3g} here."
        )
    if worst is not None:
        told = sorted(differences, key=lambda difference: -difference.gap)[:3]
        detail += f" First differences, the widest first: {'; '.join(map(str, told))}."
    figure = f"{count - len(differences)} of {count} texts equal"
    if worst is not None:
        figure += f", largest gap {worst.gap:.3g}"
    return Check(name, passed, figure, detail)
