"""Messages typed at a terminal: lines that can be edited, called back, and continued.

Where standard output is a terminal too, `readline` edits lines and keeps them for later chats, in a
file that only its owner may read; elsewhere the terminal itself edits, and nothing is kept.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import ModuleType

from drafthead.train import terminal
from drafthead.train.terminal import say

PROMPT, GOES_ON = "> ", ". "
KEPT = 1000
"""Lines of the history file."""


def history_file() -> Path:
    """`$XDG_STATE_HOME/drafthead/history`, or that folder's usual place; not created."""
    named = os.environ.get("XDG_STATE_HOME")
    state = Path(named) if named else Path.home() / ".local" / "state"
    return state / "drafthead" / "history"


class Lines:
    """What the user types, message by message."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a stray byte must not end a chat
        self._readline = _readline() if sys.stdout.isatty() else None
        self._history = None if self._readline is None else _opened(self._readline)

    def message(self) -> str:
        r"""One message: a line, and those after it while they end with `\`.

        A line that is to end with a backslash ends with two. Raises EOFError at Ctrl-D.
        """
        lines: list[str] = []
        while True:
            line = self._line(GOES_ON if lines else PROMPT)
            if line.endswith("\\\\") or not line.endswith("\\"):
                lines.append(line[:-1] if line.endswith("\\\\") else line)
                return "\n".join(lines)
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str:
        if self._readline is not None:
            line = input(prompt)
            self._keep(line)
            return line
        # Not by `input`, which would write its prompt to standard output, among the answers.
        terminal.notes.print(prompt, end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _keep(self, line: str) -> None:
        """Add a line to the file at once: it is there after any end, beside another chat's."""
        if self._history is None or self._readline is None or not line.strip():
            return
        try:
            self._readline.append_history_file(1, str(self._history))
        except OSError as error:
            self._history = None
            say(f"history is no longer kept: {error}", "dim")


def _readline() -> ModuleType | None:
    """The module, None where Python was built without it or with one that cannot append."""
    try:
        import readline
    except ImportError:
        return None
    return readline if hasattr(readline, "append_history_file") else None


def _opened(readline: ModuleType) -> Path | None:
    """Read the history; the file, None where it cannot be kept."""
    path = history_file()
    readline.set_history_length(KEPT)
    readline.set_auto_history(True)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        readline.read_history_file(str(path))
    except OSError as error:
        say(f"history is not kept: {error}", "dim")
        return None
    return path
