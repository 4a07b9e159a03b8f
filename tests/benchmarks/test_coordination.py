"""Machines that agree on what is measured next: both ends in one process, over a real store."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from benchmarks.network import coordination as module
from benchmarks.network.coordination import CoordinationError, Coordinator
from benchmarks.network.hosts import Host
from tests.ppo.test_launch_torchrun import free_port

HOSTS = [Host("localhost", 1), Host("localhost", 1)]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Coordinator, Coordinator]]:
    """The first and the second."""
    monkeypatch.setattr(module, "PULSE", 0.05)
    port = free_port()
    before = signal.getsignal(signal.SIGINT)
    yield Coordinator(HOSTS, 0, port, 10.0), Coordinator(HOSTS, 1, port, 10.0)
    assert signal.getsignal(signal.SIGINT) == before


def test_every_machine_hears_what_each_has_to_say(machines: tuple[Coordinator, Coordinator]):
    heard: list[list[object]] = []
    other = threading.Thread(target=lambda: heard.append(machines[1].gather("plan", {"b": 2})))
    other.start()
    assert machines[0].gather("plan", ["a"]) == [["a"], {"b": 2}]
    other.join()
    assert heard == [[["a"], {"b": 2}]]
    assert [machine.leads for machine in machines] == [True, False]


def test_the_others_wait_for_the_first(machines: tuple[Coordinator, Coordinator]):
    events: list[str] = []

    def announce() -> None:
        events.append("announced")
        machines[0].announce("launch 0")

    threading.Timer(0.5, announce).start()
    machines[1].hear("launch 0")
    assert events == ["announced"]


def test_who_waits_hears_of_trouble_and_what_was_said_before_it_counts(machines: tuple[Coordinator, Coordinator]):
    machines[0].announce("launch 0")
    machines[0].warn("rank 3 failed first")
    machines[1].hear("launch 0")
    with pytest.raises(CoordinationError, match=r"^machine 0 \(localhost\): rank 3 failed first$"):
        machines[1].hear("launch 1")


def test_nobody_waits_for_ever(machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines[1], "_timeout", 0.3)
    with pytest.raises(CoordinationError, match=r"machine 0 \(localhost\) has not said launch 0 yet, after 0 s"):
        machines[1].hear("launch 0")
    with pytest.raises(CoordinationError, match=r"machine 0 \(localhost\) has not begun yet, after 0 s"):
        Coordinator(HOSTS, 1, free_port(), 0.3)


def test_a_launch_is_interrupted_when_another_machine_is_in_trouble(machines: tuple[Coordinator, Coordinator]):
    threading.Timer(0.3, machines[1].warn, ["interrupted"]).start()
    with pytest.raises(CoordinationError, match=r"^machine 1 \(localhost\): interrupted$"), machines[0].watched(2):
        time.sleep(60)


def test_a_machine_that_gives_no_sign_of_life_counts_as_gone(
    machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "SILENCE", 0.5)
    with (
        pytest.raises(CoordinationError, match=r"machine 1 \(localhost\) has not been heard of"),
        machines[0].watched(2),
    ):
        time.sleep(60)


def test_every_sign_of_life_counts_anew(machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch):
    clock = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    last = {0: (0, clock), 1: (0, clock)}
    for _ in range(3):
        assert list(machines[1]._trouble({})) == []
        clock += module.SILENCE
        assert list(machines[0]._trouble(last)) == []
    clock += module.SILENCE
    assert list(machines[0]._trouble(last)) == []
    clock += 1.0
    assert list(machines[0]._trouble(last)) == ["machine 1 (localhost) has not been heard of for 60 s"]


def test_a_launch_in_which_all_is_well_is_left_alone(
    machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch
):
    looks = threading.Semaphore(0)
    look = machines[0]._trouble

    def counted(last: dict[int, tuple[int, float]]) -> Iterator[str]:
        yield from look(last)
        looks.release()

    monkeypatch.setattr(machines[0], "_trouble", counted)
    with machines[0].watched(2):
        for _ in range(5):
            assert looks.acquire(timeout=60)
    with pytest.raises(ZeroDivisionError), machines[0].watched(2):
        raise ZeroDivisionError


def test_one_machine_meets_nobody():
    alone = Coordinator(HOSTS[:1], 0, 0, 1.0)
    assert alone.gather("plan", "a") == ["a"]
    alone.announce("launch 0")
    alone.warn("nobody hears it")
    with alone.watched(1):
        alone.part()


def test_the_first_machine_stays_until_the_others_have_parted(
    machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PARTING", 200.0)
    events: list[str] = []

    def leave() -> None:
        events.append("parted")
        machines[1].part()

    threading.Timer(0.5, leave).start()
    machines[0].part()
    assert events == ["parted"]


def test_the_first_machine_does_not_stay_for_ever(
    machines: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PARTING", 0.3)
    machines[0].part()
