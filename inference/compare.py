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
from drafthead.data.embedded import REFERENCE, data_path, reference_head
from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.inference.decoder import check_prompt
from drafthead.inference.drafters import Drafter, LookupDrafter, MergedDrafter
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
from drafthead.inference.grow import check_rule_of, drafting
from drafthead.inference.sibling import load_sibling
from drafthead.inference.simulate import simulate
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import TreeShape, parse_shape
from drafthead.inference.verify import RULES

LOOKUP = 8
"""Tokens that prompt lookup proposes."""


@dataclass(frozen=True)
class Comparison:
    """What to evaluate."""

    target: str
    dtype: str
    head: Path | None = None
    sibling: str | None = None
    """Folder or Hub id of a smaller model that drafts, too."""
    prompts: tuple[str, ...] = ("samples/test",)
    """Prompt files; `samples/NAME` is an embedded one."""
    trees: tuple[str, ...] = ("chain:3",)
    """Head and sibling draft with each; the first also serves in the merged drafter."""
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
    shapes = [parse_shape(tree) for tree in asked.trees]
    check_rule(asked.settings.rule, shapes, lossy=asked.settings.lossy)
    prompts = prompts_of(asked.prompts, stage)
    prompts = spread(prompts, asked.limit or len(prompts))
    target, heads = models(asked, asked.dtype)
    template = template_of(heads)
    drafters = line_up(target, heads, shapes)
    _first_turns(target, prompts, template, asked.settings.max_new_tokens)
    answers = evaluate(
        target, prompts, drafters, asked.settings, template_kwargs=template, progress=progress
    )
    result = _simulated(asked, target, heads, shapes, answers)
    sample = text_of(target, answers[PLAIN][0])
    del target, heads, drafters  # before the float32 copies are made
    same: dict[str, dict[str, Any]] = {}
    # Ratio rules keep the target's law, not plain decoding's very draw from it.
    greedy = asked.settings.temperature == 0 and RULES[asked.settings.rule].exact
    same_draw = greedy or asked.settings.rule == "coupled"
    if asked.identity and same_draw:
        stage("comparing with plain decoding in float32")
        same = _identity(asked, shapes, prompts[: asked.identity])
    return result | {
        "records": records_of(answers, same, same_draw, asked.settings.lossy),
        "prompts": len(prompts),
        "new_tokens": asked.settings.max_new_tokens,
        "settings": asdict(asked.settings),
        "lossy": asked.settings.lossy,
        "trees": [str(shape) for shape in shapes],
        "dtype": asked.dtype,
        "sample": sample,
        "versions": versions(),
    }


def models(asked: Comparison, dtype: str) -> tuple[Target, dict[str, DraftHead]]:
    """Target, and what drafts for it by name: `head` and `sibling`, where they are asked for."""
    # The head first: it is read in no time, and a target would be loaded in vain for a bad one.
    head = None if asked.head is None else opened(asked.head, dtype)
    target = load_target(asked.target, dtype)
    heads: dict[str, DraftHead] = {}
    if head is not None:
        heads["head"] = fitted(head, target)
    if asked.sibling is not None:
        heads["sibling"] = load_sibling(asked.sibling, target, dtype)
    return target, heads


def _simulated(
    asked: Comparison,
    target: Target,
    heads: Mapping[str, DraftHead],
    shapes: Sequence[TreeShape],
    answers: Mapping[str, Sequence[Answer]],
) -> dict[str, Any]:
    """What the head's first chain should come to on these greedy answers."""
    named = zip(_names("head", shapes), shapes, strict=True)
    chains = [
        (name, shape)
        for name, shape in named
        if shape.is_chain and shape.nodes and getattr(shape, "stop", None) is None
    ]
    if not chains or "head" not in heads or asked.settings.temperature > 0:
        return {}
    name, shape = chains[0]
    texts = [(a.ids, a.prompt_length) for a in answers[name]]
    told = simulate(heads["head"], target, texts, shape.depth)
    return {"simulated_tau": told.tau, "simulated_tau_interval": list(told.tau_interval)}


def _identity(
    asked: Comparison, shapes: Sequence[TreeShape], prompts: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    tokens = min(asked.identity_tokens, asked.settings.max_new_tokens)
    settings = replace(asked.settings, max_new_tokens=tokens)
    target, heads = models(asked, "float32")
    ids = _first_turns(target, prompts, template_of(heads), tokens)
    return identity(target, ids, line_up(target, heads, shapes), settings)


def template_of(heads: Mapping[str, DraftHead]) -> dict[str, Any]:
    """The template arguments that the head was trained with; none without a head."""
    return dict(heads["head"].contract.template_kwargs) if "head" in heads else {}


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


def line_up(
    target: Target, heads: Mapping[str, DraftHead], shapes: Sequence[TreeShape]
) -> dict[str, Drafter]:
    """A report's drafters, apart, so that none is credited with another's gain.

    Prompt lookup, every head with every shape, and the lookup merged with the first head.
    """
    table: dict[str, Drafter] = {"lookup": LookupDrafter(LOOKUP, longest=3, shortest=2)}
    for who, head in heads.items():
        for name, shape in zip(_names(who, shapes), shapes, strict=True):
            table[name] = drafting(head, shape, target)
    for who in [*heads][:1]:
        first = table[_names(who, shapes)[0]]  # never both at once, so they may be one
        table["merged"] = MergedDrafter(LookupDrafter(LOOKUP, longest=3, shortest=1), first)
    return table


def _names(who: str, shapes: Sequence[TreeShape]) -> list[str]:
    return [who] if len(shapes) == 1 else [f"{who} {shape}" for shape in shapes]


def opened(folder: Path, dtype: str) -> DraftHead:
    """Load a head, unbound; before its target, which takes longer and would be loaded in vain.

    `reference` is the one that comes with the embedded target, where no folder is called so.
    """
    if str(folder) == REFERENCE and not folder.exists():
        folder = reference_head()
    return load_head(folder, getattr(torch, dtype))


def fitted(head: DraftHead, target: Target) -> DraftHead:
    """Bind a head, and let it change the target where it does; one made for another target,
    tokenizer or template is refused.
    """
    contract = head.contract
    contract.check(target.contract(contract.layers, contract.template_kwargs))
    head.bind(target.model)
    head.adapt(target.model)
    return head


def check_rule(name: str, shapes: Sequence[TreeShape], *, lossy: bool) -> None:
    """Refuse a rule that is unknown or lossy unasked, or that cannot verify one of these shapes."""
    if name not in RULES:
        raise ValueError(f"rule {name!r}: choose one of {', '.join(RULES)}")
    rule = RULES[name]
    if lossy == rule.exact:
        raise ValueError(
            f"rule {name!r} is exact: leave --lossy out"
            if lossy
            else f"rule {name!r} changes the text: ask for it with --lossy, or use 'coupled'"
        )
    for shape in shapes:
        check_rule_of(shape, name)


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
    lossy: bool = False,
) -> dict[str, Any]:
    """Records by drafter name, plain first; without `same_draw` no text is held against plain's.

    `lossy` marks all but plain: their texts are not the target's own.
    """
    plain = answers[PLAIN]
    table: dict[str, Any] = {PLAIN: plain_record(plain)}
    for name, given in answers.items():
        if name != PLAIN:
            table[name] = record(name, given, plain, same.get(name))
            table[name]["lossy"] = lossy
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
