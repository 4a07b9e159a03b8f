"""Drills break things at random, in rounds, until their time is over. ``make drill`` runs them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.engine.test_shared_memory_limits import own_mounts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=1.0, help="for each drill; it tries everything at least once")
    parser.addoption("--seed", type=int, default=0, help="of a drill's first round; each round has the next one")


def pytest_sessionstart() -> None:
    """What drills mount, only they see, and what they start: before that there is no server of ranks."""
    if os.geteuid() == 0:
        own_mounts()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """How often a drill has tried."""
    if report.when == "call" and report.passed and report.user_properties:
        return "passed", ".", f"PASSED {report.user_properties[-1][1]:,} times"
    return None


@pytest.fixture
def seconds(pytestconfig: pytest.Config) -> float:
    return 60 * float(pytestconfig.getoption("minutes"))


@pytest.fixture
def seeds(pytestconfig: pytest.Config, seconds: float, record_property: Callable[[str, object], None]) -> Iterator[int]:
    """One for each round. That of a round that fails is the last one printed."""

    def rounds() -> Iterator[int]:
        first, end = pytestconfig.getoption("seed"), time.monotonic() + seconds
        for seed in count(first):
            print(f"--seed {seed}")
            yield seed
            record_property("rounds", seed + 1 - first)
            if time.monotonic() >= end:
                return

    return rounds()
