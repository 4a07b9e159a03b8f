"""``shard_optimizer``: arguments, calls and parameters that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import fastsync
from fastsync.errors import SyncError
from tests.engine.sharded_trainings import (
    BOTH_WAYS,
    after_attach,
    assert_averages,
    attached,
    backward,
    in_both_ways,
    same,
    step,
    step_alike,
    twins,
    values,
)
from tests.ranks import on_ranks
from tests.refused import refused

REFUSED: list[Callable[[Any], Any]] = [
    lambda p: "AdamW",
    torch.optim.Adafactor,
    lambda p: AdamW(p, differentiable=True),
    lambda p: AdamW(p[1:]),
]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_arguments_that_are_refused(rank: int, world_size: int) -> None:
    """They leave nothing behind."""
    model, sync = after_attach()
    for make in REFUSED:
        refused(lambda: fastsync.shard_optimizer(sync, make(list(model.parameters()))), "optimizer:")
    flat = torch.zeros(6)
    for parameters in (
        [nn.Parameter(flat[:3]), nn.Parameter(flat[3:])],
        [nn.Parameter(torch.zeros(3, dtype=torch.complex64))],
        [nn.Parameter(torch.zeros(3, 4)[:, :2])],
    ):
        handle = fastsync.attach(parameters)
        refused(lambda: fastsync.shard_optimizer(handle, SGD(parameters, 0.1)), "parameter")
    assert_averages(model, rank, world_size)
    model, sync = after_attach()
    optimizer = SGD(model.parameters(), 0.1)
    refused(lambda: fastsync.shard_optimizer(model, optimizer), "sync:")  # type: ignore[arg-type]
    joined = after_attach()[1]
    with joined.join(), pytest.raises(ValueError, match=r"sync: inside join\(\)"):
        fastsync.shard_optimizer(joined, optimizer)
    fastsync.shard_optimizer(sync, optimizer)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    sync.detach()
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    sync = fastsync.attach(model)
    assert_averages(model, rank, world_size)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    model.zero_grad()
    assert_averages(model, rank, world_size)


@in_both_ways
def test_a_rank_without_the_optimizer_is_named(rank: int, world_size: int) -> None:
    """In its first backward."""
    model, sync = after_attach()
    optimizer, loss = SGD(model.parameters(), 0.1), model(torch.ones(1, 5)).sum()
    with pytest.raises(ValueError, match="optimizer SGD of parameters 0 1 2 3"):
        fastsync.shard_optimizer(sync, optimizer) if rank == 0 else loss.backward()


@in_both_ways
def test_ranks_with_different_optimizers_may_call_it_again(rank: int, world_size: int) -> None:
    for goes_on_without in (True, False):
        model, sync = after_attach()
        other = (SGD, AdamW)[rank](model.parameters(), lr=0.1)
        refused(lambda: fastsync.shard_optimizer(sync, other), "optimizer SGD of parameters 0 1 2 3", "rank 1: ")
        if goes_on_without:
            assert_averages(model, rank, world_size)
    optimizer = SGD(model.parameters(), lr=0.1)
    fastsync.shard_optimizer(sync, optimizer)
    plain = after_attach()[0]
    step_alike([(model, optimizer), (plain, SGD(plain.parameters(), lr=0.1))], rank)


@in_both_ways
def test_what_was_set_between_attach_and_shards_counts(rank: int, world_size: int) -> None:
    """Also gradients of ``no_sync``, and residuals that were loaded."""
    states: list[dict[str, Any]] = []
    trained = []
    for loads in (False, True):
        for shards_first in (True, False):
            model, optimizer, sync = attached(shared=shards_first, compression="int8+ef")
            sync.set_weight(1.0 + rank)
            with sync.no_sync():
                model(torch.full((1, 5), 3.0 + rank)).sum().backward()
            sync.piggyback("rank", torch.tensor([float(rank)]))
            if loads:
                sync.load_state_dict(states[0])
            if not shards_first:
                fastsync.shard_optimizer(sync, optimizer)
            step(model, optimizer, rank)
            assert sync.piggybacked()["rank"].item() == 0.5
            step(model, optimizer, rank, 1)
            trained.append(values(model))
            states.append(sync.state_dict())
    same(trained[0], trained[1])
    same(trained[2], trained[3])
    assert not torch.equal(trained[0][0], trained[2][0])


@in_both_ways
def test_calls_that_are_refused(rank: int, world_size: int) -> None:
    trainings = (model, optimizer, sync), _ = twins()
    with pytest.raises(RuntimeError, match=r"join\(\) does not work with shard_optimizer"), sync.join():
        pass
    refused(lambda: sync.use_group(dist.new_group()), "use_group() does not work", kind=RuntimeError)
    refused(lambda: attached(op="sum"), "sync:")
    model(torch.full((1, 5), torch.inf if rank == 0 else 1.0)).sum().backward()
    clip = partial(fastsync.clip_grad_norm_, sync, 1e-6)
    refused(lambda: clip(error_if_nonfinite=True), "the norm of the gradients is", kind=RuntimeError)
    optimizer.zero_grad()
    backward(model, rank)
    refused(lambda: clip(norm_type=1.0), "norm_type 1.0")
    with sync.no_sync(), pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
        optimizer.step()
    clip()
    refused(clip, "each synchronised backward", kind=RuntimeError)
    optimizer.zero_grad()
    step_alike(trainings, rank)  # the clip is forgotten
    backward(model, rank)
    model[2].bias.data = torch.zeros(3)
    refused(lambda: optimizer.step(), "parameter 2.bias left the memory", kind=RuntimeError)


@on_ranks(4, cases=BOTH_WAYS)
def test_two_levels_are_refused(rank: int, world_size: int, shared_memory: bool) -> None:
    """Where ranks share memory in the first backward, else at once."""
    levels = fastsync.Compression("none", ranks_per_node=2)
    if shared_memory:
        model, _, _ = attached(compression=levels)
        for _ in range(2):
            refused(lambda: backward(model, rank), "shard_optimizer takes a ranks_per_node that is", kind=RuntimeError)
        return
    model, sync = after_attach(compression=levels)
    refused(lambda: fastsync.shard_optimizer(sync, AdamW(model.parameters())), "ranks_per_node=2 does not go with")
    assert_averages(model, rank, world_size)
    model, optimizer, sync = attached()
    refused(lambda: setattr(sync, "compression", levels), "ranks_per_node=2 does not go with")
    sync.compression = fastsync.Compression("bf16", ranks_per_node=4)  # a single node
    step(model, optimizer, rank)


@on_ranks(2, shared_memory=False)
def test_ranks_that_ask_for_the_state_of_different_parameters(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    if rank == 1:
        del optimizer.state[model[0].weight]
    with pytest.raises(SyncError, match="ranks have state of different parameters") as raised:
        optimizer.state_dict()
    assert raised.value.rank == 1


@in_both_ways
def test_an_optimizer_with_other_parameters_is_told(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    backward(model, rank)
    refused(lambda: optimizer.step(), "the optimizer got other parameters", kind=RuntimeError)
    if rank == 0:
        del optimizer.param_groups[1]
    else:
        optimizer.param_groups.clear()
    backward(model, rank)
    with pytest.raises(RuntimeError, match="rank 1 refuses" if rank == 0 else "the optimizer got other parameters"):
        optimizer.step()
