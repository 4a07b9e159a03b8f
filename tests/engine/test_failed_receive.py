"""A sync that fails on one rank may succeed on another, whose fp16 scale follows it: no sync mixes two scales."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.entry_points import Averaged, average
from tests.engine.failing_passes import no_memory_to
from tests.models import Given
from tests.ranks import on_ranks, pair_of

SMALL = 2.0**-14
GOOD_STEPS = 2
ENTRY_POINTS = ("attach", "synchronize")


def _grads(rank: int, magnitude: float) -> list[Tensor]:
    return [torch.full((300,), (1.0 + rank) * magnitude)]


def _after_a_failure(rank: int, entry_point: str, group: dist.ProcessGroup | None = None) -> Averaged:
    """Rank 1 has averaged its first small gradients, rank 0 has not."""
    given = average(entry_point, Given(_grads(rank, 1.0)), "fp16", group=group)
    for _ in range(GOOD_STEPS):
        given.step(_grads(rank, 1.0))
    with no_memory_to("unpack", fails=rank == 0):
        if rank == 0:
            with pytest.raises(torch.OutOfMemoryError):
                given.step(_grads(rank, SMALL))
        else:
            given.step(_grads(rank, SMALL))
    return given


@on_ranks(2, cases={"shared_memory": [True, False], "entry_point": ENTRY_POINTS})
def test_ranks_that_agree_afterwards_have_one_scale(rank: int, world_size: int, entry_point: str) -> None:
    given = _after_a_failure(rank, entry_point)
    given.handle.compression = "fp16"
    for magnitude in (SMALL, SMALL / 4):
        [mean] = given.step(_grads(rank, magnitude))
        assert mean is not None
        assert mean.unique().tolist() == [1.5 * magnitude]


@on_ranks(8, timeout=90)
def test_no_rank_goes_on_alone(rank: int, world_size: int) -> None:
    """Two ranks of each entry point, with shared memory and without."""
    os.environ["FASTSYNC_SHARED_MEMORY"] = str(rank // 4)
    given = _after_a_failure(rank % 2, ENTRY_POINTS[rank // 2 % 2], pair_of(rank, world_size))
    why = ["rank 1 averaged without agreeing anew.*its newest sync has failed", "failed on rank 1 of 2: "]
    with pytest.raises(RuntimeError, match=why[rank % 2]):
        given.step(_grads(rank % 2, SMALL))
    dist.barrier()  # until then the others are there
