"""Fixed cases of the drill: dtypes, uses, weights, kept gradients and compressions that meet at random."""

from __future__ import annotations

import pytest

from tests.drill.oracle import WORLD_SIZES, Case, run_cases

CASES = [Case(seed) for seed in range(120)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_cases(world_size: int, shares_memory: bool) -> None:
    seeds = [case.seed for case in CASES if (case.world_size, case.shares_memory) == (world_size, shares_memory)]
    assert len(seeds) > 5
    assert run_cases(seeds) == {}, "python -m tests.drill.oracle --cases 1 --seed with one of these runs it again"


def test_cases_follow_from_their_seeds_and_have_whatever_may_happen() -> None:
    assert repr(Case(7)) == repr(Case(7)) != repr(Case(8))
    steps = [step for case in CASES for step in case.steps]
    for name in ("reattach", "fails", "freeze", "compress", "weights", "accumulate", "synchronizes", "spoil", "clip"):
        assert any(getattr(step, name) for step in steps), name
