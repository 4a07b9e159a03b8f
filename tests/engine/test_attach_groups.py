"""An attached engine that goes on in another process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastsync
from fastsync.compression import parse_compression
from tests.models import SMALL_BUCKETS, Given, assert_same_on_all_ranks, grads_of, random_grads
from tests.ranks import on_ranks

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
        of_sums = 0 if residual["of_sums"] is None else residual["of_sums"]
        total += (residual["own"] / num_ranks + of_sums).sum()
    dist.all_reduce(total, group=group)
    return total


@pytest.mark.parametrize(("wire", "shared_memory"), [("fp16", True), ("int8+ef", True), ("int8+ef", False)])
@on_ranks(3, parametrized=("shared_memory",))
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
    for each, same in zip(got, zip(*everyone, strict=True), strict=True):
        torch.testing.assert_close(each, torch.stack(same).mean(dim=0))
    sync.detach()
    with pytest.raises(RuntimeError, match=r"use_group\(\) was called after detach\(\)"):
        sync.use_group(pair)


@on_ranks(2)
def test_models_that_differ_are_refused(rank: int, world_size: int) -> None:
    """All are told, and their backwards stay synchronised."""
    alone = [dist.new_group([other]) for other in range(world_size)]
    model = torch.nn.ParameterDict({"left" if rank == 0 else "right": torch.nn.Parameter(torch.ones(3))})
    sync = fastsync.attach(model, "fp16", process_group=alone[rank])
    next(model.parameters()).sum().backward()
    with pytest.raises(ValueError, match="the ranks do not agree on what to synchronise"):
        sync.use_group(None)
    with pytest.raises(ValueError, match="the ranks do not agree on what to synchronise"):
        next(model.parameters()).sum().backward()


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
        with pytest.raises(ValueError, match="ranks_per_node=2 does not divide the process group's 3 ranks"):
            sync.use_group(trio)
    assert str(sync.state_dict()) == str(before)
    assert_same_on_all_ranks(_step(model, rank, 1))
    assert sync.stats().num_steps == 2
