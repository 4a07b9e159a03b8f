"""A few cases of the drill, what they draw, and that a leak is found."""

from __future__ import annotations

import random
from contextlib import nullcontext
from mmap import mmap

import pytest

from tests.drill import endurance
from tests.drill.cases import Case
from tests.engine.entry_points import ALL


@pytest.mark.parametrize("grows", [False, True])
def test_what_grows_is_found(grows: bool) -> None:
    kept: list[mmap] = []

    def leak(_: int) -> None:
        kept.append(mmap(-1, 2**18))  # its own pages, for malloc may have some to spare
        kept[-1].write(bytes(2**18))

    with pytest.raises(AssertionError, match="KiB of memory grew") if grows else nullcontext():
        endurance.repeat(leak if grows else lambda _: None, 200)


def test_cases_have_whatever_may_happen() -> None:
    cases = [Case(entry_point, random.Random(seed)) for entry_point in ALL for seed in range(40)]
    drawn = [thing for case in cases for thing in (case, *case.parameters, *case.steps)]
    assert {what for thing in drawn for what, value in vars(thing).items() if value} >= {
        *("is_transposed", "is_tied", "is_frozen", "is_weighted", "weights", "may_join", "shares_memory"),
        *("accumulates", "fails", "piggybacks", "reduces", "extreme", "leaves_group", "reorders"),
    }
    assert {case.world_size for case in cases} == {2, 3, 4, 5}
    assert {case.compression.ranks_per_node for case in cases} == {1, 2}
