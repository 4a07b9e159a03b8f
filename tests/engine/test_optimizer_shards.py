"""``shard_optimizer``: the bits of attach and torch's own step on every rank, in both of its ways.

Ranks that share memory have one copy of everything. Others have all parameters, and the state of their own shard.
"""

from __future__ import annotations

import itertools
import warnings
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import fastsync
from fastsync import _C
from tests.engine.optimizer_shards import FURTHER, OF_WHOLE, train_both
from tests.engine.sharded_trainings import (
    BOTH_WAYS,
    assert_alike,
    attached,
    backward,
    held_bytes,
    in_both_ways,
    loss_of,
    same,
    step,
    step_alike,
    twins,
    two_layers,
    values,
)
from tests.engine.test_hosts import ALTERNATING, PAIRS, THREE, UNEQUAL, Nodes, run_on_hosts
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@on_ranks(cases=BOTH_WAYS)
def test_steps_are_those_of_every_rank(rank: int, world_size: int) -> None:
    """Random trainings; of two ranks also by optimizers that need whole tensors, of three by all that there are."""
    for seed in range(6 if world_size < 4 else 4):
        train_both(rank, world_size, 10 * world_size + seed, 6)
    further = {2: [*OF_WHOLE] * 2, 3: [*FURTHER, *OF_WHOLE]}
    for seed, optimizer in enumerate(further.get(world_size, [])):
        train_both(rank, world_size, 200 + seed, 4, optimizer)


@pytest.mark.parametrize("nodes", [[[0], [1]], PAIRS, ALTERNATING, UNEQUAL, THREE], ids=str)
def test_each_host_steps_its_own_copy(nodes: Nodes) -> None:
    run_on_hosts(train_on_hosts, nodes)


def train_on_hosts(rank: int, world_size: int, nodes: Nodes) -> None:
    for seed in range(2):
        train_both(rank, world_size, 10 * world_size + seed, 4)
        train_both(rank, world_size, 10 * world_size + seed, 3, "Muon")
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    assert_same_on_all_ranks(values(model))
    backward(model, rank)
    assert_same_on_all_ranks(list(sync.averaged_gradients().values()))
    stats = sync.stats()
    has_rank_each = len(nodes) == world_size
    assert (stats.transport, stats.num_hosts) == (("process_group", 1) if has_rank_each else ("two_level", len(nodes)))


# ---- what is one, and what is each rank's own -----------------------------------------------------------------------


@on_ranks(2)
def test_parameters_and_state_are_in_one_memory(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    dist.barrier()
    weight = model[0].weight
    if rank == 1:
        weight.data.fill_(5.0)
        optimizer.state[weight]["exp_avg"].fill_(7.0)
    dist.barrier()
    assert weight.eq(5.0).all()
    assert optimizer.state[weight]["exp_avg"].eq(7.0).all()


@on_ranks(2)
def test_where_memory_has_no_room_for_the_parameters_each_rank_has_its_own(rank: int, world_size: int) -> None:
    shared, calls = _C.SharedTensors, itertools.count()

    def has_room_for_one(*args: Any) -> _C.SharedTensors:
        if next(calls) > 0:
            error = ValueError("the ranks cannot have one copy")
            error.reason = "no room"  # type: ignore[attr-defined]
            raise error
        return shared(*args)

    with (
        patch("fastsync._C.SharedTensors", side_effect=has_room_for_one),
        warnings.catch_warnings(record=True) as warned,
    ):
        model, optimizer, sync = attached()
    assert len(warned) == (1 if rank == 0 else 0)
    for each in warned:
        assert str(each.message).startswith("fastsync.shard_optimizer: ranks share no memory, because no room. So")
        assert each.filename == attached.__code__.co_filename
    trainings = [(model, optimizer, sync), attached(shared=False)]
    for number in range(3):
        step_alike(trainings, rank, number)
    assert trainings[1][2].stats().transport == "shared_memory", "gradients alone would have room"
    assert optimizer.state[model[0].weight]["exp_avg"].is_meta


@in_both_ways
def test_gradients_stay_this_rank_s_own(rank: int, world_size: int) -> None:
    (model, optimizer, sync), (plain, _, of_plain) = twins()
    for each in (model, plain):
        backward(each, rank)
    own, kept = model[0].weight.grad.clone(), model[0].weight.grad
    theirs = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(theirs, own)
    assert not torch.equal(*theirs)
    same(sync.averaged_gradients(), {name: parameter.grad for name, parameter in plain.named_parameters()})
    same(sync.grad_stats().grad_norm.item(), of_plain.grad_stats().grad_norm.item())
    optimizer.step()
    assert model[0].weight.grad is kept
    same(kept, own)
    before = values(model)  # what all ranks drop is not stepped
    backward(model, rank)
    model[0].weight.grad = None
    optimizer.step()
    same(model[0].weight.data, before[0])
    assert not torch.equal(model[2].weight, before[2])


@in_both_ways
def test_kept_gradients_count_again(rank: int, world_size: int) -> None:
    """Without zero_grad a backward adds to ``.grad``, and so do the means; what it does not reach counts as it was."""
    model, plain = (nn.ParameterList(torch.zeros(3) for _ in range(2)) for _ in range(2))
    optimizer = SGD(model.parameters(), 1.0)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    plain_optimizer = SGD(plain.parameters(), 1.0)
    fastsync.attach(plain)
    for number in range(3):
        for each, own in ((model, optimizer), (plain, plain_optimizer)):
            sum((weight * (4.0 * rank + 2.0)).sum() for weight in list(each)[number % 2 :]).backward()
            own.step()
        same(values(model), values(plain))


@in_both_ways
def test_other_parameters_of_the_optimizer_are_stepped_as_ever(rank: int, world_size: int) -> None:
    model, own, empty = two_layers(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    model.register_parameter("empty", empty)
    optimizer = SGD([{"params": model.parameters()}, {"params": [own]}], lr=1.0)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    (model(torch.full((1, 5), 1.0 + rank)).sum() + (rank * own).sum() + empty.sum()).backward()
    optimizer.step()
    assert own.tolist() == [1.0 - rank] * 3


@on_ranks(3, shared_memory=False)
def test_without_shared_memory_a_rank_has_the_state_of_its_shard(rank: int, world_size: int) -> None:
    """And both halves of a step send the bytes of an all-reduce."""
    model, num_values = nn.Linear(300, 100), 300 * 100 + 100
    optimizer = AdamW(model.parameters())
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    model(torch.full((1, 300), 1.0 + rank)).sum().backward()
    optimizer.step()
    assert held_bytes(optimizer) == 0
    assert abs(held_bytes(sync._optimizer_shards._pieces.inner) / (8 * num_values) - 1 / 3) < 0.02
    stats = sync.stats()
    of_all_reduce = 2 * (world_size - 1) / world_size * 4 * num_values
    assert of_all_reduce < stats.wire_bytes + stats.parameter_wire_bytes < 1.02 * of_all_reduce
    assert sum(each.nbytes for each in optimizer.state_dict()["state"][0].values()) == 8 * 300 * 100 + 4
    assert optimizer.state[model.weight]["exp_avg"].is_meta


@on_ranks(2, shared_memory=False)
def test_a_rank_that_asks_alone_for_the_state_is_told(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    model, optimizer, _ = attached(process_group=group)
    step(model, optimizer, rank)
    if rank == 0:
        refused(lambda: optimizer.state_dict(), "as state_dict() and detach() do on every rank,", kind=RuntimeError)
    dist.barrier()


# ---- freezing, and other shards -------------------------------------------------------------------------------------


@on_ranks(2, cases=BOTH_WAYS | {"overlap": [True, False]})
def test_frozen_parameters_and_another_compression(rank: int, world_size: int, overlap: bool) -> None:
    """The shards are others afterwards, and the state is not lost."""
    trainings = twins(overlap=overlap)
    for number in range(12):
        for model, optimizer, sync in trainings:
            model[0].weight.requires_grad_(number not in (3, 4, 5))
            if number == 8:
                sync.compression = fastsync.Compression("int8", algorithm="two_shot")
            loss_of(model, rank, number).backward()
            if not overlap:
                sync.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(trainings)
    same(*(optimizer.state_dict()["state"] for _, optimizer, _ in trainings))


@in_both_ways
def test_what_no_rank_has_is_not_in_the_norm(rank: int, world_size: int) -> None:
    """Error feedback sends residuals in its place, and ranks may have kept a gradient of an earlier step."""
    model = nn.ParameterList(torch.ones(300) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=0.1)
    sync = fastsync.attach(model, "int4+ef")
    fastsync.shard_optimizer(sync, optimizer)
    noise = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    (model[0] * noise + model[1] * noise).sum().backward()
    optimizer.step()
    model[0].grad = None
    if rank == 0:
        model[1].grad = None
    model[0].sum().backward()
    assert abs(sync.grad_stats().grad_norm.item() - 300**0.5) < 2.0
    assert sync.averaged_gradients().keys() == {"0"}


@in_both_ways
def test_means_of_a_bucket_in_several_chunks(rank: int, world_size: int) -> None:
    model = nn.ParameterList([torch.zeros(size) for size in (1_500_001, 70, 900_000)])
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, SGD(model.parameters(), 0.5))
    numbers = [torch.arange(each.numel()) % 97.0 for each in model]
    sum((each * number * (1 + 2 * rank)).sum() for each, number in zip(model, numbers, strict=True)).backward()
    same(list(sync.averaged_gradients().values()), [2 * number for number in numbers])
