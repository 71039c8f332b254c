"""How a card says a head is served elsewhere: an export and a launch for each engine, or why not.

Whether an engine loads a head, and how it is launched, is what `layouts` says.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from drafthead.heads.base import DraftHead
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.layouts.layout import LayoutError, layout_of
from drafthead.heads.layouts.serve import LABELS, uses_of
from drafthead.heads.layouts.whole import whole_vocabulary

FORMATS = ("vllm", "sglang")
"""Values of --format that a card goes through."""


@dataclass(frozen=True)
class Engine:
    """One engine, and either two commands or the reason why there are none."""

    name: str
    """With its version, where it loads the head."""
    export: str = ""
    serve: str = ""
    refused: str = ""


def engines(head: DraftHead, folder: str, target: str, served: str) -> list[Engine]:
    """All engines, for a head in `folder`; `target` as our commands name it, `served` as theirs."""
    return [_engine(format, head, folder, target, served) for format in FORMATS]


def _engine(format: str, head: DraftHead, folder: str, target: str, served: str) -> Engine:
    name, flag = LABELS[format], ""
    try:
        try:
            layout = layout_of(format, head)
        except LayoutError:
            if not (isinstance(head, BorrowingHead) and head.reduced):
                raise
            layout, flag = layout_of(format, whole_vocabulary(head)), " --whole-vocabulary"
    except LayoutError as error:
        return Engine(name, refused=str(error).removeprefix(f"--format {format}: "))
    out = f"exported-{format}"
    asked = f"--head {folder} --target {target} --format {format}{flag} --out {out}"
    use = next(u for u in uses_of(layout, head, out) if u.consumer.startswith(name))
    # The contract may know the target by the name of a folder alone.
    command = use.command.replace(f" {shlex.quote(head.contract.target)} ", f" {served} ", 1)
    return Engine(use.consumer, f"drafthead export {asked}", command)
