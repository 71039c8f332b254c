"""Signals as requests: the loop stops at its next safe place and saves.

Ctrl-C (SIGINT) ends the command as interrupted, and a second one stops at once. SIGTERM is how
launchers and clusters take a machine back: what is saved then is all that can be, so the command
ends well (exit code 0), and a repeated one changes nothing.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)

ECHO_SECONDS = 2.0
"""A Ctrl-C this soon after the first is its echo: a terminal signals a launcher and its workers,
and then the launcher signals its workers once more."""


class Interrupted(KeyboardInterrupt):
    """Raised only where nothing is half done, so that a checkpoint can be written."""


class Preempted(SystemExit):
    """The same for SIGTERM; left to itself, it ends the process with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class StopRequest:
    """What somebody asked of this process."""

    interrupted: bool = False
    preempted: bool = False
    can_save: bool = False
    """Whether the run has come so far that a request will be answered; until then Ctrl-C acts at
    once, as there is nothing to save."""

    @property
    def asked(self) -> bool:
        """Whether it is to stop, for whatever reason."""
        return self.interrupted or self.preempted


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn signals inside the block into a request; signals elsewhere act as before."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return

    asked_at = 0.0

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked_at
        late = time.monotonic() - asked_at > ECHO_SECONDS
        if not request.can_save or (request.interrupted and late):
            raise KeyboardInterrupt
        if not request.interrupted:
            request.interrupted, asked_at = True, time.monotonic()
            logger.warning("stopping at the next safe place; once more stops at once")

    def preempt(_signal: int, _frame: FrameType | None) -> None:
        if not request.preempted:
            request.preempted = True
            logger.warning("SIGTERM: saving at the next safe place")

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: preempt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
