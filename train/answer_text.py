"""Answers on standard output: drafted text marked, and nothing in them that acts on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from drafthead.inference.stream import Piece

GREEN, RESET = "\x1b[32m", "\x1b[0m"
READER_LEFT = 141
"""128 + SIGPIPE, as shells report a closed pipe."""

# C0 but for tab and newline, DEL, and C1: a target may have learnt any escape sequence, and one
# could hide text, rename the window or answer in the user's place.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    r"""Text with its control characters spelled out, as `\x1b`."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def colours(wanted: bool | None) -> bool:
    """Whether to mark by colour: never but on a terminal; there as wanted, or by its settings."""
    if not sys.stdout.isatty() or wanted is False:
        return False
    return bool(wanted) or not (os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb")


@dataclass(frozen=True)
class AnswerText:
    """Writes answers as they come."""

    marks: bool
    """Mark drafted text by colour."""
    guarded: bool
    """Spell control characters out: for terminals, as files and pipes get the text as it is."""

    def show(self, piece: Piece) -> None:
        text = harmless(piece.text) if self.guarded else piece.text
        _write(f"{GREEN}{text}{RESET}" if self.marks and piece.drafted else text)

    def end(self) -> None:
        """End the answer's last line."""
        _write(f"{RESET}\n" if self.marks else "\n")


def show_json(values: dict[str, Any]) -> None:
    """One object on one line; control characters are escaped as JSON does."""
    line = json.dumps(values, ensure_ascii=False)
    _write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()


def _leave_quietly() -> NoReturn:
    """End the command as a reader that has enough, such as `head`, ends others."""
    # Else the interpreter would flush once more at its end, fail, and tell of it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    raise typer.Exit(READER_LEFT)
