"""Some of the drill's random cases, against float64. ``TESTS_SEED`` chooses others: ``.ci/run`` takes the date."""

from __future__ import annotations

import os

import pytest
from hypothesis import seed

from tests.drill.oracle import check
from tests.engine.entry_points import ALL


@pytest.mark.parametrize("entry_point", ALL)
def test_random_cases(entry_point: str) -> None:
    seed(int(os.environ.get("TESTS_SEED", "0")))(check)(entry_point)
