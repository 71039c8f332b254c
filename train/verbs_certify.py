"""The verb that certifies a head: reads options, shows and writes the certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.options import (
    DtypeOption,
    JsonOption,
    SeedOption,
    TargetOption,
    dtype_of,
    target_folder,
)
from drafthead.train.terminal import bars, counting, say

Head = Annotated[
    Path, typer.Option(help="Folder of a head; `reference`: that of the embedded target.")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="Prompt files, of which short ones are taken; by default embedded ones."),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(help="Only this one of coupled, rejection, block; by default all three."),
]
Lossy = Annotated[bool, typer.Option("--lossy", help="Refused: a lossy rule cannot be certified.")]
Draws = Annotated[
    int, typer.Option(min=500, help="Texts drawn by each rule; more show smaller faults.")
]
Out = Annotated[Path | None, typer.Option(help="Folder for certificate.json and certificate.html.")]


def certify(
    head: Head,
    target: TargetOption = EMBEDDED,
    prompts: Prompts = None,
    dtype: DtypeOption = "auto",
    rule: Rules = None,
    lossy: Lossy = False,
    draws: Draws = 1000,
    seed: SeedOption = 0,
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Check that decoding with this head changes no text and no law; exit code 1 where it does.

    Minutes for a small target: each check is also run with a fault planted, which it has to find.

    Example: drafthead certify --head runs/mine/head --target HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from drafthead.inference.certify import EXACT_RULES, Asked, Size, certify, check_rules

    if lossy:
        raise ValueError(
            "--lossy: a lossy rule ('typical') changes the text, so there is nothing to certify; "
            "leave it out"
        )
    rules = tuple(dict.fromkeys(rule or EXACT_RULES))
    check_rules(rules)
    dtype = dtype_of(dtype)
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out}: is a file; name a folder for the certificate")
        out.mkdir(parents=True, exist_ok=True)
    asked = Asked(
        target=target_folder(target),
        head=head,
        dtype=dtype,
        prompts=tuple(prompts or ["samples/test"]),
        rules=rules,
        seed=seed,
        size=Size(draws=draws),
    )
    with bars() as shown:
        result = certify(asked, progress=counting(shown, "certifying"), stage=say)
    if out is not None:
        _write(out, result)
    if as_json:
        print(json.dumps(result, default=str))
    else:
        _show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def _write(out: Path, result: dict[str, Any]) -> None:
    from drafthead.data.files import write_atomically
    from drafthead.inference.certificate_page import page_of

    # A file's name may hold what is no text.
    write_atomically(out / "certificate.html", page_of(result).encode("utf-8", "replace"))
    write_atomically(out / "certificate.json", json.dumps(result, indent=2, default=str))


def _show(result: dict[str, Any]) -> None:
    for check in result["checks"]:
        print(f"{'passed' if check['passed'] else 'FAILED'}  {check['name']}: {check['figure']}")
        if not check["passed"]:
            print(f"        {check['detail']}")
    failed = sum(not check["passed"] for check in result["checks"])
    told = f"{failed} of {len(result['checks'])} checks failed" if failed else "nothing is lost"
    print(f"{'passed' if result['passed'] else 'not passed'}: {told} ({result['target']['name']})")
