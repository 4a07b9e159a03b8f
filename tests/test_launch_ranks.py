"""launch_ranks: real processes through torchrun's launcher."""

from __future__ import annotations

import os

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fastsync.ranks import launch_ranks


def rank_or_failure(failing: int) -> int:
    rank = int(os.environ["RANK"])
    if rank == failing:
        raise RuntimeError("as told")
    return rank


def test_it_returns_what_the_ranks_return_and_raises_if_one_does() -> None:
    assert launch_ranks(rank_or_failure, 2, -1) == [0, 1]
    with pytest.raises(ChildFailedError) as error:
        launch_ranks(rank_or_failure, 2, 1)
    assert error.value.get_first_failure()[0] == 1
