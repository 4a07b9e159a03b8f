"""Which rank the others wait for: ``stats().waited_for``, and the warning of rank 0."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from tests.ranks import on_ranks

LATE, SECONDS = 1, 0.02


def _train(num_steps: int, late: int | None) -> fastsync.sync.synchronizer.GradientSynchronizer:
    model = nn.Linear(8, 2)
    sync = fastsync.attach(model)
    sync._engine.warn_of_late_ranks(share=0.2, seconds=0.0)
    for _ in range(num_steps):
        time.sleep(SECONDS if late is not None and dist.get_rank() == late else 0.0)
        model(torch.ones(4, 8)).sum().backward()
    return sync


@on_ranks(2)
def test_the_others_wait_for_the_rank_that_sleeps(rank: int, world_size: int):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = _train(81, LATE)
    waited = sync.stats().waited_for
    assert len(waited) == world_size
    assert waited[LATE] > max(SECONDS / 4, waited[1 - LATE])
    assert f"for rank {LATE}" in repr(sync.stats())
    told = [str(each.message) for each in caught if "wait for rank" in str(each.message)]
    assert [f"rank {LATE} " in text for text in told] == [True] * (rank == 0)  # once


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_nothing_is_known_at_first_and_on_one_rank(rank: int, world_size: int):
    assert _train(16, None).stats().waited_for == ()
    dist.barrier()
    assert len(_train(17, None).stats().waited_for) == (world_size if world_size > 1 else 0)
