"""Signals: the first asks, its echo is ignored, a later one stops; handlers come back."""

from __future__ import annotations

import signal

import pytest

from drafthead.train import interrupt
from drafthead.train.interrupt import stop_requests


def test_the_first_signal_is_a_request_and_its_echo_is_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as request:
        assert not request.asked
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_later_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "ECHO_SECONDS", -1.0)
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
