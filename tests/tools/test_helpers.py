"""What the other tests rest on: ranks that fail, die or hang are seen, and so are bits that differ."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.bitwise import assert_bitwise_equal
from tests.models import assert_same_on_all_ranks
from tests.ranks import RankError, RankTimeoutError, on_ranks, run_ranks


def _number(rank: int, world_size: int, ending: str) -> int:
    if rank == 1 and ending == "raises":
        raise ValueError("the cup is empty")
    if rank == 1 and ending == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and ending == "hangs":
        time.sleep(600)
    dist.barrier()
    return rank + world_size


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_number, 3, "returns") == [3, 4, 5]


@pytest.mark.parametrize(
    ("ending", "said"), [("raises", r"(?s)in _number.*ValueError: the cup is empty"), ("dies", "died of SIGKILL")]
)
def test_the_rank_that_failed_first_is_named(ending: str, said: str) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first\n") as info:
        run_ranks(_number, 2, ending)
    info.match(said)
    assert multiprocessing.active_children() == []


def test_hang_ends_at_the_timeout_tells_where_and_leaves_no_process() -> None:
    run_ranks(_number, 2, "returns")  # from here on ranks start at once
    with pytest.raises(RankTimeoutError, match=r"(?s)ranks \[0, 1\] of 2 did not finish within 3 s.* in _number"):
        run_ranks(_number, 2, "hangs", timeout=3.0)
    assert multiprocessing.active_children() == []


@on_ranks()
def _is_told(rank: int, world_size: int, most: int) -> None:
    assert_same_on_all_ranks([torch.ones(2)])
    assert rank + world_size <= most, f"rank {rank} of {world_size}"


def test_a_body_for_ranks_fails_the_test() -> None:
    _is_told(world_size=2, most=3)
    with pytest.raises(RankError, match="rank 1 of 2"):
        _is_told(world_size=2, most=2)


def test_bits_are_compared_but_for_those_of_a_nan() -> None:
    values = torch.tensor([[0.0, -0.0, float("inf")], [1.5, -2.0, float("nan")]], dtype=torch.bfloat16)
    assert_bitwise_equal(values, values.t().contiguous().t())
    for other in (values[0], values.double(), values.abs()):
        with pytest.raises(AssertionError):
            assert_bitwise_equal(values, other)
