"""The verb that measures in which shape a head pays on this machine.

It only reads options and shows results: the work is `inference.tune`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.options import (
    DtypeOption,
    HeadOption,
    JsonOption,
    SeedOption,
    SiblingOption,
    TargetOption,
    dtype_of,
    make_folder,
    target_folder,
)
from drafthead.train.terminal import bars, counting, say

if TYPE_CHECKING:
    from drafthead.inference.tuning import Tuning

BATCHES = (1, 4)


Prompts = Annotated[
    list[str] | None,
    typer.Option(
        help="Prompt files; by default embedded ones, those that evaluate --limit takes last."
    ),
]
Batches = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Prompts decoded at a time; give it again for several; else 1 and 4."),
]
Repeats = Annotated[
    int,
    typer.Option(min=1, help="How often each decoding is timed; oftener where prompts are few."),
]
Clock = Annotated[
    str, typer.Option(help="wall, or cpu where other programs use the processor, too.")
]
Out = Annotated[
    Path | None, typer.Option(help="File to write, instead of where decoding finds it by itself.")
]


def tune(
    head: HeadOption = None,
    sibling: SiblingOption = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    prompts: Prompts = None,
    batch: Batches = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts, of all categories.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    repeats: Repeats = 1,
    clock: Clock = "wall",
    seed: SeedOption = 0,
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Measure costs and drafts here, and choose the tree for each batch size, or none.

    The choice lies beside the head as tuning.json (of a head that came with the package or from the
    Hub, in the user's cache), and is what generate, evaluate and speculate draft with where no tree
    is given.

    Example: drafthead tune --head runs/mine/head --batch 1 --batch 4
    """
    from drafthead.inference.comparison import Comparison, models
    from drafthead.inference.lineup import template_of
    from drafthead.inference.openings import first_turns
    from drafthead.inference.tune import Trial
    from drafthead.inference.tune import tune as tuning_of
    from drafthead.inference.tuning import check_place, folder_of, place_for, write

    if (head is None) == (sibling is None):
        raise ValueError("give --head or --sibling, the one that is to be tuned")
    dtype = dtype_of(dtype)
    if out is not None:
        make_folder(out)
        check_place(out)
    if seed and not temperature:
        say("--seed: no effect at temperature 0")
    model, heads = models(Comparison(target_folder(target), dtype, head, sibling), dtype)
    (drafts,) = heads.values()
    folder = folder_of(drafts)
    place = out if out is not None or folder is None else place_for(folder)
    if place is None:
        raise ValueError("this head was loaded from no folder: name a file with --out")
    names, template = prompts or ["samples/test"], template_of(heads)
    ids = first_turns(model, names, limit, max_new_tokens, template, say, last=True)
    trial = Trial(max_new_tokens, temperature, seed, repeats, clock=clock)
    batches = batch or BATCHES
    with bars() as shown:
        told = counting(shown, "decoding")
        found = tuning_of(model, drafts, ids, batches, trial, progress=told, stage=say)
    write(found, place)
    _show(found, place, as_json)
    if out is not None:
        say("decoding does not look there: without --out it is found by itself")


def _show(found: Tuning, place: Path, as_json: bool) -> None:
    from drafthead.inference.tuning import as_dict

    if as_json:
        print(json.dumps(as_dict(found) | {"file": str(place)}))
    else:
        for line in _lines(found):
            print(line)
    say(f"written to {place}")


def _lines(found: Tuning) -> list[str]:
    """A line for each batch size: what was chosen, and what else was measured."""
    lines = []
    for size, shape in found.shapes.items():
        told = {name: f"{name} {_gain(gain)}" for name, gain in found.gains[size].items()}
        others = ", ".join(text for name, text in told.items() if name != str(shape))
        best = f"{told[str(shape)]} times plain" if str(shape) in told else "off: nothing pays"
        also = f"; also {others}" if others else ""
        lines.append(f"batch {size}: {best}{also}")
    return lines


def _gain(gain: Sequence[float | None]) -> str:
    """A gain, with its interval where it has one."""
    times, low, high = gain
    interval = "" if low is None or high is None else f" ({low:.2f}–{high:.2f})"
    return f"{times:.2f}{interval}"
