"""``Elastic``: steps that fail on some ranks and run again, or are finished by those that lack them."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

import fastsync
from tests.engine.elastic import (
    NUM_STEPS,
    Changes,
    Result,
    Training,
    as_if_lost,
    assert_same,
    begun,
    check,
    end_now,
    fail_once,
    play,
    replay,
)  # fmt: skip
from tests.ranks import on_ranks, run_ranks


def finish_apart(store: str, furthest: int | None, compression: str) -> tuple[int, Result]:
    """Step 2 ends well on one rank alone, or on none."""
    training, elastic = begun(store, compression, timeout=20)
    num_runs = 0
    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if step.index == 2 and num_runs == 3 and dist.get_rank() != furthest:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
    return num_runs, training.result()


@on_ranks(3, cases={"compression": ["fp16", "int8+ef", "lowrank:1"]})
def test_a_step_that_fails_after_its_averaging_is_taken_back_on_all(
    rank: int, world_size: int, compression: str, tmp_path: Path
) -> None:
    num_runs, result = finish_apart(str(tmp_path / compression), None, compression)
    assert num_runs == NUM_STEPS + 1
    assert_same(result, replay(rank, world_size, compression, [0, 1, 2], []))


@on_ranks(3, cases={"furthest": [0, 1]})
def test_a_step_that_one_has_finished_is_finished_on_all(
    rank: int, world_size: int, furthest: int, tmp_path: Path
) -> None:
    num_runs, (shared, own) = finish_apart(str(tmp_path / str(furthest)), furthest, "int8+ef")
    # The one that had finished step 2 has begun step 3 in vain. The others do not run step 2 again.
    assert num_runs == NUM_STEPS + (rank == furthest)
    expected_shared, expected_own = replay(rank, world_size, "int8+ef", [0, 1, 2], [])
    assert_same((shared, own[-1]), (expected_shared, expected_own[-1]))


@on_ranks(2, cases={"fails_on": [[1], [0, 1]]})
def test_values_for_the_next_sync_go_along(rank: int, world_size: int, fails_on: list[int], tmp_path: Path) -> None:
    """The end of each block puts one into the sync of the next. Step 2 fails on some ranks.

    With a rank that has not finished the step, the one that has counts for both.
    """
    training, elastic = begun(str(tmp_path / str(len(fails_on))), timeout=20)
    means: dict[int, float] = {}
    for num_runs, step in enumerate(elastic.steps(5), 1):
        with step:
            if num_runs == 3 and rank in fails_on:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
            means[step.index] = float(training.sync.piggybacked().get("next", torch.tensor(0.0)))
            training.sync.piggyback("next", torch.tensor(10.0 * step.index + rank))
    expected = [0.0, 0.5, 10.5, 20.0 if fails_on == [1] else 20.5, 30.5]
    assert [*means.values()][-2:] == expected[-2:]
    assert rank == 1 or [*means.values()] == expected


def finish_beside_a_loss(rank: int, world_size: int, port: int, op: str) -> tuple[Changes, list[Tensor]]:
    """Rank 0 finishes step 2, the optimizer of rank 1 fails in it, and rank 2 dies in it."""
    training, elastic = begun(port, "int8+ef", op, timeout=20)
    changes: Changes = []
    elastic._on_change = lambda members: changes.append((elastic._step.num_finished, elastic._members.now.progress))
    for num_runs, step in enumerate(elastic.steps(NUM_STEPS), 1):
        with step:
            if num_runs == 3 and rank == 1:
                training.optimizer.register_step_pre_hook(fail_once())
            if num_runs == 3 and rank == 2:
                training.optimizer.register_step_pre_hook(lambda *_: end_now())
            training.step(step.index)
    return changes, training.shared()


@pytest.mark.parametrize("op", ["mean", "mean_of_used", "sum"])
def test_residuals_of_a_finished_step_fit_a_smaller_group(store: TCPStore, op: str) -> None:
    ran = run_ranks(finish_beside_a_loss, 3, store.port, op, lost=[2])
    (changes, _), *_ = ran
    assert changes == [(3, {0: 3, 1: 2})]
    expected = run_ranks(replay, 3, "int8+ef", [0, 1, 2], changes, op)
    for rank in (0, 1):
        assert_same(ran[rank][1], expected[rank][0])


def repeat_a_step(store: dist.FileStore, fails: bool) -> list[Tensor]:
    """Step 1 fails once. Gradients are dropped behind the optimizer's step, as some loops do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = fastsync.Elastic(model, optimizer, fastsync.attach(model, ignored_states=[model[1]]), store=store)
    for num_runs, step in enumerate(elastic.steps(3), 1):
        with step:
            model(torch.full((4, 3), 1.0 + step.index)).square().mean().backward()
            if fails and num_runs == 2:
                raise as_if_lost()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@on_ranks(1)
def test_a_step_that_runs_again_drops_what_is_left_to_each_rank(rank: int, world_size: int, tmp_path: Path) -> None:
    one, other = (repeat_a_step(dist.FileStore(str(tmp_path / str(fails)), -1), fails) for fails in (False, True))
    assert_same(one, other)


def die_while_it_shares(rank: int, world_size: int, port: int, compression: str) -> tuple[Changes, Result]:
    """Rank 0 alone finishes step 2, and dies amid giving the others its state."""
    training = Training(range(world_size), compression)
    elastic, changes = training.noting(timeout=20, store=TCPStore("127.0.0.1", port, is_master=False))
    if rank == 0:
        training.sync._init_sync = lambda root: end_now()
    for num_runs, step in enumerate(elastic.steps(NUM_STEPS), 1):
        with step:
            if num_runs == 3 and rank != 0:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
    return changes, training.result()


@pytest.mark.parametrize("compression", ["int8+ef", "lowrank:1"])
def test_a_step_whose_result_is_lost_with_its_rank_is_taken_back(store: TCPStore, compression: str) -> None:
    """With the residuals, scales and factors that had been changed for that result, or came with it."""
    ran = run_ranks(die_while_it_shares, 3, store.port, compression, lost=[0])
    assert check(ran, [0, 1, 2], compression) == [(2, {1: 2, 2: 2})]


@on_ranks(3, cases={"steps_on": [False, True]})
def test_a_step_whose_error_one_rank_has_caught_runs_again_on_all(
    rank: int, world_size: int, steps_on: bool, tmp_path: Path
) -> None:
    training, elastic = begun(str(tmp_path / str(steps_on)))
    num_runs, num_backwards = 0, 0

    def backward(loss: Tensor) -> None:
        nonlocal num_backwards
        loss.backward()
        num_backwards += 1

    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if (rank, num_runs) != (1, 3):
                training.step(step.index, backward)
                continue
            with contextlib.suppress(StopIteration):
                training.step(step.index, partial(fail_and_catch, training, steps_on))
    assert num_runs == NUM_STEPS + 1
    assert num_backwards == NUM_STEPS  # the others' raised, so that no scaler or scheduler has seen nan
    assert_same(training.result(), play(3, range(3), [])[rank])


def fail_and_catch(training: Training, steps_on: bool, loss: Tensor) -> None:
    """Some gradients are on their way when it fails. Then the block goes on to its optimizer, or to its end."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = training.model[0].weight.register_hook(fail)
    with contextlib.suppress(RuntimeError):
        loss.backward()
    handle.remove()
    time.sleep(0.5)  # the others have got what was left
    if not steps_on:
        raise StopIteration


@on_ranks(3)
def test_a_rank_that_gives_up_ends_a_collective_of_the_others(rank: int, world_size: int, store_port: int) -> None:
    """Rank 1 leaves a step, and lives. The others wait for it in a collective of their own, before backward."""
    training, elastic = begun(store_port)
    fails = rank == 1
    for step in elastic.steps(NUM_STEPS):
        with step:
            if fails and step.index == 3:
                fails = False
                raise as_if_lost()
            dist.all_reduce(torch.ones(1), group=elastic.group)
            training.step(step.index)
    assert elastic.members == [0, 1, 2]
