"""How the benchmarks' ranks start in their tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _forked_ranks() -> Iterator[None]:
    from tests.forked import forked_ranks

    with forked_ranks():
        yield
