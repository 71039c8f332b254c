"""Verbs that draft with a trained head.

Each verb only reads options and shows results: the work lives in the module it calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train import terminal
from drafthead.train.options import (
    CHAIN,
    COUPLED,
    TREES,
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
    make_folder,
    target_folder,
)
from drafthead.train.terminal import bars, counting, say

if TYPE_CHECKING:
    from drafthead.inference.evaluate import Settings
    from drafthead.inference.stream import Stream


def evaluate(
    head: HeadOption = None,
    sibling: SiblingOption = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Prompt files; default: embedded.")
    ] = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: Annotated[list[str] | None, typer.Option(help=f"One or more of {TREES}.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts, over all categories.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    rule: RuleOption = COUPLED,
    lossy: LossyOption = False,
    seed: SeedOption = 0,
    profile: Annotated[bool, typer.Option(help="Also show a round by part.")] = False,
    identity: Annotated[int, typer.Option(min=0, help="Prompts compared in float32.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON result here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Acceptance and speed of plain, lookup, head, sibling and merged drafting, side by side.

    Example: drafthead evaluate --head runs/mine/head --tree chain:3 --tree tree:4x4:12 --limit 30
    """
    from drafthead.data.files import write_atomically
    from drafthead.inference.compare import Comparison, compare
    from drafthead.inference.evaluate import Settings

    dtype = dtype_of(dtype)
    if out is not None:
        make_folder(out)
    asked = Comparison(
        target=target_folder(target),
        dtype=dtype,
        head=head,
        sibling=sibling,
        prompts=tuple(prompts or ["samples/test"]),
        trees=tuple(tree or [CHAIN]),
        limit=limit,
        identity=identity,
        settings=Settings(max_new_tokens, temperature, top_k, top_p, seed, rule, lossy),
    )
    _tell_idle(asked.settings)
    if head is None and sibling is None:
        idle = "; --tree has no effect" if tree else ""
        say(f"no --head and no --sibling: only prompt lookup drafts{idle}")
    with bars() as shown:
        result = compare(asked, progress=counting(shown, "evaluating"), stage=say)
    if result["lossy"]:
        say(f"lossy: rule {rule!r} accepts what the target might not have written")
    terminal.table(result["records"], remark=as_json)
    if profile:
        terminal.profile(result["records"], remark=as_json)
    if as_json:
        print(json.dumps(result, default=str))
    if out is not None:
        write_atomically(out, json.dumps(result, indent=2, default=str))


def generate(
    head: HeadOption = None,
    sibling: SiblingOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="One user message; without it, a chat.")
    ] = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: TreeOption = CHAIN,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    rule: RuleOption = COUPLED,
    lossy: LossyOption = False,
    seed: SeedOption = 0,
    marks: Annotated[bool, typer.Option(help="Mark drafted text by colour.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer, drafted text marked, with the speed at the end.

    Example: drafthead generate --head runs/mine/head --prompt "Why is the sky blue?"
    """
    from drafthead.data.chat import ChatFormat
    from drafthead.data.conversations import Message
    from drafthead.inference.compare import Comparison, check_rule, models, template_of
    from drafthead.inference.evaluate import Settings
    from drafthead.inference.grow import drafting
    from drafthead.inference.stream import Stream
    from drafthead.inference.tree import parse_shape

    dtype, shape = dtype_of(dtype), parse_shape(tree)
    check_rule(rule, [shape], lossy=lossy)
    if head is not None and sibling is not None:
        raise ValueError("--head and --sibling: one of them drafts; give one")
    settings = Settings(max_new_tokens, temperature, top_k, top_p, seed, rule, lossy)
    _tell_idle(settings)
    if head is None and sibling is None:
        if tree != CHAIN or rule != COUPLED:
            say("no --head and no --sibling: --tree, --rule and --lossy have no effect")
        lossy = False
    model, heads = models(Comparison(target_folder(target), dtype, head, sibling), dtype)
    assert model.tokenizer is not None
    chat = ChatFormat(model.tokenizer, template_of(heads))
    drafter = next((drafting(drafts, shape, model) for drafts in heads.values()), None)
    colours = marks and not as_json and sys.stdout.isatty()
    messages: list[Message] = []
    for said in _said() if prompt is None else [prompt]:
        messages.append(Message("user", said))
        stream = Stream(model, drafter, chat.prompt_ids(messages), settings)
        text = "".join(_shown(stream, colours) if not as_json else (p.text for p in stream))
        messages.append(Message("assistant", text))
        _answered(stream, text, lossy, as_json)


def _tell_idle(settings: Settings) -> None:
    """Say which options a temperature of 0 leaves nothing to act on."""
    given = {
        f"--rule {settings.rule}": settings.rule in ("rejection", "block"),
        "--top-k": settings.top_k > 0,
        "--top-p": settings.top_p < 1,
        "--seed": settings.seed != 0,
    }
    idle = ", ".join(name for name, was in given.items() if was)
    if settings.temperature == 0 and idle:
        say(f"{idle}: no effect at temperature 0")


def _said() -> Iterator[str]:
    """User messages: a terminal's lines until an empty one or Ctrl-D, else all of the input."""
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise ValueError("no prompt: give --prompt TEXT, or write one to standard input")
        yield text
        return
    while True:
        # Not by `input`, which may write its prompt to standard output, among the results.
        terminal.notes.print("> ", end="")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _answered(stream: Stream, text: str, lossy: bool, as_json: bool) -> None:
    """The answer and what it took as JSON, or only the latter below the text that was shown."""
    tokens, tau, speed = len(stream.row.new_ids), stream.tau, stream.tokens_per_s
    if as_json:
        figures = {"new_tokens": tokens, "tau": tau, "tokens_per_s": speed}
        print(json.dumps({"text": text, "lossy": lossy, **figures}, ensure_ascii=False))
        return
    print()
    mark = "; lossy: not the target's own text" if lossy else ""
    say(f"{speed:.1f} tokens/s, {tau:.2f} tokens per round{mark}", "dim")


def _shown(stream: Stream, colours: bool) -> Iterator[str]:
    """The text of a stream, each piece when it has been written to standard output."""
    for piece in stream:
        mark = colours and piece.drafted
        sys.stdout.write(f"\x1b[32m{piece.text}\x1b[0m" if mark else piece.text)
        sys.stdout.flush()
        yield piece.text
