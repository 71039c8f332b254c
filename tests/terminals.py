"""A real pseudo-terminal with a process on it: what a user types and sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Terminal:
    """Runs a command with all three streams on a terminal of 100 columns."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, **(environment or {})},
            start_new_session=True,
            preexec_fn=_own_terminal,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def settings(self) -> list[object]:
        """Echo, line mode and all else that a program could leave changed."""
        return termios.tcgetattr(self._theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def press_ctrl_c(self) -> None:
        """As a person does, a moment after what is on the screen.

        Pressed within microseconds of other keys it takes them out of the terminal's queue, and a
        line editor that was just told of them waits for more.
        """
        time.sleep(0.3)
        self.type("\x03")

    def until(self, pattern: str, seconds: float = 240.0) -> str:
        """What is shown from now on, up to the end of the pattern."""
        seen, end = "", time.monotonic() + seconds
        raw = b""
        while not re.search(pattern, seen):
            shown, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert shown, f"{pattern!r} did not come: {seen!r}"
            raw += os.read(self._ours, 4096)
            seen = raw.decode(errors="replace")
        return seen

    def say(self, text: str, pattern: str = r"> $") -> str:
        """Type a line, and give what is shown until the next prompt."""
        self.type(f"{text}\n")
        return self.until(pattern)


def _own_terminal() -> None:
    """Let Ctrl-C reach this process, also where the tests were started with it ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
