"""Signals are noted while a training runs, and mean what they did before once it is over."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from fastsync.launch.signals import StopSignals
from tests.ranks import fresh_process_context


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_handler_before_comes_back(number: signal.Signals):
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        with StopSignals(same_within=3600) as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # from a launcher as well: the same request
            assert stop.received == number
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [number]
        assert stop.received == number
    finally:
        signal.signal(number, before)


def test_the_first_signal_counts():
    with StopSignals(same_within=3600) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGUSR1


def test_another_thread_listens_to_nothing():
    outcome: list[object] = []

    def listen() -> None:
        with StopSignals() as stop:
            outcome.append((signal.getsignal(signal.SIGTERM), stop.requested))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert outcome == [(before, False)]


def signalled_twice(said: Path) -> None:
    with StopSignals(same_within=0):
        os.kill(os.getpid(), signal.SIGUSR1)
        said.write_text("noted")
        os.kill(os.getpid(), signal.SIGTERM)
        said.write_text("still here")


def test_a_second_one_ends_at_once(tmp_path: Path):
    said = tmp_path / "said"
    process = fresh_process_context().Process(target=signalled_twice, args=(said,))
    process.start()
    process.join()
    assert said.read_text() == "noted"
    assert process.exitcode == -signal.SIGTERM
