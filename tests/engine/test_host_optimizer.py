"""``attach(optimizer=)``: the bits of attach and torch's own step on every rank, with one copy of everything."""

from __future__ import annotations

import pytest

from tests.engine.host_steps import train_both
from tests.ranks import run_ranks


@pytest.mark.parametrize("seed", range(24))
def test_steps_are_those_of_every_rank(seed: int) -> None:
    run_ranks(train_both, 2 + seed % 4, seed, 10, timeout=60)
