"""Who takes part in an evaluation: heads and siblings by name, loaded, and the drafters they make.

It measures nothing. Names are the rows of every report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drafthead.data.embedded import REFERENCE, reference_head
from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.heads.hub import HUB, fetched
from drafthead.inference.drafters import Drafter, LookupDrafter, MergedDrafter
from drafthead.inference.grow import check_rule_of, drafting
from drafthead.inference.sibling import load_sibling
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import TreeShape
from drafthead.inference.verify import RULES

LOOKUP = 8
"""Tokens that prompt lookup proposes."""

MERGED = "merged"
TAKEN = ("plain", "lookup", MERGED)


def named(given: Sequence[str], alone: str) -> dict[str, str]:
    """Folders by name: each is `NAME=FOLDER`, or a folder; a single one without a name is `alone`.

    Several are called as their folders are, `runs/mine/head` as `mine`, `hub:ORG/NAME` as `NAME`.
    ValueError for a name that is there twice.
    """
    pairs = [_name_of(text) for text in given]
    if len(pairs) == 1 and not pairs[0][0]:
        return {alone: pairs[0][1]}
    names = [name or _own_name(folder) for name, folder in pairs]
    for name, count in Counter(names).items():
        if count > 1 or name in TAKEN or name.startswith(f"{MERGED} "):
            raise ValueError(f"--{alone} {name!r}: the name is taken; give each as NAME=FOLDER")
    return {name: folder for name, (_, folder) in zip(names, pairs, strict=True)}


def _name_of(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"([\w .:+-]+)=(.+)", text)
    return (found[1], found[2]) if found and not Path(text).exists() else ("", text)


def _own_name(folder: str) -> str:
    if folder.startswith(HUB):
        return folder.partition("/")[2]
    path = Path(folder)
    resolved = path.resolve() if path.is_dir() else path
    return resolved.parent.name if resolved.name == "head" else resolved.name


def loaded(
    target: str, dtype: str, heads: Mapping[str, Path], siblings: Mapping[str, str]
) -> tuple[Target, dict[str, DraftHead]]:
    """Target, and what drafts for it by name, heads first."""
    # Heads first: they are read in no time, and a target would be loaded in vain for a bad one.
    found = {name: opened(folder, dtype) for name, folder in heads.items()}
    changing = [name for name, head in found.items() if type(head).adapt is not DraftHead.adapt]
    if changing and len(found) > 1:
        raise ValueError(
            f"head {changing[0]!r} changes the target, for the other drafters too: "
            "evaluate it by itself"
        )
    model = load_target(target, dtype)
    drafts = {name: fitted(head, model) for name, head in found.items()}
    for name, sibling in siblings.items():
        if name in drafts:
            raise ValueError(f"--sibling {name!r}: a head has that name; give NAME=FOLDER")
        drafts[name] = load_sibling(sibling, model, dtype)
    return model, drafts


def opened(folder: Path, dtype: str) -> DraftHead:
    """Load a head, unbound; before its target, which takes longer and would be loaded in vain.

    `reference` is the one that comes with the embedded target, where no folder is called so.
    """
    return load_head(head_folder(folder), getattr(torch, dtype))


def head_folder(folder: Path) -> Path:
    """The folder that a head's name stands for."""
    if str(folder).startswith(HUB):
        return fetched(str(folder))
    if str(folder) == REFERENCE and not folder.exists():
        return reference_head()
    return folder


def fitted(head: DraftHead, target: Target) -> DraftHead:
    """Bind a head, and let it change the target where it does; one made for another target,
    tokenizer or template is refused.
    """
    contract = head.contract
    contract.check(target.contract(contract.layers, contract.template_kwargs))
    head.bind(target.model)
    head.adapt(target.model)
    return head


def template_of(heads: Mapping[str, DraftHead]) -> dict[str, Any]:
    """The template arguments that the heads were trained with; none without a head.

    ValueError where heads were trained with others than each other: prompts are the same for all.
    """
    trained = {name: h.contract.template_kwargs for name, h in heads.items() if h.contract.template}
    first = next(iter(trained), "")
    for name, arguments in trained.items():
        if arguments != trained[first]:
            raise ValueError(
                f"heads {first!r} and {name!r} were trained with other template arguments "
                f"({trained[first]} and {arguments}): evaluate them one by one"
            )
    return dict(trained[first]) if trained else {}


def line_up(
    target: Target,
    heads: Mapping[str, DraftHead],
    shapes: Sequence[TreeShape] = (),
    *,
    batch: int = 1,
    rule: str = "coupled",
    own: Mapping[str, TreeShape] | None = None,
    lookup: bool = True,
) -> dict[str, Drafter]:
    """A report's drafters, apart, so that none is credited with another's gain.

    Prompt lookup, every head with every shape, and for each head the lookup merged with it: with
    its first shape, as `merged` where it is the only head, else as `merged NAME`. Without shapes
    each head has its `own`, else what was tuned for it (`grow.drafting`). Without `lookup` there
    are only the heads.
    """
    table: dict[str, Drafter] = {}
    if lookup:
        table["lookup"] = LookupDrafter(LOOKUP, longest=3, shortest=2)
    for who, head in heads.items():
        drafted: Sequence[TreeShape | None] = shapes or [(own or {}).get(who)]
        for name, shape in zip(names_of(who, shapes), drafted, strict=True):
            table[name] = drafting(head, shape, target, batch, rule)
    for who in heads if lookup else ():
        first = table[names_of(who, shapes)[0]]  # never both at once, so they may be one
        merged = MergedDrafter(LookupDrafter(LOOKUP, longest=3, shortest=1), first)
        table[MERGED if len(heads) == 1 else f"{MERGED} {who}"] = merged
    return table


def names_of(who: str, shapes: Sequence[TreeShape]) -> list[str]:
    """What a head is called with each of these shapes."""
    return [who] if len(shapes) < 2 else [f"{who} {shape}" for shape in shapes]


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
