"""What ranks tell each other beside gradients: numbers, few or many, at any pace."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from fastsync.ppo.exchange import Exchange
from tests.ranks import RankError, run_ranks
from tests.refused import refused

CPU = torch.device("cpu")


def _everything_comes(rank: int, world_size: int) -> None:
    exchange = Exchange(CPU)
    chance = random.Random(rank)
    for step in range(300):
        short = chance.choice([0, 300, 509, 510])  # of one row, or of two
        length = 20_000 if (step + rank) % 50 == 7 else short
        if chance.random() < 0.05:
            time.sleep(chance.random() * 2e-3)
        values = exchange.all_gather([step, rank, *[0.1] * length])
        assert [value[:2] for value in values] == [[step, peer] for peer in range(world_size)]
        assert values[rank][2:] == [0.1] * length
        sums = exchange.sum(torch.tensor([step + rank, 0.1], dtype=torch.float64))
        expected = torch.zeros(2, dtype=torch.float64)
        for peer in range(world_size):
            expected += torch.tensor([step + peer, 0.1], dtype=torch.float64)
        assert torch.equal(sums, expected)
    assert exchange.sum(torch.tensor(2.0)).item() == 2.0 * world_size
    assert exchange.sum(torch.empty(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_what_all_have_said(world_size: int) -> None:
    run_ranks(_everything_comes, world_size)


def _dies(rank: int, world_size: int) -> None:
    exchange = Exchange(CPU)
    for step in range(10**6):
        if rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.all_gather([step])


def test_a_rank_that_is_killed_is_named() -> None:
    refused(lambda: run_ranks(_dies, 3, lost=[1]), "ranks [1] do not answer", kind=RankError)
