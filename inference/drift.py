"""What a head loses on another target than its own, and whether that is worth a new training.

The same head answers the same prompts for both targets. Their texts differ, as they should: what is
compared is how much of each target's own text the head foresees. Prompts are resampled in pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt
from drafthead.heads.base import DraftHead
from drafthead.inference.agreement import Interval, paired_interval
from drafthead.inference.answering import (
    Answer,
    Settings,
    Turn,
    answer_turns,
    stream_of,
    text_of,
)
from drafthead.inference.grow import drafting
from drafthead.inference.lineup import fitted, opened
from drafthead.inference.metrics import Round, acceptance
from drafthead.inference.other_target import fit_to_other, kind_of, load_other, merged, quantise
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import TreeShape

log = logging.getLogger(__name__)

WORTH = 0.03
"""Share of tau, and so of tokens a forward, whose clear loss makes a new training worth it."""

ByPrompt = dict[str, list[Round]]


def drift(
    folder: Path,
    target: str,
    other: str,
    prompts: Sequence[Prompt],
    shape: TreeShape,
    settings: Settings,
    *,
    dtype: str,
    batch: int = 1,
    before: Sequence[Answer] | None = None,
    stage: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tau of a head on its target and on another, the loss with its interval, and advice.

    `other`: a model's folder or Hub id, a folder with a PEFT adapter for the target, or `int8`.
    `before`: what the head has answered on its own target with these settings, if it has.
    Raises ContractError (one line) for a target of another shape or vocabulary.
    """
    head, kind = opened(folder, dtype), kind_of(other)
    adapts = type(head).adapt is not DraftHead.adapt
    if kind == "int8" and adapts:
        raise ValueError(f"{folder}: the head changes its target's weights, which int8 freezes")
    own = load_target(target, dtype) if before is None or kind != "model" else None
    if own is not None:
        fitted(head, own)
    if before is None:
        assert own is not None, "it was loaded"
        stage(f"answering {len(prompts)} prompts on the head's own target")
        before = _answers(head, own, prompts, shape, settings, batch)
    stage(f"answering {len(prompts)} prompts on {other}")
    if kind == "int8":
        assert own is not None, "it was loaded"
        quantise(own)  # of what the head borrows, nothing changes
        beside, remarks = own, []
    else:
        if adapts or kind == "model":
            own = None  # before another one is loaded
            head = opened(folder, dtype)
        beside = load_other(target, other, dtype) if own is None else merged(own, Path(other))
        remarks = fit_to_other(head, target, beside)
    for remark in remarks:
        log.warning("%s: %s", other, remark)
    after = _answers(head, beside, prompts, shape, settings, batch)
    return {"against": other, "kind": kind, "shape": str(shape), "remarks": remarks} | (
        _compared(before, after)
    )


def _answers(
    head: DraftHead,
    target: Target,
    prompts: Sequence[Prompt],
    shape: TreeShape,
    settings: Settings,
    batch: int,
) -> list[Answer]:
    """All turns of all prompts, each after the replies before it; what fails is left out."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, head.contract.template_kwargs)
    drafter = drafting(head, shape, target, batch)
    talks: dict[int, list[Message]] = {index: list(p.opening) for index, p in enumerate(prompts)}
    answers: list[Answer] = []
    for number in range(1, max(len(p.turns) for p in prompts) + 1):
        talks = {i: talk for i, talk in talks.items() if number <= len(prompts[i].turns)}
        turns = []
        for index, talk in talks.items():
            prompt = prompts[index]
            if number > 1:
                talk.append(Message("user", prompt.turns[number - 1]))
            ids = chat.prompt_ids(talk)
            stream = stream_of(index, number)
            turns.append(Turn(ids, stream, prompt.id, prompt.category, number=number))
        slots = min(batch, len(turns))
        given = answer_turns(target, drafter, turns, settings, batch=slots) if turns else []
        for index, found in zip([*talks], given, strict=True):
            if isinstance(found, str):
                log.warning("prompt %s, turn %d: %s", prompts[index].id, number, found)
                del talks[index]
                continue
            answers.append(found)
            talks[index].append(Message("assistant", text_of(target, found)))
    return answers


def _compared(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """The figures of both on the turns that both answered, and what they advise."""
    both = {a.place for a in before} & {a.place for a in after}
    if not both:
        raise ValueError("no prompt was answered on both targets: nothing can be compared")
    category = {a.prompt: a.category for a in before}
    sides = [_by_prompt([a for a in side if a.place in both]) for side in (before, after)]
    own, other = sides
    whole = _loss(own, other)
    groups = {}
    for name in sorted(set(category.values())):
        chosen = [
            {prompt: rounds for prompt, rounds in side.items() if category[prompt] == name}
            for side in sides
        ]
        if all(any(side.values()) for side in chosen):
            groups[name] = _loss(*chosen)
    return {
        "prompts": len(own),
        "tau": _tau(own),
        "other": _tau(other),
        "lost": whole["lost"],
        "lost_interval": whole["lost_interval"],
        "lost_share": whole["lost"] / whole["tau"],
        "by_category": groups,
        "worth": worth(whole["tau"], whole["lost_interval"]),
        "advice": advice(whole["tau"], whole["lost"], whole["lost_interval"]),
    }


def _by_prompt(answers: Sequence[Answer]) -> ByPrompt:
    found: ByPrompt = {}
    for a in answers:
        found.setdefault(a.prompt, []).extend(a.rounds)
    return found


def _tau(side: Mapping[str, list[Round]]) -> dict[str, Any]:
    figures = acceptance(list(side.values()))
    return {
        "tau": figures.tau,
        "interval": figures.tau_interval,
        "rounds": figures.rounds,
        "survival": list(figures.survival),
    }


def _loss(own: Mapping[str, list[Round]], other: Mapping[str, list[Round]]) -> dict[str, Any]:
    names = [*own]
    here, there = [own[name] for name in names], [other[name] for name in names]
    tau, now = acceptance(here).tau, acceptance(there).tau
    return {
        "prompts": len(names),
        "tau": tau,
        "other": now,
        "lost": tau - now,
        "lost_interval": paired_interval(here, there),
    }


def worth(tau: float, interval: Interval | Sequence[float] | None) -> bool | None:
    """Whether a new training is worth it: the loss is clearly above WORTH of tau, or clearly not;
    None where the interval leaves it open, or where there is none.
    """
    if interval is None:
        return None
    low, high = interval
    if low > WORTH * tau:
        return True
    return False if high <= WORTH * tau else None


def advice(tau: float, lost: float, interval: Interval | Sequence[float] | None) -> str:
    """The same in a sentence, with its figures."""
    share = f"{100 * lost / tau:.1f} % of tau"
    if interval is None:
        return f"undecided: the head loses {share} on a single prompt; give more prompts"
    low, high = (100 * end / tau for end in interval)
    share += f" (95 % interval {low:.1f} to {high:.1f} %)"
    rule = f"{100 * WORTH:.0f} %"
    found = worth(tau, interval)
    if found:
        return (
            f"train the head anew for this target: it loses {share}, clearly above {rule}; as many "
            "tokens fewer come of each forward of the target"
        )
    if found is None:
        return (
            f"undecided: the head loses {share}, which may be more or less than {rule}; "
            "give more prompts"
        )
    if high < 0:
        return f"keep the head: it does better here, by {-100 * lost / tau:.1f} % of tau"
    return f"keep the head: it loses {share}, not above {rule}"
