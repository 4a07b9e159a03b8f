"""``Elastic``: ranks that leave a training, fall silent or part from the others, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from fastsync.errors import RanksDifferError, SyncError
from tests.engine.elastic import NUM_STEPS, Result, as_if_lost, assert_same, begun, play, replay
from tests.ranks import on_ranks, run_ranks


def break_off(rank: int, world_size: int, port: int, ends: dict[int, int], amid: bool = False) -> tuple[int, Result]:
    """Takes steps, of which some ranks take fewer. These live on until the others are done.

    Args:
        ends: how many steps these ranks take.
        amid: whether they break out of the block of the next step, before its backward.
    """
    training, elastic = begun(port, timeout=600)
    num_runs = 0
    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if amid and step.index == ends.get(rank):
                break
            training.step(step.index)
        if not amid and step.index + 1 == ends.get(rank, NUM_STEPS):
            break
    result, store = training.result(), TCPStore("127.0.0.1", port, is_master=False)
    if rank not in ends:
        store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(world_size) if each not in ends])
    return num_runs, result


@pytest.mark.parametrize(
    ("amid", "shared_memory"), [(False, True), (True, False)], ids=["behind a block", "in a block"]
)
def test_the_others_go_on_without_a_rank_that_breaks_off(store: TCPStore, shared_memory: bool, amid: bool) -> None:
    """Long before the time-out, which is ten minutes."""
    ran = run_ranks(break_off, 3, store.port, {1: 3}, amid, timeout=60, shared_memory=shared_memory)
    changes = [(3, {0: 3, 2: 3})]
    expected = (
        play(3, range(3), changes)
        if shared_memory
        else run_ranks(replay, 3, "none", [0, 1, 2], changes, shared_memory=False)
    )
    for rank in (0, 2):
        assert_same(ran[rank][1], expected[rank])


def test_a_training_ends_where_all_ranks_break_off(store: TCPStore) -> None:
    ran = run_ranks(break_off, 3, store.port, dict.fromkeys(range(3), 3), timeout=60)
    assert [num_runs for num_runs, _ in ran] == [3] * 3
    assert_same([shared for _, (shared, _) in ran[1:]], [ran[0][1][0]] * 2)


@on_ranks(3)
def test_a_rank_that_wakes_too_late_ends_by_itself(rank: int, world_size: int, store_port: int, tmp_path: Path) -> None:
    training, elastic = begun(store_port, timeout=4)
    pid, fails_in = tmp_path / "pid", [5, 6, 7]
    refusal = pytest.raises(SyncError, match=r"ranks \[0, 2\] have gone on without rank 1, which was silent for 4 s")
    with refusal if rank == 1 else nullcontext():
        for step in elastic.steps(NUM_STEPS):
            with step:
                if (rank, step.index) == (1, 3):
                    pid.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if rank == 2 and step.index in fails_in:  # so that the stopped rank is several memberships late
                    fails_in.remove(step.index)
                    raise as_if_lost()
                training.step(step.index)
    assert rank == 1 or elastic.members == [0, 2]
    if rank == 0:
        os.kill(int(pid.read_text()), signal.SIGCONT)


@pytest.mark.parametrize("min_ranks", [1, 3])
@on_ranks(3)
def test_a_rank_whose_script_fails_is_a_lost_one(rank: int, world_size: int, store_port: int, min_ranks: int) -> None:
    training, elastic = begun(store_port, timeout=3, min_ranks=min_ranks)
    error: Exception | None = None
    try:
        for step in elastic.steps(NUM_STEPS):
            with step:
                if (rank, step.index) == (1, 3):
                    raise ArithmeticError
                training.step(step.index)
    except (SyncError, ArithmeticError) as raised:
        error = raised
    if rank == 1:
        assert type(error) is ArithmeticError
    elif min_ranks == 1:
        assert (error, elastic.members) == (None, [0, 2])
    else:
        assert isinstance(error, SyncError)
        assert error.ranks == (0, 2)


@patch("fastsync.elastic.membership.NEWS_SECONDS", 0.1)
def change_often(rank: int, world_size: int, port: int) -> list[tuple[int, int]]:
    training, elastic = begun(port)
    left: list[tuple[int, int]] = []
    for step in elastic.steps(10):
        has_changed = len(left) > step.index
        with step:
            if not has_changed:
                left.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
                raise as_if_lost()
            training.step(step.index)
    return left


def test_changes_leave_nothing_behind(store: TCPStore) -> None:
    for left in run_ranks(change_often, 2, store.port):
        descriptors, threads = zip(*left, strict=True)
        assert max(descriptors[6:]) <= max(descriptors[3:6])
        assert max(threads[6:]) <= max(threads[3:6])
    assert store.num_keys() < 40


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(cases={"cause": ["a backward more", "other weights"]})
def test_ranks_that_have_parted_all_end(rank: int, world_size: int, cause: str, tmp_path: Path) -> None:
    """None of them takes another for lost, and goes on. Rank 1 does what the others do not, in step 3 or behind it."""
    training, elastic = begun(str(tmp_path / cause), timeout=20)

    def train() -> None:
        for step in elastic.steps(60):
            with step:
                if step.index == 3 and rank == 1 and cause == "a backward more":
                    training.model(torch.ones(8, 6)).sum().backward()
                if step.index == 3 and rank == 1 and cause == "other weights":
                    torch.nn.init.zeros_(training.model[0].weight)
                training.step(step.index)

    with pytest.raises(RanksDifferError) as raised:
        train()
    assert elastic.members == [*range(world_size)]
    assert ("do not belong together" if cause == "a backward more" else "hold different weights") in str(raised.value)
    if cause == "other weights":
        assert elastic._step.num_finished == 51


@on_ranks(2)
def test_an_elastic_that_is_dropped_before_its_loop_leaves_the_group_alone(
    rank: int, world_size: int, store_port: int
) -> None:
    training, elastic = begun(store_port)
    if rank == 0:
        elastic._membership.watch.close()  # as garbage collection does
    time.sleep(1.0)  # in which the other rank learns of it
    total = torch.ones(1)
    dist.all_reduce(total, group=training.sync._group)
    assert total == world_size
