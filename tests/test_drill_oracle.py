"""Fixed cases of the drill: dtypes, uses, weights, kept gradients and compressions that meet at random."""

from __future__ import annotations

import pytest
import torch

from tests.drill.oracle import Case, run_cases


def _is_settled(case: Case) -> bool:
    """The norm of weighted gradients of 16 bits is that of before they were rounded."""
    return not (case.is_weighted and any(each.dtype in (torch.float16, torch.bfloat16) for each in case.parameters))


CASES = [case for case in map(Case, range(60)) if _is_settled(case)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_cases(world_size: int, shares_memory: bool) -> None:
    seeds = [case.seed for case in CASES if (case.world_size, case.shares_memory) == (world_size, shares_memory)]
    assert len(seeds) > 5
    assert run_cases(seeds) == {}, "python -m tests.drill.oracle --cases 1 --seed with one of these runs it again"


def test_a_case_follows_from_its_seed() -> None:
    assert repr(Case(7)) == repr(Case(7)) != repr(Case(8))
