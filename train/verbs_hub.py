"""The verbs that share a head: read options and show results; the work is `heads.hub`'s."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from drafthead.train.options import AGAIN, JsonOption
from drafthead.train.terminal import advising, bars, say

Evaluation = Annotated[
    Path | None,
    typer.Option(help="What `evaluate` wrote: folder or evaluation.json. Default: the head's."),
]
Certificate = Annotated[
    Path | None,
    typer.Option(help="What `certify` wrote: folder or certificate.json. Default: the head's."),
]
Run = Annotated[
    Path | None, typer.Option(help="Folder of the training run, for the card. Default: the head's.")
]
Licence = Annotated[
    str | None, typer.Option(help="Its id on the Hub, as apache-2.0. Default: the target's.")
]


def push(
    head: Annotated[Path, typer.Option(help="Folder of a trained head.")],
    repo: Annotated[str, typer.Option(help="ORG/NAME, made where there is none.")],
    public: Annotated[bool, typer.Option("--public", help="For all to see; else private.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Replace what the repository holds.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(help="The target as the Hub calls it, or its folder, for the model card."),
    ] = None,
    evaluation: Evaluation = None,
    name: Annotated[
        str | None, typer.Option(help="What the evaluation calls the head, if it has several.")
    ] = None,
    certificate: Certificate = None,
    run: Run = None,
    licence: Licence = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to, made where there is none.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put a head on the Hub in one commit, private unless told otherwise, with a model card.

    Config, safetensors, card and records go there. The same again changes nothing; a push that
    broke goes on. The token is that of `hf auth login`, or HF_TOKEN.

    Example: drafthead push --head runs/mine/head --repo me/my-head --evaluation runs/eval
    """
    from drafthead.heads import hub
    from drafthead.heads.publication import publication
    from drafthead.inference.lineup import head_folder

    hub.check_name(repo)
    files = publication(
        head_folder(head),
        evaluation=evaluation,
        certificate=certificate,
        run=run,
        target=target,
        licence=licence,
        repo=repo,
        name=name,
    )
    with advising(f"{repo} is as it was; {AGAIN}"), bars():
        done = hub.push(files, repo, public=public, update=update, revision=revision)
    seen = "private" if done.private else "public"
    if done.changed:
        say(f"one commit, {done.commit[:12]}: {', '.join(done.changed)}")
    else:
        say("the repository holds exactly this already: nothing was changed")
    print(json.dumps(asdict(done)) if as_json else f"{done.url} ({seen})")


def pull(
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository of a head.")],
    out: Annotated[Path, typer.Option(help="New folder for the head.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a head from the Hub, each file checked, into a folder that any verb takes as --head.

    Example: drafthead pull me/my-head --out heads/my-head
    """
    from drafthead.heads import hub

    with advising(f"{out} was not made; {AGAIN}"), bars():
        done = hub.pull(repo, out, revision)
    if done.left:
        say(f"not fetched, being no part of a head: {', '.join(done.left)}")
    say(f"commit {done.commit}")
    print(json.dumps(asdict(done) | {"folder": str(out)}) if as_json else out)
