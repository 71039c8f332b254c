"""The verb that measures: what heads gain on prompts, beside plain decoding and untrained drafters.

It only reads options and shows results: the work is `inference.compare`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train import terminal
from drafthead.train.options import (
    AGAIN,
    COUPLED,
    TREES,
    DtypeOption,
    JsonOption,
    LossyOption,
    RuleOption,
    SeedOption,
    TargetOption,
    dtype_of,
    target_folder,
    tell_idle,
)
from drafthead.train.terminal import advising, bars, counting, say

if TYPE_CHECKING:
    from drafthead.inference.compare import Comparison

GROUPS = ("category", "language", "context")
"""By which figures are told apart."""

Heads = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder of a trained head, or NAME=FOLDER; `reference`: that of the embedded target. "
        "Give it again for several, side by side."
    ),
]
Siblings = Annotated[
    list[str] | None,
    typer.Option(help="Folder or Hub id of a smaller model that drafts, or NAME=FOLDER."),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="File of prompts, or hub:ORG/NAME; by default embedded ones."),
]
Trees = Annotated[
    list[str] | None, typer.Option(help=f"One or more of {TREES}. By default as `tune` chose here.")
]
Lookup = Annotated[bool, typer.Option(help="Also prompt lookup, alone and merged with each head.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most prompts, of all categories.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(min=0, help="0, the default, is greedy; give it again for several."),
]
Batches = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="Prompts answered at a time, by default 1; give it again for several."
    ),
]
Groups = Annotated[
    list[str] | None, typer.Option(help=f"Also a table by one of {', '.join(GROUPS)}.")
]
Identity = Annotated[
    int,
    typer.Option(min=0, help="Prompts whose texts are held against plain decoding's in float32."),
]
Against = Annotated[
    str | None,
    typer.Option(help="Another target to try the heads on: a model, an adapter's folder, or int8."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for report.html, evaluation.json and tables; a stopped run goes on there."
    ),
]


def evaluate(
    head: Heads = None,
    sibling: Siblings = None,
    prompts: Prompts = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: Trees = None,
    lookup: Lookup = True,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 64,
    temperature: Temperatures = None,
    batch: Batches = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often all is measured.")] = 1,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 = off.")] = 1.0,
    rule: RuleOption = COUPLED,
    lossy: LossyOption = False,
    seed: SeedOption = 0,
    by: Groups = None,
    profile: Annotated[bool, typer.Option(help="Also what a round's time goes into.")] = False,
    identity: Identity = 4,
    against: Against = None,
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what drafting gains: tau, tokens a round of the target, and speed against plain.

    Rows: lookup, each head and sibling, and lookup merged with each. --out keeps all, with a page.

    Example: drafthead evaluate --head runs/mine/head --batch 1 --batch 4 --limit 30 --out runs/eval
    """
    from drafthead.inference.compare import Comparison
    from drafthead.inference.evaluate import Settings
    from drafthead.inference.lineup import named

    _check(by or [], against, head or [])
    temperatures = tuple(temperature or [0.0])
    asked = Comparison(
        dtype=dtype_of(dtype),
        target=target_folder(target),
        head={name: Path(folder) for name, folder in named(head or [], "head").items()},
        sibling=named(sibling or [], "sibling"),
        prompts=tuple(prompts or ["samples/test"]),
        trees=tuple(tree or []),
        lookup=lookup,
        limit=limit,
        identity=identity,
        settings=Settings(max_new_tokens, temperatures[0], top_k, top_p, seed, rule, lossy),
        temperatures=temperatures,
        batches=tuple(batch or [1]),
        repeats=repeats,
        against=against,
    )
    _tell_without_effect(asked)
    result = _compared(asked, out)
    terminal.evaluation(result, by or [], profile, remark=as_json)
    if as_json:
        print(json.dumps(result))
    if out is not None:
        say(f"{out / 'report.html'}: the report; evaluation.json and the tables are beside it")


def _check(by: list[str], against: str | None, heads: list[str]) -> None:
    """Refuse what cannot be asked for together; ValueError."""
    if unknown := sorted({*by} - {*GROUPS}):
        raise ValueError(f"--by {unknown[0]!r}: choose from {', '.join(GROUPS)}")
    if against is not None and not heads:
        raise ValueError("--against tries a head on another target: give one with --head")


def _tell_without_effect(asked: Comparison) -> None:
    """Say which options have nothing to act on."""
    tell_idle(asked.settings, max(asked.temperatures))
    if not asked.heads and not asked.siblings:
        if not asked.lookup:
            raise ValueError("nothing drafts: give --head or --sibling, or leave --no-lookup out")
        idle = "; --tree has no effect" if asked.trees else ""
        say(f"no --head and no --sibling: only prompt lookup drafts{idle}")


def _compared(asked: Comparison, out: Path | None) -> dict[str, Any]:
    """The evaluation, with a bar, and what to do after a Ctrl-C."""
    from drafthead.inference.compare import compare

    again = f"{out}: {AGAIN}" if out else "nothing is kept without --out"
    with advising(again), bars() as shown:
        result = compare(asked, out=out, progress=counting(shown, "evaluating"), stage=say)
    if result["lossy"]:
        say(f"lossy: rule {asked.settings.rule!r} accepts what the target might not have written")
    for name, found in _drifts(result["drift"], asked.against):
        say(f"{name}: {found['advice']}")
    return result


def _drifts(found: dict[str, Any] | None, against: str | None) -> list[tuple[str, Any]]:
    """What is said of the other target, by head where there are several."""
    if found is None:
        return []
    if "advice" in found:
        return [(str(against), found)]
    return [(f"{name} on {against}", one) for name, one in found.items()]
