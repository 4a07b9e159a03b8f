"""Signals are noted while a training runs, and mean what they did before once it is over."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
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
            os.kill(os.getpid(), signal.SIGTERM)  # from a launcher as well: the same request, and the first one counts
            assert stop.received == number
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [number]
        assert stop.received == number
    finally:
        signal.signal(number, before)


def requested() -> bool:
    with StopSignals() as stop:
        return stop.requested


def test_another_thread_listens_to_nothing():
    """Python refuses handlers there. Workers of Ray call trainings in one."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(requested).result()


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
