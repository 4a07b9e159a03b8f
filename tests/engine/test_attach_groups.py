"""Ranks that leave an attached engine's group and return, and ranks that run out of batches."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import _C
from fastsync.sync.compression import parse_compression
from tests.engine.attached import Fallible, attach, loss_of
from tests.models import SMALL_BUCKETS, Given, assert_same_on_all_ranks, grads_of, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

# ---- other process groups --------------------------------------------------------------------------------------------


SHAPES = [(7, 33), (300,), (250,)]


def _grads(rank: int, step: int) -> list[Tensor]:
    return random_grads(rank, step, SHAPES, torch.float32)


def _step(model: Given, rank: int, step: int) -> list[Tensor]:
    model.zero_grad()
    model(_grads(rank, step)).backward()
    return [grad for grad in grads_of(model) if grad is not None]


def _unsent(sync: Any, num_ranks: int, group: dist.ProcessGroup) -> Tensor:
    """What the group's ranks have yet to add to a mean over so many."""
    total = torch.zeros(1)
    for residual in sync.state_dict()["residuals"].values():
        total += (residual / num_ranks).sum()
    dist.all_reduce(total, group=group)
    return total


@on_ranks(3, cases={"wire, shared_memory": [("fp16", True), ("int8+ef", True), ("int8+ef", False)]})
def test_ranks_leave_and_return(rank: int, world_size: int, wire: str) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    model = Given(_grads(0, 0))
    sync = fastsync.attach(model, parse_compression(wire), bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        _step(model, rank, step)
    before = sync.state_dict()
    unsent = _unsent(sync, world_size, pair) if rank < 2 else None

    group = pair if rank < 2 else alone
    sync.use_group(group)
    assert sync.stats().num_steps == 0
    assert sync.state_dict()["scales"] == before["scales"]
    assert sync.state_dict()["step"] == 3
    if unsent is not None:
        torch.testing.assert_close(_unsent(sync, 2, pair), unsent)
    for step in range(3, 6):
        got = _step(model, rank, step)
        if rank < 2:
            assert_same_on_all_ranks(got, group=pair)
        members = (0, 1) if rank < 2 else (2,)
        means = [torch.stack(same).mean(dim=0) for same in zip(*(_grads(r, step) for r in members), strict=True)]
        for each, mean in zip(got, means, strict=True):
            torch.testing.assert_close(each, mean, rtol=0, atol=0.05 * float(mean.abs().max()))
    with torch.no_grad():
        model.weights[0].add_(rank)  # what one has that was alone

    sync.use_group(None)
    assert_same_on_all_ranks([parameter.detach() for parameter in model.parameters()])
    assert_same_on_all_ranks(_step(model, rank, 6))
    assert sync.state_dict()["step"] == 7
    sync.compression = "none"
    everyone = [_grads(other, 8) for other in range(world_size)]
    _step(model, rank, 7)
    got = _step(model, rank, 8)
    torch.testing.assert_close(got, [torch.stack(same).mean(dim=0) for same in zip(*everyone, strict=True)])
    sync.detach()
    refused(lambda: sync.use_group(pair), "use_group() was called after detach()", kind=RuntimeError)


@on_ranks(3)
def test_values_for_the_next_sync_go_along(rank: int, world_size: int) -> None:
    model = Given(_grads(0, 0))
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    sync = fastsync.attach(model, process_group=groups[rank == 2])
    if rank != 2:
        sync.piggyback("sent", torch.tensor(7.0))
        _step(model, rank, 0)
        sync.piggyback("waiting", torch.tensor([1.0 + 4 * rank, 2.0]))
    sync.use_group(dist.group.WORLD)
    _step(model, rank, 1)
    means = {name: value.tolist() for name, value in sync.piggybacked().items()}
    assert means == {"waiting": [torch.tensor(7 / 3).item(), 2.0]}, "rank 2 has rank 0's"
    _step(model, rank, 2)
    assert sync.piggybacked() == {}


@on_ranks(2)
def test_models_that_differ_are_refused(rank: int, world_size: int) -> None:
    """All are told, and their backwards stay synchronised."""
    alone = [dist.new_group([other]) for other in range(world_size)]
    model = torch.nn.ParameterDict({"left" if rank == 0 else "right": torch.nn.Parameter(torch.ones(3))})
    sync = fastsync.attach(model, "fp16", process_group=alone[rank])
    next(model.parameters()).sum().backward()
    refused(lambda: sync.use_group(None), "the ranks do not agree on what to synchronise")
    refused(lambda: next(model.parameters()).sum().backward(), "the ranks do not agree on what to synchronise")


@on_ranks(2)
def test_options_stay(rank: int, world_size: int) -> None:
    model = torch.nn.BatchNorm1d(3)
    sync = fastsync.attach(model, op="sum", broadcast_buffers=True, overlap=False)
    sync.set_weight(1.0 + rank)
    sync.use_group(dist.new_group())
    model(torch.arange(6.0).view(2, 3) + rank).sum().backward()
    sync.synchronize()
    assert model.bias.grad.tolist() == [6.0] * 3
    assert_same_on_all_ranks([model.running_mean])


@on_ranks(4)
def test_a_group_that_is_refused_changes_nothing(rank: int, world_size: int) -> None:
    """A group that the compression is not for: the engine goes on in the one that it has, with all that it keeps."""
    trio = dist.new_group([0, 1, 2])
    model = Given(_grads(0, 0))
    sync = fastsync.attach(model, fastsync.Compression("int8", "fp32", error_feedback=True, ranks_per_node=2))
    _step(model, rank, 0)
    before = sync.state_dict()
    keeps = torch.tensor(len(before["residuals"]))
    dist.all_reduce(keeps)
    assert keeps > 0
    if rank < 3:
        refused(lambda: sync.use_group(trio), "ranks_per_node=2 does not divide the process")
    assert str(sync.state_dict()) == str(before)
    assert_same_on_all_ranks(_step(model, rank, 1))
    assert sync.stats().num_steps == 2


# ---- ranks without batches -------------------------------------------------------------------------------------------


@on_ranks(3, shared_memory=False, lost=[2], timeout=60)
def test_who_waits_for_a_rank_that_has_left_the_step_goes_on(rank: int, world_size: int) -> None:
    """Rank 0 sends before rank 2 is lost, and rank 1 fails to send afterwards, and has nothing for rank 0."""
    model = Fallible()
    sync = attach(model)
    loss_of(model, rank, 0).backward()
    store = dist.distributed_c10d._get_default_store()
    model.fails = True
    if rank == 2:
        store.wait(["rank 0 has sent"])
        store.set("rank 2 is lost", "")
        os._exit(0)
    if rank == 1:
        store.wait(["rank 2 is lost"])
        time.sleep(1.0)
    with pytest.raises((ArithmeticError, RuntimeError)):
        loss_of(model, rank, 1).backward()
    store.set(f"rank {rank} has sent", "")
    model.fails = False
    sync.use_group(dist.new_group([0, 1], use_local_synchronization=True))
    model.zero_grad()
    loss_of(model, rank, 2).backward()
    assert_same_on_all_ranks(grads_of(model), sync._group)


@on_ranks(3)
def test_ranks_without_batches_do_not_count(rank: int, world_size: int) -> None:
    """What rides and buffers go on with the ranks that still have batches."""
    model = nn.BatchNorm1d(1, momentum=1.0, affine=True)
    sync = fastsync.attach(model, broadcast_buffers=True)
    with sync.join():
        for step in range(3 if rank else 1):
            sync.piggyback("rank", torch.tensor(float(rank)))
            model(torch.tensor([[9.0 * step + rank], [9.0 * step + rank]])).sum().backward()
            active = [0, 1, 2] if step == 0 else [1, 2]
            assert sync.piggybacked()["rank"] == sum(active) / len(active)
            assert model.running_mean is not None
            assert model.running_mean.item() == [0, 10, 19][step], "not of the first that has batches"
        if rank == 0:
            sync.piggyback("rank", torch.tensor(100.0))  # for a backward of its own that never comes
    assert model.running_mean.item() == 19


@on_ranks(2, timeout=40.0)
def test_what_rides_first_where_ranks_have_run_out(rank: int, world_size: int) -> None:
    """Rank 0 has no batch at all in the first loop, and one less in the second."""
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    message = r"rank 0: nothing; rank 1: piggybacked value loss of shape \[\]"
    with pytest.raises(ValueError, match=message), sync.join():  # noqa: PT012
        if rank == 1:
            sync.piggyback("loss", torch.tensor(1.0))
            model([torch.ones(3)]).backward()
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    with sync.join():
        for step in range(1 + rank):
            sync.piggyback("loss", torch.tensor(1.0 + rank))
            if step == 1:
                refused(lambda: sync.piggyback("new", torch.ones(2)), "'new' of shape [2] is new, and ranks that have")
            model([torch.ones(3)]).backward()
            assert sync.piggybacked()["loss"] == (1.5 if step == 0 else 2.0)
    sync.piggyback("new", torch.ones(2))
    model([torch.ones(3)]).backward()
    assert sync.piggybacked()["new"].tolist() == [1.0, 1.0]


@on_ranks(2, timeout=40.0)
def test_what_is_refused_inside_a_join(rank: int, world_size: int) -> None:
    """What cannot end well is refused where it begins, on every rank, and the loop goes on."""
    models = [Given([torch.ones(3)]) for _ in range(2)]
    first, second = (fastsync.attach(model) for model in models)
    for _ in range(2):
        with first.join():
            for each in (first, second):
                refused(each.join().__enter__, "join() was called inside another join()", kind=RuntimeError)
            second.use_group(None)
            for step in range(1 + rank):
                models[0]([torch.full((3,), 1.0 + rank)]).backward()
                assert models[0].weights[0].grad.tolist() == [2.0 if step else 1.5] * 3
                models[0].zero_grad()
    for sync in (first, second):
        sync.detach()


@on_ranks(2, shared_memory=False)
def test_a_join_after_one_whose_end_has_failed(rank: int, world_size: int) -> None:
    group, alone = dist.new_group(), dist.new_group([rank], use_local_synchronization=True)
    model, other = Fallible(), Fallible()
    sync = attach(model, process_group=group)
    second = attach(other, process_group=alone)
    with pytest.raises((RuntimeError, ArithmeticError)), sync.join():  # noqa: PT012
        loss_of(model, rank, 0).backward()
        model.fails = True
        dist.barrier()
        _C.close_connections(group)
        loss_of(model, rank, 1).backward()
    with second.join():
        loss_of(other, rank, 0).backward()
    assert second.stats().num_steps == 2, "of one batch and of the end"


@on_ranks(2)
def test_nobody_waits_for_ever(rank: int, world_size: int) -> None:
    """One that leaves its loop by an error keeps nobody waiting beyond the time-out."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = nn.Linear(5, 3)
    sync = fastsync.attach(model, process_group=group)
    if rank == 1:
        with pytest.raises(ArithmeticError), sync.join():
            raise ArithmeticError
        dist.barrier()
        return
    with pytest.raises(RuntimeError, match="rank 1"), sync.join():
        model(torch.full((2, 5), 1.0 + rank)).sum().backward()
    dist.barrier()
