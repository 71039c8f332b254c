"""The verbs that take a head elsewhere and back: `export` and `import`.

They read options and show results; layouts are `heads.layouts`', the self-test `inference.shipped`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train.options import (
    JsonOption,
    TargetOption,
    show_result,
    target_folder,
    template_arguments,
)
from drafthead.train.terminal import advising, bars, say

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from drafthead.heads.base import DraftHead
    from drafthead.heads.borrowing import BorrowingHead
    from drafthead.heads.layouts.layout import Layout
    from drafthead.inference.shipped import Decoding, Shipped
    from drafthead.inference.target import Target

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ENGINES = ("vllm",)
SERVED = ("vllm", "speculators")
"""Formats that the engine reads."""

Head = Annotated[
    Path, typer.Option("--head", help="Folder of a head; `reference`: the embedded target's.")
]
Format = Annotated[
    str,
    typer.Option(
        "--format", help="vllm, sglang, eagle (SafeAILab), speculators, medusa, hydra or dflash."
    ),
]
ExportDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="bf16, fp16 or fp32; by default that of the head's file."),
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole-vocabulary", help="Write a head of a reduced vocabulary over all tokens."
    ),
]
Prompts = Annotated[
    list[str] | None, typer.Option(help="Prompt files of the self-test; default: embedded.")
]
Limit = Annotated[
    int, typer.Option(min=0, help="Prompts that are decoded before and after; 0: none.")
]
Engine = Annotated[str | None, typer.Option(help="Also decode with this engine and compare: vllm.")]
EnginePython = Annotated[
    Path | None, typer.Option(help="Python of the environment that the engine is installed in.")
]


def export(
    head: Head,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    format: Format,
    target: TargetOption = EMBEDDED,
    dtype: ExportDtype = None,
    whole_vocabulary: Whole = False,
    prompts: Prompts = None,
    limit: Limit = 4,
    engine: Engine = None,
    engine_python: EnginePython = None,
    as_json: JsonOption = False,
) -> None:
    """Write a head as serving engines load it, read it back and test it before it has its name.

    Example: drafthead export --head runs/mine/head --format vllm --out exported --dtype bf16
    """
    from drafthead.heads.layouts.serve import uses_of
    from drafthead.inference.shipped import ship

    out = out.expanduser()
    _check(engine, engine_python, format, limit)
    if prompts and not limit:
        say("--prompts: no effect with --limit 0")
    asked = None if dtype is None else _dtype_of(dtype)
    with bars():
        made, layout = _to_export(head, format, out, whole_vocabulary)
        written: torch.dtype = asked or made.dtype
        place = target_folder(target)
        model, source = _loaded(place)
        _check_target(made, model)
        made.bind(source)
        decoding = _decoding(model, made, prompts or ["samples/test"], limit)
        shipped = ship(made, layout, out, written, source, decoding)
    place = str(Path(place).absolute()) if Path(place).is_dir() else ""
    uses = [(use.consumer, use.command) for use in uses_of(layout, made, str(out), place)]
    result = _told(shipped) | {"serve": dict(uses)}
    if engine is not None:
        assert engine_python is not None
        assert decoding is not None
        found = _in_engine(target, made, written, out, engine_python, decoding, layout)
        result["engine"] = found
    _show(shipped, made.dtype, result, as_json)
    if result.get("engine") and not result["engine"]["passed"]:
        raise typer.Exit(1)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that others made.")],
    out: Annotated[Path, typer.Option(help="A new folder for the head.")],
    target: TargetOption = EMBEDDED,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Captured states, as 2,15,27; state L enters layer L, counted from 0. Where the "
            "folder does not say them, or says them wrongly."
        ),
    ] = None,
    producer: Annotated[
        str | None, typer.Option(help="Who made it, where layouts differ in what they mean.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for the chat template that it was trained with."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a head of ours from a draft checkpoint of vLLM, SGLang, EAGLE, speculators and others.

    Example: drafthead import downloads/eagle3-draft --target ORG/MODEL --out heads/theirs
    """
    from functools import partial

    import drafthead.heads.layouts  # noqa: F401  (layouts register themselves)
    from drafthead.heads.layouts.files import open_foreign
    from drafthead.inference.shipped import asked_of, check_free, unnamed
    from drafthead.train.checkpoint import save_head

    out, folder = out.expanduser(), folder.expanduser()
    check_free(out)
    _check_foreign(folder, target)
    _check_producer(producer)
    named = None if layers is None else _layers_of(layers)
    arguments = template_arguments("--template", template)
    with bars():
        stored, layout = open_foreign(folder)  # before the target is loaded, perhaps in vain
        model, source = _loaded(target_folder(target))
        contract_of = partial(model.contract, template_kwargs=arguments)
        made = layout.read(stored, asked_of(source, contract_of, named, producer))
        made.bind(source)  # refuses maps that are none
        with unnamed(out) as fresh:
            save_head(made, fresh)
    _show_imported(made, folder, out, as_json)


# Import


def _check_foreign(folder: Path, target: str) -> None:
    """Refuse what is no folder of others; ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; fetch it first, and name where it is")
    if Path(target).is_dir() and folder.samefile(target):
        raise ValueError(f"--target {target}: it is the draft itself; name the model it drafts for")
    config = folder / "config.json"
    if config.is_file() and re.search(rb'"model_type": "drafthead_', config.read_bytes()):
        raise ValueError(f"{folder}: it is a head of drafthead already; use it as it is")


def _check_producer(producer: str | None) -> None:
    from drafthead.heads.layouts.captured import PRODUCERS
    from drafthead.heads.layouts.eagle3 import UPPER_NORM
    from drafthead.heads.layouts.speculators import ASSUMED

    known = sorted({*PRODUCERS, *UPPER_NORM, *ASSUMED})
    if producer is not None and producer not in known:
        raise ValueError(f"--producer {producer!r}: choose from {', '.join(known)}")


def _layers_of(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--layers {text!r}: give ids with commas, as 2,15,27") from error
    if len({*found}) < len(found):
        raise ValueError(f"--layers {text!r}: a state is named twice; give each once")
    return found


def _show_imported(made: DraftHead, folder: Path, out: Path, as_json: bool) -> None:
    config, contract = made.config, made.contract
    if made.settings.model_dump().get("own_rows"):
        say(
            f"{folder}: its output rows are not those of {contract.target!r} and are taken for "
            "trained ones; where they are not, --target is another model than it was made for"
        )
    values = {
        "out": str(out),
        "type": made.settings.type,
        "target": contract.target,
        "layers": list(contract.layers),
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
        "dtype": str(made.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in made.parameters()),
    }
    part = "all" if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size
    line = (
        f"{out}: {values['type']} head of {contract.target}, states {values['layers']}, {part} of "
        f"{config.vocab_size} tokens, {values['parameters']:,} weights in {values['dtype']}"
    )
    show_result(as_json, values, line)


# Export


def _check(engine: str | None, python: Path | None, format: str, limit: int) -> None:
    if (engine is None) != (python is None):
        raise ValueError("--engine and --engine-python belong together: give both or none")
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"--engine {engine!r}: choose from {', '.join(ENGINES)}")
    if engine is not None and format not in SERVED:
        raise ValueError(f"--engine vllm serves --format {' or '.join(SERVED)}, not {format}")
    if engine is not None and not limit:
        raise ValueError("--engine decodes the prompts: --limit has to be at least 1")
    if python is not None:
        from drafthead.inference.engine_check import check_engine

        check_engine(python)


def _dtype_of(name: str) -> torch.dtype:
    import torch

    name = SHORT.get(name, name)
    if name not in SHORT.values():
        raise ValueError(f"--dtype {name!r}: choose from {', '.join(SHORT)}")
    found: torch.dtype = getattr(torch, name)
    return found


def _to_export(folder: Path, format: str, out: Path, whole: bool) -> tuple[BorrowingHead, Layout]:
    """The unbound head and its layout: what cannot be done is refused before the target is read."""
    import drafthead.heads.layouts  # noqa: F401  (layouts register themselves)
    from drafthead.heads import load_head
    from drafthead.heads.borrowing import BorrowingHead
    from drafthead.heads.layouts.layout import layout_of, layouts_for
    from drafthead.heads.layouts.whole import whole_vocabulary
    from drafthead.inference.lineup import head_folder
    from drafthead.inference.shipped import check_free

    check_free(out)
    made = load_head(head_folder(folder))
    layouts_for(format, made.settings.type)
    assert isinstance(made, BorrowingHead)
    if whole and not made.reduced:
        say("--whole-vocabulary: no effect on a head that has it")
    if whole:
        made = whole_vocabulary(made)
    return made, layout_of(format, made)


def _check_target(head: BorrowingHead, target: Target) -> None:
    """ContractError for a head that was made for another target."""
    from drafthead.heads.contract import LAST

    # Which states are read the head alone says: another target may not even have them.
    contract = head.contract
    given = target.contract((LAST,), contract.template_kwargs)
    contract.check(given.model_copy(update={"layers": contract.layers}))


def _loaded(name: str) -> tuple[Target, PreTrainedModel | Path]:
    """The target, and what a head borrows from: its files where they are at hand.

    They hold each value as it is, whatever this machine computes in.
    """
    from huggingface_hub import try_to_load_from_cache

    from drafthead.inference.target import load_target, serving_dtype

    model = load_target(name, serving_dtype())
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return model, folder if any(folder.glob("*.safetensors")) else model.model


def _decoding(
    target: Target, head: BorrowingHead, names: Sequence[str], limit: int
) -> Decoding | None:
    from drafthead.inference.openings import first_turns
    from drafthead.inference.shipped import TOKENS, Decoding

    if not limit:
        return None
    template = head.contract.template_kwargs
    return Decoding(target, first_turns(target, names, limit, TOKENS, template, say))


def _told(shipped: Shipped) -> dict[str, Any]:
    tau = shipped.tau
    return {
        "out": str(shipped.out),
        "layout": shipped.layout,
        "dtype": shipped.dtype,
        "bytes": shipped.size,
        "tensors_equal": shipped.tensors,
        "prompts": shipped.prompts,
        "tau_before": tau and tau[0],
        "tau_after": tau and tau[1],
    }


def _in_engine(
    target: str,
    head: BorrowingHead,
    dtype: torch.dtype,
    out: Path,
    python: Path,
    decoding: Decoding,
    layout: Layout,
) -> dict[str, Any]:
    """Decode the prompts in an engine as well."""
    import copy
    from dataclasses import asdict

    from drafthead.inference.engine_check import EngineError, check
    from drafthead.inference.shipped import TOKENS

    method = layout.consumers[0].rsplit("-", 1)[1]
    meant = copy.deepcopy(head).to(dtype)  # type: ignore[arg-type]
    ids = [list(prompt) for prompt in decoding.prompts]
    say(f"{out}: written and read back; decoding {len(ids)} prompts in vLLM")
    left = f"{out} is written and read back all the same; to run this again, remove it first"
    with advising(left):
        try:
            found = check(target_folder(target), meant, out, python, ids, TOKENS, method)
        except EngineError as error:
            raise EngineError(f"{error}; {left}") from error
    say(found.line())
    return asdict(found) | {"passed": found.passed}


def _show(shipped: Shipped, own: torch.dtype, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    size = shipped.size / 2**20
    print(f"{shipped.out}: {shipped.layout}, {shipped.dtype}, {size:.1f} MiB")
    told = f"read back: {shipped.tensors} tensors and draft logits are equal"
    if shipped.tau is not None:
        before, after = shipped.tau
        other = "" if shipped.dtype == str(own).removeprefix("torch.") else f" (head in {own})"
        told += f"; tau {before:.3f} before{other}, {after:.3f} after, {shipped.prompts} prompts"
    print(told)
    for consumer, command in result["serve"].items():
        print(f"{consumer}: {command}")
