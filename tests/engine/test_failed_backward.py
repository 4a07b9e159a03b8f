"""Under DDP and fully_shard one rank's backward raises: what the other rank sees.

With ``attach`` nobody waits, see test_attach_errors.py.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.entry_points import Averaged, average
from tests.models import Fails
from tests.ranks import GLOO_TIMED_OUT, on_ranks, pair_of
from tests.refused import refused

GOOD_STEPS = 2
FAILED = r"averaging .* failed on rank 0 of 2: .*"
# In shared memory, and by messages.
TIMED_OUT = rf"(waited for rank 1's gradients until the process group's time-out, 3 s|{GLOO_TIMED_OUT})"
HAS_GONE = "rank 1 has ended, or has left the process group"

ENTRY_POINTS = ("hook", "sharded")


class Training:
    """On rank 1 the last step's backward raises once the gradients of the last layer are there."""

    def __init__(self, rank: int, entry_point: str, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 20))
        self.fails = False
        model[0].register_forward_hook(lambda _, inputs, output: Fails.apply(output) if self.fails else output)
        self._averaged: Averaged = average(entry_point, model, group=group)
        self._inputs = torch.full((2, 4), 1.0 + rank)
        for _ in range(GOOD_STEPS):
            self.step()
        self.fails = rank == 1

    def step(self) -> None:
        self._averaged.model.zero_grad()
        self._averaged.backward(self._averaged.model(self._inputs).sum())


def _last_step(training: Training, what_rank_0_says: str) -> None:
    if training.fails:
        refused(lambda: training.step(), "as told", kind=ArithmeticError)
    else:
        with pytest.raises(RuntimeError, match=FAILED + what_rank_0_says):
            training.step()


@on_ranks(8, timeout=60)
def test_the_other_rank_waits_until_the_time_out(rank: int, world_size: int) -> None:
    entry_point = ENTRY_POINTS[rank // 4]
    os.environ["FASTSYNC_SHARED_MEMORY"] = str(rank // 2 % 2)
    training = Training(rank % 2, entry_point, pair_of(rank, world_size, timeout=timedelta(seconds=3)))
    _last_step(training, TIMED_OUT)
    dist.barrier()  # ranks 1 stay until the other ones have raised
    if training.fails and entry_point == "hook":
        training.fails = False
        refused(lambda: training.step(), "Expected to have finished reduction in the", kind=RuntimeError)


@on_ranks(4, timeout=60)
def test_the_other_rank_does_not_wait_for_a_process_that_ends(rank: int, world_size: int) -> None:
    """The group's time-out is longer than the test's."""
    group = pair_of(rank, world_size, timeout=timedelta(seconds=300))
    _last_step(Training(rank % 2, ENTRY_POINTS[rank // 2], group), HAS_GONE)
