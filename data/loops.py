"""Answers that ended in a loop: text that a target repeats until its limit teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence


def loops(ids: Sequence[object], longest: int = 40, copies: int = 4, least: int = 48) -> bool:
    """Whether a sequence ends in a loop: one run again and again.

    The run has at most `longest` items and stands there at least `copies` times, over at least
    `least` items.
    """
    for period in range(1, longest + 1):
        span = max(copies * period, least)
        if span <= len(ids):
            tail = ids[len(ids) - span :]
            if tail[period:] == tail[:-period]:
                return True
    return False
