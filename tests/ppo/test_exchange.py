"""What ranks tell each other beside gradients: of any size, at any pace, in shared memory and through the group."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fastsync.ppo.sync import Exchange
from tests.ranks import RankError, run_ranks

CPU = torch.device("cpu")


def _everything_comes(rank: int, world_size: int) -> bool:
    exchange = Exchange(CPU)
    chance = random.Random(rank)
    for step in range(300):
        length = 200_000 if (step + rank) % 50 == 7 else chance.randrange(300)  # four rows, or one
        if chance.random() < 0.05:
            time.sleep(chance.random() * 2e-3)
        values = exchange.all_gather((step, rank, "x" * length))
        assert [value[:2] for value in values] == [(step, peer) for peer in range(world_size)]
        assert values[rank][2] == "x" * length
        sums = exchange.sum(torch.tensor([step + rank, 0.1], dtype=torch.float64))
        expected = torch.zeros(2, dtype=torch.float64)
        for peer in range(world_size):
            expected += torch.tensor([step + peer, 0.1], dtype=torch.float64)
        assert torch.equal(sums, expected)
    return exchange._gather is not None


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_what_all_have_said(world_size: int) -> None:
    assert run_ranks(_everything_comes, world_size) == [world_size > 1] * world_size


def test_without_shared_memory_the_process_group_brings_it() -> None:
    assert run_ranks(_everything_comes, 2, shared_memory=False) == [False, False]


def _dies(rank: int, world_size: int) -> None:
    exchange = Exchange(CPU)
    for step in range(10**6):
        if rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.all_gather(step)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 has ended"):
        run_ranks(_dies, 3, lost=[1])


def _comes_too_late(rank: int, world_size: int) -> None:
    dist.group.WORLD._get_backend(CPU).options._timeout = timedelta(seconds=3)
    exchange = Exchange(CPU)
    if rank == 1:
        time.sleep(600)
    else:
        exchange.sum(torch.zeros(3))


def test_a_rank_that_comes_too_late_is_named() -> None:
    with pytest.raises(RankError, match="waited for rank 1's message until the process group's time-out, 3 s"):
        run_ranks(_comes_too_late, 2, lost=[1])
