"""One evaluation as a whole: load target and head, read prompts, measure, compare in fp32.

What the command and the demo share above `evaluate`, which measures drafters that exist already.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Prompt, read_prompts
from drafthead.data.embedded import data_path
from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.inference.decoder import check_prompt
from drafthead.inference.drafters import Drafter, HeadDrafter, LookupDrafter, MergedDrafter
from drafthead.inference.evaluate import (
    PLAIN,
    Answer,
    Settings,
    evaluate,
    identity,
    plain_record,
    record,
    text_of,
)
from drafthead.inference.simulate import simulate
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import Shape
from drafthead.inference.verify import RULES


@dataclass(frozen=True)
class Comparison:
    """What to evaluate."""

    head: Path
    target: str
    dtype: str
    prompts: tuple[str, ...] = ("samples/test",)
    """Prompt files; `samples/NAME` is an embedded one."""
    trees: tuple[str, ...] = ("chain:3",)
    """The head drafts with each; the first also serves in the merged drafter."""
    limit: int | None = None
    """Most prompts, taken from the categories in turn."""
    identity: int = 4
    """Prompts on which every drafter is compared with plain decoding in float32."""
    identity_tokens: int = 32
    settings: Settings = field(default_factory=Settings)


def compare(
    asked: Comparison,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stage: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure: `records` by drafter name, simulated tau, settings and versions."""
    shapes = [Shape.parse(tree) for tree in asked.trees]
    check_rule(asked.settings.rule, shapes)
    prompts = prompts_of(asked.prompts, stage)
    prompts = spread(prompts, asked.limit or len(prompts))
    head = opened(asked.head, asked.dtype)
    target = load_target(asked.target, asked.dtype)
    drafters = line_up(fitted(head, target), shapes)
    template = head.contract.template_kwargs
    _first_turns(target, prompts, template, asked.settings.max_new_tokens)
    answers = evaluate(
        target, prompts, drafters, asked.settings, template_kwargs=template, progress=progress
    )
    result: dict[str, Any] = {}
    chain = next((n for n, s in zip(_names(shapes), shapes, strict=True) if s.is_chain), None)
    if chain and asked.settings.temperature == 0:
        depth = next(s.depth for s in shapes if s.is_chain)
        told = simulate(head, target, [(a.ids, a.prompt_length) for a in answers[chain]], depth)
        result |= {"simulated_tau": told.tau, "simulated_tau_interval": list(told.tau_interval)}
    sample = text_of(target, answers[PLAIN][0])
    del target, head, drafters  # before the float32 copies are made
    same: dict[str, dict[str, Any]] = {}
    # Ratio rules keep the target's law, not plain decoding's very draw from it.
    same_draw = asked.settings.temperature == 0 or asked.settings.rule == "coupled"
    if asked.identity and same_draw:
        stage("comparing with plain decoding in float32")
        same = _identity(asked, shapes, prompts[: asked.identity])
    return result | {
        "records": records_of(answers, same, same_draw),
        "prompts": len(prompts),
        "new_tokens": asked.settings.max_new_tokens,
        "settings": asdict(asked.settings),
        "trees": [str(shape) for shape in shapes],
        "dtype": asked.dtype,
        "sample": sample,
        "versions": versions(),
    }


def _identity(
    asked: Comparison, shapes: Sequence[Shape], prompts: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    tokens = min(asked.identity_tokens, asked.settings.max_new_tokens)
    settings = replace(asked.settings, max_new_tokens=tokens)
    target = load_target(asked.target, "float32")
    head = fitted(opened(asked.head, "float32"), target)
    ids = _first_turns(target, prompts, head.contract.template_kwargs, tokens)
    return identity(target, ids, line_up(head, shapes), settings)


def _first_turns(
    target: Target, prompts: Sequence[Prompt], template: dict[str, Any], new_tokens: int
) -> list[list[int]]:
    """Ids of the first turn of each prompt, refused by name where they do not fit the target."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, template)
    turns = []
    for prompt in prompts:
        turns.append(chat.prompt_ids(prompt.opening))
        try:
            check_prompt(target, turns[-1], new_tokens)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error
    return turns


def line_up(head: DraftHead, shapes: Sequence[Shape]) -> dict[str, Drafter]:
    """A report's drafters, apart, so that the head is not credited with the lookup's gain."""
    heads: dict[str, Drafter] = {
        name: HeadDrafter(head, shape) for name, shape in zip(_names(shapes), shapes, strict=True)
    }
    hit = LookupDrafter(length=8, longest=3, shortest=3)
    merged = MergedDrafter(hit, HeadDrafter(head, shapes[0]))
    return {"lookup": LookupDrafter(length=8, longest=3, shortest=2), **heads, "merged": merged}


def _names(shapes: Sequence[Shape]) -> list[str]:
    return ["head"] if len(shapes) == 1 else [f"head {shape}" for shape in shapes]


def opened(folder: Path, dtype: str) -> DraftHead:
    """Load a head, unbound; before its target, which takes longer and would be loaded in vain."""
    return load_head(folder, getattr(torch, dtype))


def fitted(head: DraftHead, target: Target) -> DraftHead:
    """Bind a head; one made for another target, tokenizer or template is refused."""
    contract = head.contract
    contract.check(target.contract(contract.layers, contract.template_kwargs))
    head.bind(target.model)
    return head


def check_rule(rule: str, shapes: Sequence[Shape]) -> None:
    """Refuse a rule that is unknown, or that cannot verify one of these shapes."""
    if rule not in RULES:
        raise ValueError(f"rule {rule!r}: choose one of {', '.join(RULES)}")
    trees = [str(shape) for shape in shapes if not shape.is_chain]
    if rule != "coupled" and trees:
        raise ValueError(
            f"rule {rule!r} verifies chains only, not {trees[0]}: "
            "use a tree of chain:DEPTH, or the rule 'coupled'"
        )


def prompts_of(names: Sequence[str], stage: Callable[[str], None]) -> list[Prompt]:
    """Prompts of all files, `samples/NAME` being an embedded one; skipped rows are told."""
    prompts: list[Prompt] = []
    for name in names:
        found, skips = read_prompts(data_path(name))
        prompts += found
        if skips.total:
            stage(f"{name}: {skips.summary()}")
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, taken from the categories in turn, in the order given."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    ranks = max(map(len, by_category.values()))
    turns = [c[i] for i in range(ranks) for c in by_category.values() if i < len(c)]
    return turns[:count]


def records_of(
    answers: Mapping[str, Sequence[Answer]],
    same: Mapping[str, dict[str, Any]],
    same_draw: bool = True,
) -> dict[str, Any]:
    """Records by drafter name, plain first; without `same_draw` no text is held against plain's."""
    plain = answers[PLAIN]
    table: dict[str, Any] = {PLAIN: plain_record(plain)}
    for name, given in answers.items():
        if name != PLAIN:
            table[name] = record(name, given, plain, same.get(name))
            if not same_draw:
                table[name]["agreement"] = None
    return table


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    packages = ("drafthead", "torch", "transformers", "accelerate")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        **{name: version(name) for name in packages},
    }
