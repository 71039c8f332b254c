"""What the command shows: remarks, bars and tables, and errors as one line with an exit code.

Standard output holds results only; everything else goes to standard error. It knows no verb, and
imports neither torch nor transformers until a bar is shown.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from drafthead.train.estimate import Estimate
    from drafthead.train.result import Tick

# Remarks quote rows, paths and model output: `[…]` and `:name:` in them are text, not markup.
notes = Console(stderr=True, highlight=False, markup=False, emoji=False)

USAGE_ERROR: type[Any] = typer.BadParameter.mro()[1]
"""Base of all errors about options; newer typer versions bring their own click."""

INTERRUPTED = 130
"""128 + SIGINT, as shells report Ctrl-C."""


class StoppedError(Exception):
    """Ctrl-C where there is more to say than that: the text says how to go on."""


@contextmanager
def advising(how: str, when: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Say after a Ctrl-C inside the block how to go on."""
    try:
        yield
    except when:
        raise StoppedError(how) from None


def say(text: str, style: str | None = None) -> None:
    """One remark, never wrapped."""
    notes.print(text, style=style, soft_wrap=True)


def table(records: Mapping[str, Any], remark: bool) -> None:
    """The comparison of drafters: the result, or a remark beside a JSON result."""
    from drafthead.inference.tables import HEADER, table_rows

    _table(HEADER, table_rows(records), remark)


def evaluation(result: Mapping[str, Any], by: Sequence[str], profile: bool, remark: bool) -> None:
    """The tables of an evaluation: the result, or a remark beside a JSON result.

    by: groups that have a table, too, as `category`; profile: also a mean round by part.
    """
    from drafthead.inference import tables

    cells = [cell for cell in result["cells"] if cell["records"]]
    for cell in cells:
        where = f"temperature {cell['temperature']:g}, batch {cell['batch']}"
        title = where if len(cells) > 1 else None
        records = cell["records"]
        _table(tables.HEADER, tables.table_rows(records), remark, title)
        for group in by:
            found = tables.groups(records, f"by_{group}")
            rows = [[" ".join(filter(None, _cell(c))) for c in row] for row in found.rows]
            _table(found.header, rows, remark, title)
        if profile:
            _table(*tables.profile_rows(records), remark, title)
    reasons = [f"{_turn(failure)}: {failure['reason']}" for failure in result["failed"]]
    for reason in dict.fromkeys(reasons):
        say(f"failed: {reason}", "yellow")
    for name, told in result["simulated"].items():
        if not told["agrees"]:
            say(
                f"{name}: simulated tau {told['tau']:.2f}, decoded {told['decoded_tau']:.2f}: "
                "training and decoding do not agree",
                "yellow",
            )


def _turn(failure: Mapping[str, Any]) -> str:
    whose = f", {failure['drafter']}" if failure["drafter"] else ""
    return f"prompt {failure['prompt']!r}, turn {failure['turn']}{whose}"


def _cell(cell: str | tuple[str, str]) -> tuple[str, str]:
    """A figure and its remark, in brackets."""
    figure, remark = (cell, "") if isinstance(cell, str) else cell
    return figure, f"({remark})" if remark else ""


def forecast(estimate: Estimate, remark: bool) -> None:
    """A run's memory in every way to place it, and what else is forecast."""
    from drafthead.train.estimate_table import HEADER, lines, table_rows

    _table(HEADER, table_rows(estimate), remark)
    for line in lines(estimate):
        Console(stderr=remark, highlight=False, markup=False).print(line, soft_wrap=True)


def run_table(folder: Path) -> None:
    """A run's figures at its end, as a remark."""
    from drafthead.train.runtable import run_table as read

    found = read(folder)
    if found is None:
        return
    _table(found.header, found.rows, remark=True)
    for line in found.lines:
        say(line)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], remark: bool, title: str | None = None
) -> None:
    # A file or a pipe has no width that the table would have to fit.
    width = None if (sys.stderr if remark else sys.stdout).isatty() else 160
    shown = Table(*header, title=title)
    for row in rows:
        shown.add_row(*row)
    Console(stderr=remark, width=width, markup=False).print(shown)


@contextmanager
def bars() -> Iterator[Progress]:
    """Progress bars that appear with their first step; none where nobody can watch them.

    What libraries print inside the block joins the remarks.
    """
    _silence_other_bars()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    shown = Progress(
        *columns,
        TimeElapsedColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    try:
        with redirect_stdout(sys.stderr):
            yield shown
    finally:
        shown.stop()


def counting(shown: Progress, name: str) -> Callable[[int, int], None]:
    """A bar fed with (done, total)."""
    task = shown.add_task(name, total=None, note="", visible=False)

    def step(done: int, total: int) -> None:
        _show_only(shown, task)
        shown.update(task, completed=done, total=total, note=f"{done}/{total}")

    return step


def training(shown: Progress) -> Callable[[Tick], None]:
    """A bar fed with the trainer's ticks."""
    task = shown.add_task("training", total=1.0, note="", visible=False)

    def tick(at: Tick) -> None:
        _show_only(shown, task)
        loss = "" if at.loss is None else f"loss {at.loss:.3f}, "
        note = f"step {at.step}, {loss}{at.positions_per_s:.0f} positions/s"
        shown.update(task, description=at.phase, completed=at.share, note=note)

    return tick


def _show_only(shown: Progress, task: TaskID) -> None:
    shown.start()
    for other in shown.tasks:
        shown.update(other.id, visible=other.id == task)


def _silence_other_bars() -> None:
    """Loading and saving would draw over ours; only downloads, which take minutes, keep theirs."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    wanted = notes.is_terminal and not are_progress_bars_disabled()
    disable_progress_bar()
    if wanted:
        enable_progress_bars()


def is_main() -> bool:
    """Whether this process speaks for all that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


class _Remarks(logging.Handler):
    """Log lines as remarks, so that they come out above a bar and not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def set_up() -> None:
    """Settings of the process that libraries read when they are imported; call it first."""
    # Threads that spin while they wait slow a forward many times on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not notes.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Remarks()])
    logging.getLogger("drafthead").setLevel(logging.INFO if is_main() else logging.WARNING)
    # Where it is installed, `save_pretrained` imports it in any process, and it then warns on
    # standard output, between the results, that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    # The same for torchao, whose kernels for GPUs are not for this torch.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run(app: typer.Typer) -> int:
    """Run the command and give its exit code: 2 a user's error, 130 interrupted."""
    try:
        code = int(app(prog_name="drafthead", standalone_mode=False) or 0)
        if code == INTERRUPTED:  # as newer typer versions return it, older ones raise
            say("interrupted")
        return code
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED
    except StoppedError as stop:
        say(f"interrupted; {stop}")
        return INTERRUPTED
    except (ValueError, OSError, FloatingPointError) as error:
        say(f"error: {_in_one_line(error)}")
        return 2
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "drafthead"
        say(f"error: {error.format_message().rstrip('.')}; see {command} --help")
        return 2


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        if error.filename is None:
            return reason
        return f"{error.filename}: {reason}; check the path, or name another"
    return " ".join(str(error).split())
