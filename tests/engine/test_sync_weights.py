"""``sync_weights``: all ranks take rank 0's parameters and buffers, and nothing else changes."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.distributed import as_bytes
from fastsync.sync.handles_in_use import groups_of
from tests.models import SMALL_BUCKETS, assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused


class Model(nn.Module):
    """Frozen and narrow parameters, and buffers of several dtypes, one of which no checkpoint has."""

    def __init__(self, *, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 300))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("unsaved", torch.randn(2, dtype=torch.float64), persistent=False)
        self.tied = self.layers[2].bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean() + self.narrow.float().sum() * inputs.mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * number + rank))).backward()
    if not isinstance(model, DistributedDataParallel) and not groups_of(model.parameters()):
        fastsync.all_reduce_gradients(model, "int8+ef")
    optimizer.step()


def bits(module: nn.Module) -> dict[str, list[int]]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: as_bytes(tensor.detach()).tolist() for name, tensor in tensors}


@on_ranks(2, cases={"entry_point": ["attach", "hook", "plain DDP", "all_reduce_gradients"]})
def test_all_take_what_rank_0_alone_has_loaded(rank: int, world_size: int, entry_point: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Model()
    handle = None
    if entry_point == "attach":
        handle = fastsync.attach(model, "int8+ef", bucket_cap_mb=SMALL_BUCKETS)
    elif entry_point != "all_reduce_gradients":
        model = DistributedDataParallel(model)
    if entry_point == "hook":
        handle = fastsync.register_comm_hook(model, "int8+ef")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, optimizer, rank, number)

    loaded: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if rank == 0:  # loads a checkpoint
        torch.manual_seed(1)
        loaded.load_state_dict(Model().state_dict())
        loaded.unsaved.fill_(0.1)
    expected = [bits(loaded)]
    dist.broadcast_object_list(expected)
    assert (bits(loaded) == expected[0]) == (rank == 0)
    before = copy.deepcopy(optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in loaded.parameters()]
    unsent = copy.deepcopy(handle.state_dict()) if handle else {"residuals": {}}
    assert bool(unsent["residuals"]) == (handle is not None)

    fastsync.sync_weights(model)
    assert bits(loaded) == expected[0]
    assert not loaded.frozen.requires_grad
    assert loaded.tied is loaded.layers[2].bias
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in loaded.parameters() if p.grad is not None],
                               [grad for grad in gradients if grad is not None], rtol=0, atol=0)  # fmt: skip
    if handle:
        torch.testing.assert_close(handle.state_dict(), unsent, rtol=0, atol=0)
    for number in range(3, 6):
        step(model, optimizer, rank, number)
    assert_same_on_all_ranks(list(loaded.parameters()))
    assert bits(loaded) != expected[0]


@on_ranks(3)
def test_the_group_is_that_of_the_gradients(rank: int, world_size: int) -> None:
    """Rank 0 is alone; otherwise rank 1 and rank 2 would take its weights."""
    groups = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
    both = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    one, other = both
    fastsync.attach(one.parameters(), process_group=groups[rank > 0])
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.fill_(1.0 + rank)
    fastsync.sync_weights(one)
    assert [p.unique().tolist() for p in both.parameters()] == [[min(rank, 1) + 1.0]] * 2 + [[rank + 1.0]] * 2
    fastsync.sync_weights(one, process_group=dist.group.WORLD)
    assert [p.unique().tolist() for p in both.parameters()] == [[1.0]] * 2 + [[rank + 1.0]] * 2
    fastsync.attach(other)
    refused(lambda: fastsync.sync_weights(both), "module:")
    fastsync.sync_weights(both, process_group=init_device_mesh("cpu", (world_size,)))
    fastsync.check_consistency(both)


@on_ranks(2)
def test_other_models_are_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    for model in (
        Model(width=7 + rank),
        nn.Linear(2, 2).to(torch.float64 if rank else torch.float32),
        nn.Linear(2, 2, bias=rank > 0),
    ):
        before = bits(model)
        refused(lambda: fastsync.sync_weights(model), "do not agree on the weights", "rank 0: ", "rank 1: ")
        assert bits(model) == before
    fastsync.sync_weights(nn.ReLU())  # has none
    compiled = nn.Linear(2, 2)
    fastsync.sync_weights(torch.compile(compiled) if rank else compiled)
    fastsync.check_consistency(compiled)


@on_ranks(2)
def test_what_it_cannot_serve_is_refused(rank: int, world_size: int) -> None:
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world_size,)))
    refused(lambda: fastsync.sync_weights(sharded), "module:")
    refused(lambda: fastsync.sync_weights([nn.Linear(2, 2)]), "module:")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^process_group: expected a ProcessGroup"):
        fastsync.sync_weights(nn.Linear(2, 2), process_group="dp")  # type: ignore[arg-type]


@on_ranks(2, timeout=60)
def test_a_rank_that_calls_it_alone_is_told(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"^sync_weights: on rank 0 of 2 the other ranks did not all come in tim"
        ):
            fastsync.sync_weights(nn.Linear(2, 2), process_group=group)
    dist.barrier()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_keeps_what_it_has() -> None:
    model = Model()
    fastsync.attach(model)
    before = bits(model)
    fastsync.sync_weights(model)
    assert bits(model) == before


@pytest.mark.usefixtures("one_rank")
def test_a_sparse_buffer_is_refused_and_may_be_left_to_each_rank() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    for call in (fastsync.sync_weights, fastsync.check_consistency, fastsync.attach):
        refused(lambda: call(model), "adjacency has the layout torch.sparse_coo, and")
    fastsync.attach(model, ignored_states=[model.adjacency])
    fastsync.sync_weights(model)
    fastsync.check_consistency(model)
