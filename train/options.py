"""What the verbs share: their common options, and what is done with them.

torch and transformers are imported when a verb needs them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.terminal import say

if TYPE_CHECKING:
    from drafthead.inference.answering import Settings
    from drafthead.inference.target import Target
    from drafthead.inference.tree import TreeShape

TargetOption = Annotated[str, typer.Option("--target", help="Hub id, folder, or `embedded`.")]
HeadOption = Annotated[
    Path | None,
    typer.Option(
        "--head",
        help="Folder of a trained head that drafts, `hub:ORG/NAME[@REVISION]`, or `reference`: "
        "that of the embedded target.",
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
SiblingOption = Annotated[
    str | None, typer.Option("--sibling", help="Folder or Hub id of a smaller model that drafts.")
]
TREES = (
    "chain:4, stop:7:0.3 (a chain of 7 at most, while its chance is 0.3), static:0,1,0.0 (paths), "
    "tree:4x4:12 (depth x width:nodes), auto:4x4:12 or off"
)
TreeOption = Annotated[
    str | None, typer.Option(help=f"{TREES}. By default as `tune` chose here, else a short chain.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SeedOption = Annotated[int, typer.Option(help="Keys the noise: same seed, same text.")]
RuleOption = Annotated[
    str, typer.Option(help="coupled, rejection, block (chains); typical is lossy.")
]
LossyOption = Annotated[bool, typer.Option("--lossy", help="Allow a rule that changes the text.")]

CHAIN, COUPLED = "chain:3", "coupled"
"""Tree and rule where none is asked for, nor was a tree tuned."""
AGAIN = "the same command continues where it was"


def target_folder(name: str) -> str:
    """The folder or Hub id to load the target from; the embedded one is fetched first."""
    from drafthead.data.embedded import default_target, fetch_target

    if name == EMBEDDED:
        return str(fetch_target(default_target(), progress=say))
    return name


def dtype_of(name: str) -> str:
    """The dtype's name; `auto` is the one that this machine serves in. ValueError for no dtype."""
    from drafthead.inference.target import DTYPES, serving_dtype

    if name == "auto":
        return serving_dtype()
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return name


def shape_of(tree: str | None) -> TreeShape | None:
    """The shape that --tree names; None where it is left to what was tuned (`grow.drafting`)."""
    from drafthead.inference.tree import parse_shape

    return None if tree is None else parse_shape(tree)


def target_of(name: str, dtype: str) -> Target:
    """Load the target that an option names."""
    from drafthead.inference.target import load_target

    return load_target(target_folder(name), dtype)


def make_folder(out: Path) -> None:
    """Make the folder of a result before the work, which a bad path would waste."""
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; name a file")
    out.parent.mkdir(parents=True, exist_ok=True)


def show_result(as_json: bool, values: dict[str, Any], line: str) -> None:
    """Print what a verb came to: the values as JSON, or the line."""
    print(json.dumps(values, default=str) if as_json else line)


def tell_idle(settings: Settings, warmest: float) -> None:
    """Say which options have nothing to act on where no temperature is above 0."""
    given = {
        f"--rule {settings.rule}": settings.rule in ("rejection", "block"),
        "--top-k": settings.top_k > 0,
        "--top-p": settings.top_p < 1,
        "--seed": settings.seed != 0,
    }
    idle = ", ".join(name for name, was in given.items() if was)
    if warmest == 0 and idle:
        say(f"{idle}: no effect at temperature 0")


def template_arguments(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Read template arguments: each text is `name=value`, or a JSON object of several.

    `option` is named in errors. A value is JSON where it can be (`enable_thinking=false`), else the
    text itself.
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            try:
                found |= json.loads(text)
            except ValueError as error:
                raise ValueError(f"{option} {text!r}: no JSON object ({error})") from error
        elif not (equals and name.isidentifier()):
            raise ValueError(f"{option} {text!r}: give name=value, or a JSON object of several")
        else:
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
    return found
