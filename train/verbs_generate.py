"""The verb that answers: one message, or a chat.

It only reads options: the conversation is `inference.chat`, the loop at a terminal `terminal_chat`.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.options import (
    COUPLED,
    DtypeOption,
    HeadOption,
    JsonOption,
    LossyOption,
    RuleOption,
    SeedOption,
    SiblingOption,
    TargetOption,
    TreeOption,
    dtype_of,
    shape_of,
    target_folder,
    tell_idle,
)
from drafthead.train.terminal import say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from drafthead.heads.base import DraftHead
    from drafthead.inference.answering import Settings
    from drafthead.inference.grow import HeadDrafter
    from drafthead.inference.target import Target
    from drafthead.inference.tree import TreeShape
    from drafthead.train.terminal_chat import Told


Message = Annotated[
    str | None,
    typer.Option(help="One user message; without it all of standard input, or a chat."),
]
System = Annotated[str | None, typer.Option(help="What the target is told first.")]
Marks = Annotated[
    bool | None,
    typer.Option(
        "--marks/--no-marks",
        help="Mark drafted text by colour; default: on a terminal, unless NO_COLOR is set.",
        show_default=False,
    ),
]


def generate(
    head: HeadOption = None,
    sibling: SiblingOption = None,
    prompt: Message = None,
    system: System = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: TreeOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 = off.")] = 1.0,
    rule: RuleOption = COUPLED,
    lossy: LossyOption = False,
    seed: SeedOption = 0,
    marks: Marks = None,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer, drafted text marked, with the speed at the end; at a terminal, a chat.

    In a chat, /help lists the commands, a line that ends with a backslash goes on in the next one,
    Ctrl-C stops an answer and Ctrl-D leaves.

    Example: drafthead generate --head runs/mine/head --prompt "Why is the sky blue?"
    """
    from drafthead.data.chat import ChatFormat
    from drafthead.inference.answering import Settings
    from drafthead.inference.chat import Chat
    from drafthead.inference.comparison import Comparison, models
    from drafthead.inference.lineup import check_rule, template_of
    from drafthead.inference.recall import RecallingTarget
    from drafthead.inference.stream import Stream
    from drafthead.train.lines import Lines
    from drafthead.train.terminal_chat import TerminalChat

    dtype, shape = dtype_of(dtype), shape_of(tree)
    check_rule(rule, [] if shape is None else [shape], lossy=lossy)
    if head is not None and sibling is not None:
        raise ValueError("--head and --sibling: one of them drafts; give one")
    settings = Settings(max_new_tokens, temperature, top_k, top_p, seed, rule, lossy)
    tell_idle(settings, temperature)
    if head is None and sibling is None and (tree is not None or rule != COUPLED):
        say("no --head and no --sibling: --tree, --rule and --lossy have no effect")
    talks = prompt is None and sys.stdin.isatty()
    said = _all_of_input() if prompt is None and not talks else prompt
    model, heads = models(Comparison(target_folder(target), dtype, head, sibling), dtype)
    assert model.tokenizer is not None
    form = ChatFormat(model.tokenizer, template_of(heads))
    chat = Chat(form, context=model.context, new_tokens=max_new_tokens, system=system)
    drafter = _drafter(heads, shape, model, rule)
    answering = RecallingTarget(model) if talks else model
    talk = TerminalChat(
        chat,
        lambda ids, noise: Stream(answering, drafter, ids, settings, noise),
        _told(settings, drafter, marks, as_json),
    )
    if said is None:
        talk.run(Lines())
    else:
        talk.once(said)


def _drafter(
    heads: Mapping[str, DraftHead], shape: TreeShape | None, target: Target, rule: str
) -> HeadDrafter | None:
    """What drafts: the one head or sibling, or nothing."""
    from drafthead.inference.grow import drafting

    return next((drafting(head, shape, target, rule=rule) for head in heads.values()), None)


def _told(
    settings: Settings, drafter: HeadDrafter | None, marks: bool | None, as_json: bool
) -> Told:
    """How answers are shown on this standard output."""
    from drafthead.train.answer_text import AnswerText, colours
    from drafthead.train.terminal_chat import Told

    shown = sys.stdout.isatty()
    if marks and (as_json or not shown):
        say("--marks: no effect but on text at a terminal")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack some characters
    costs = None if drafter is None else drafter.costs
    return Told(
        AnswerText(marks=colours(marks) and not as_json, guarded=shown),
        as_json,
        lossy=settings.lossy and drafter is not None,
        greedy=settings.temperature == 0,
        plain_per_s=None if costs is None else 1 / costs.verify(1),
    )


def _all_of_input() -> str:
    text = sys.stdin.read().strip()
    if not text:
        raise ValueError("no prompt: give --prompt TEXT, or write one to standard input")
    return text
