"""Drills break things at random, in rounds, until their time is over. ``make drill`` runs them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from tests.engine.test_shared_memory_limits import own_mounts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=1.0, help="for each drill; it tries everything at least once")
    parser.addoption("--kills", type=int, default=0, help="in place of minutes: each of elastic's tests kills so many")
    parser.addoption("--seed", type=int, default=0, help="of a drill's first round; each round has the next one")


def pytest_sessionstart() -> None:
    """What drills mount, only they see, and what they start: before that there is no server of ranks."""
    if os.geteuid() == 0:
        own_mounts()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """How often a drill has tried."""
    if report.when == "call" and report.passed and "rounds" in (properties := dict(report.user_properties)):
        return "passed", ".", f"PASSED {properties['rounds']:,} times"
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which ranks were killed, and when."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.when == "call" and (killed := dict(report.user_properties).get("kills")):
            terminalreporter.write_line(f"{report.nodeid.partition('::')[2]} {report.outcome}: {killed}")


@pytest.fixture
def seconds(pytestconfig: pytest.Config) -> float:
    return 60 * float(pytestconfig.getoption("minutes"))


@pytest.fixture
def kills() -> list[tuple[int, str]]:
    """The ranks that a drill has killed so far, and what they were doing."""
    return []


def told(kills: Sequence[tuple[int, str]]) -> str:
    """Says how many ranks were killed, and when."""
    counts = Counter(moment for _, moment in kills).most_common()
    first = sum(rank == 0 for rank, _ in kills)
    return f"{len(kills)} killed, {first} of them rank 0; " + ", ".join(
        f"{number} {moment}" for moment, number in counts
    )


@pytest.fixture
def seeds(
    request: pytest.FixtureRequest, seconds: float, record_property: Callable[[str, object], None]
) -> Iterator[int]:
    """One for each round. That of a round that fails is the last one printed."""
    option = request.config.getoption
    killed = request.getfixturevalue("kills") if "kills" in request.fixturenames else []

    def rounds() -> Iterator[int]:
        first, end = option("seed"), time.monotonic() + seconds
        for seed in count(first):
            print(f"--seed {seed}")
            yield seed
            record_property("rounds", seed + 1 - first)
            if killed:
                record_property("kills", told(killed))
            is_over = len(killed) >= option("kills") if killed and option("kills") else time.monotonic() >= end
            if is_over:
                return

    return rounds()
