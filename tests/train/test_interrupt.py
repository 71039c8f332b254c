"""Signals: what each asks for, when it acts at once, and that handlers come back."""

from __future__ import annotations

import signal

import pytest

from drafthead.train import interrupt
from drafthead.train.interrupt import stop_requests


def test_the_first_ctrl_c_is_a_request_and_its_echo_is_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as request:
        request.can_save = True
        assert not request.asked
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert request.interrupted
        assert not request.preempted
    assert signal.getsignal(signal.SIGINT) is before


def test_a_later_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "ECHO_SECONDS", -1.0)
    with stop_requests() as request:
        request.can_save = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_acts_at_once_while_there_is_nothing_to_save() -> None:
    with stop_requests() as request, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not request.asked


def test_sigterm_is_a_request_at_any_time_and_any_number_of_times() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as request:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert request.preempted
        assert not request.interrupted
    assert signal.getsignal(signal.SIGTERM) is before
