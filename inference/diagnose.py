"""Why a head drafts worse when served than training says: each likely cause undone by itself.

On the serving side one thing at a time is made as training may have had it, and the head is
unrolled over the same greedy texts: where tau comes back, that was it. What can be compared
directly is: states as served with those that transformers gives, rendered prompts id by id, and
what a head borrows with what the target has. A fault that none of these explains gets no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.heads.contract import Contract
from drafthead.inference.agreement import TOLERANCE
from drafthead.inference.decoder import check_prompt, decode
from drafthead.inference.evaluate import end_ids
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.metrics import Round, acceptance
from drafthead.inference.sampling import Sampler
from drafthead.inference.simulate import batch_of, chain_rounds
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape
from drafthead.inference.undoing import (
    Cause,
    Undoing,
    other_heads,
    other_states,
    recipe_of,
    strayed,
    streams,
)

Text = tuple[Sequence[int], int]
"""Ids of a prompt and the target's greedy answer, and how many are the prompt's."""
Served = tuple[TeacherBatch, int]
"""A text with its states, and how many ids are the prompt's."""
Rendered = tuple[Sequence[int], Sequence[int]]
"""Ids of one prompt: as training rendered it, and as serving does."""

CLOSED = 0.5
"""Share of what is missing that has to come back for a cause to be named."""
ALIKE = 0.01
"""Share of tau by which two explanations are told apart."""
CAUSES: tuple[Cause, ...] = (
    "layer",
    "norm",
    "template",
    "vocabulary map",
    "rotary base",
    "embedding and rows",
    "decoding",
)


@dataclass(frozen=True)
class _Tried:
    """What undoing one thing comes to."""

    cause: Cause
    what: str
    undone: float
    undo: Undoing | None = None


@dataclass(frozen=True)
class Finding:
    """What one cause comes to."""

    cause: Cause
    what: str
    """What is otherwise where it was undone, or why there was nothing to undo."""
    tau: float
    """As the head is served."""
    undone: float | None
    """The best of what undoing it comes to; None where nothing could be undone."""
    named: bool = False
    """Whether this explains what is missing."""


def diagnose(
    head: DraftHead,
    target: Target,
    texts: Sequence[Text],
    expected: float,
    depth: int,
    *,
    decoded: float | None = None,
    rendered: Sequence[Rendered] = (),
    trained: DraftHead | None = None,
) -> list[Finding]:
    """Test each cause on a served, bound head; a healthy one gets no cause named.

    `expected`: tau of chains of `depth`, from training. `decoded`: tau that was decoded on the
    texts, where it was. `rendered`: the prompts by both sides, without which templates are not
    compared. `trained`: the head in memory, whose layers, map and rotary base are tried, too.
    """
    served = [_served(head, target, text) for text in texts]
    tau = _tau(head, served, depth)
    tried: list[_Tried] = []
    if head.contract.layers:
        known = None if trained is None else trained.contract
        for undo, undone in _by_states(head, target, served, depth, known):
            tried.append(_Tried(undo.cause, undo.what, undone, undo))
    for undo in other_heads(head, target, trained):
        with undo.changed():
            tried.append(_Tried(undo.cause, undo.what, _tau(head, served, depth), undo))
    if differing := sum(list(ours) != list(theirs) for ours, theirs in rendered):
        what = f"{differing} of {len(rendered)} prompts are rendered otherwise than in training"
        undone = _rendered_tau(head, target, texts, depth, rendered)
        tried.append(_Tried("template", what, undone))
    if decoded is not None:
        what = f"the served head unrolled over its text comes to {tau:.2f}, drafting to"
        tried.append(_Tried("decoding", f"{what} {decoded:.2f}", tau))
    now = tau if decoded is None else min(tau, decoded)
    best = {t.cause: t for t in sorted(tried, key=lambda t: t.undone)}
    named = _closest(tried, now, expected)
    if "decoding" in [t.cause for t in named]:  # unrolled as it is, the head is sound
        named = [t for t in named if t.cause == "decoding"]
    if len(named) > 1:  # what drafts as well may still be further from what was trained
        fits = [_fit(head, target, served, depth, t.undo) if t.undo else 0.0 for t in named]
        most = max((fit for fit, t in zip(fits, named, strict=True) if t.undo), default=0.0)
        named = [t for fit, t in zip(fits, named, strict=True) if t.undo is None or fit == most]
    best |= {t.cause: t for t in named}
    nothing = "nothing is otherwise"
    return [
        Finding(cause, best[cause].what, now, best[cause].undone, best[cause] in named)
        if cause in best
        else Finding(cause, nothing, now, None)
        for cause in CAUSES
    ]


def causes(findings: Sequence[Finding]) -> list[Finding]:
    """Those that explain what is missing."""
    return [finding for finding in findings if finding.named]


def _closest(tried: Sequence[_Tried], tau: float, expected: float) -> list[_Tried]:
    """What comes closest, if it brings enough of it back and anything is missing at all."""
    missing = expected - tau
    if missing <= TOLERANCE * expected or not tried:
        return []
    enough = max(tau + CLOSED * missing, (1 - ALIKE) * max(t.undone for t in tried))
    return [t for t in tried if t.undone >= enough]


@torch.no_grad()
def _fit(
    head: DraftHead, target: Target, texts: Sequence[Served], depth: int, undo: Undoing
) -> float:
    """Mean log-probability of the texts' tokens in the drafts, where they can be drafted."""
    total, count = 0.0, 0
    with undo.changed():
        draft_of = torch.full((head.contract.vocab_size,), -1, device=target.device)
        ids = head.draft_ids
        draft_of[ids] = torch.arange(len(ids), device=target.device)
        for batch, _ in texts:
            given = batch
            if undo.recipe is not None:
                read = streams(target, head.contract, batch.ids)
                given = replace(batch, features=torch.cat([*map(read, undo.recipe)], dim=-1))
            for made in head.unroll(given, depth):
                labels = draft_of[batch.ids[0, made.teacher + 1]]
                known = labels >= 0
                logs = made.logits[known].float().log_softmax(-1)
                total += float(logs.gather(1, labels[known, None]).sum())
                count += int(known.sum())
    return total / max(1, count)


@torch.no_grad()
def _served(head: DraftHead, target: Target, text: Text) -> Served:
    """A text with the states that the target gives when it serves."""
    ids, prompt = torch.tensor([list(text[0])], device=target.device), text[1]
    return batch_of(ids, prompt, *target.states(ids, head.contract.layers)), prompt


def _tau(head: DraftHead, texts: Sequence[Served], depth: int) -> float:
    return acceptance([chain_rounds(head, batch, n, depth) for batch, n in texts]).tau


@torch.no_grad()
def _by_states(
    head: DraftHead,
    target: Target,
    texts: Sequence[Served],
    depth: int,
    trained: Contract | None,
) -> list[tuple[Undoing, float]]:
    """Tau with other states; with the contract's own, where those that are served are not they."""
    contract = head.contract
    undoings = other_states(contract, trained)
    made: dict[int, list[list[Round]]] = {}
    for number, (batch, prompt) in enumerate(texts):
        read = streams(target, contract, batch.ids)
        if number == 0 and (cause := strayed(batch.features, contract, read)) is not None:
            what = "the states served are not those that the contract names"
            undoings.insert(0, Undoing(cause, what, recipe_of(contract)))
        for at, undo in enumerate(undoings):
            assert undo.recipe is not None, "of states alone"
            features = torch.cat([read(stream) for stream in undo.recipe], dim=-1)
            given = replace(batch, features=features, last_hidden=read((contract.num_layers, 1)))
            made.setdefault(at, []).append(chain_rounds(head, given, prompt, depth))
    return [(undo, acceptance(made[at]).tau) for at, undo in enumerate(undoings)]


def _rendered_tau(
    head: DraftHead,
    target: Target,
    texts: Sequence[Text],
    depth: int,
    rendered: Sequence[Rendered],
) -> float:
    """Tau decoded after the prompts as training renders them."""
    longest = max(len(ids) - prompt for ids, prompt in texts)
    prompts = [list(ours) for ours, _ in rendered]
    for ids in prompts:
        check_prompt(target, ids, longest)
    drafter = HeadDrafter(head, Shape(depth, 1, depth))
    rows, _ = decode(
        target, prompts, Sampler(), drafter, max_new_tokens=longest, eos=end_ids(target)
    )
    return acceptance([row.rounds for row in rows]).tau
