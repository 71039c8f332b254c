"""Ctrl-C as a request: the loop stops at its next safe place; a second one stops at once."""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""SIGTERM too: that is how launchers and clusters end a process."""


ECHO_SECONDS = 2.0
"""Signals this soon after the first are its echo: a terminal signals a launcher and its workers,
and then the launcher signals its workers once more."""


class Interrupted(KeyboardInterrupt):
    """Raised only where nothing is half done, so that a checkpoint can be written."""


@dataclass
class StopRequest:
    """Whether somebody asked this process to stop."""

    asked: bool = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the first signal inside the block into a request; signals elsewhere act as before."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return

    asked_at = 0.0

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked_at
        if request.asked:
            if time.monotonic() - asked_at > ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        request.asked, asked_at = True, time.monotonic()
        logger.warning("stopping at the next safe place; once more stops at once")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
