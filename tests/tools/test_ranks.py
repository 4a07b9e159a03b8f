"""run_ranks: what it returns, how a failing rank is reported, and that nothing hangs or stays behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankTimeoutError, on_ranks, run_ranks


def _describe(rank: int, world_size: int, suffix: str) -> tuple[int, int, str, int, int]:
    return rank, world_size, f"{rank}{suffix}", torch.get_num_threads(), dist.get_world_size()


def _fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the cup is empty")
    dist.barrier()


def _write_pid_then_hang_on_rank_1(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


def _die_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_describe, 3, "!") == [(rank, 3, f"{rank}!", 1, 3) for rank in range(3)]


def test_traceback_of_the_rank_that_failed_first_is_raised() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first\n") as info:
        run_ranks(_fail_on_rank_1, 2)
    assert info.value.rank == 1
    assert "in _fail_on_rank_1" in str(info.value)
    assert "ValueError: the cup is empty" in str(info.value)
    assert multiprocessing.active_children() == []


def test_death_by_signal_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 failed first\nrank 0:\ndied of SIGKILL"):
        run_ranks(_die_on_rank_0, 2)


def test_hang_ends_at_the_timeout_tells_where_and_leaves_no_process(tmp_path: Path) -> None:
    timeout = 8.0
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"ranks \[1\] of 2 did not finish within 8 s") as info:
        run_ranks(_write_pid_then_hang_on_rank_1, 2, str(tmp_path), timeout=timeout)
    assert time.monotonic() - start < timeout + 10
    assert "_write_pid_then_hang_on_rank_1" in str(info.value)
    assert multiprocessing.active_children() == []
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path(tmp_path, str(rank)).read_text()), 0)


def test_function_that_a_child_cannot_import_is_refused_before_anything_starts() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"local object|lambda"):
        run_ranks(lambda rank, world_size: None, 2)


@on_ranks(parametrized=("shared_memory",))
def _is_told(rank: int, world_size: int, most: int) -> None:
    assert os.environ["FASTSYNC_SHARED_MEMORY"] == "0"
    assert rank + world_size <= most, f"rank {rank} of {world_size}"


def test_a_body_for_ranks_is_told_the_tests_parameters_and_fails_the_test() -> None:
    _is_told(world_size=2, most=3, shared_memory=False)
    with pytest.raises(RankError, match="rank 1 of 2"):
        _is_told(world_size=2, most=2, shared_memory=False)
