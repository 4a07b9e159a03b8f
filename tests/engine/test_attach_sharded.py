"""Models whose parameters are sharded: refused by name, before attach and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import Mlp, batch
from tests.ranks import run_ranks

CALLS: list[Callable[[nn.Module], Any]] = [
    fastsync.attach,
    lambda model: fastsync.attach(model.parameters()),
    fastsync.all_reduce_gradients,
    fastsync.register_comm_hook,
    fastsync.check_consistency,
]


def _mesh(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,))


def _fsdp1_is_refused(rank: int, world_size: int) -> None:
    for use_orig_params in (True, False):
        model = FullyShardedDataParallel(Mlp(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for call in CALLS:
            with pytest.raises(ValueError, match=r"parameter .* is sharded by FullyShardedDataParallel.* averages"):
                call(model)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def _fsdp2_is_refused(rank: int, world_size: int) -> None:
    model = fully_shard(Mlp(), mesh=_mesh(world_size))
    for call in CALLS:
        with pytest.raises(ValueError, match=r"parameter .* is a DTensor.*fully_shard"):
            call(model)
    partly = nn.Sequential(nn.Linear(2, 2), fully_shard(nn.Linear(2, 2), mesh=_mesh(world_size)))
    with pytest.raises(ValueError, match=r"parameter 1\.weight is a DTensor"):
        fastsync.attach(partly)


def _sharding_after_attach_is_noticed(rank: int, world_size: int) -> None:
    mesh = _mesh(world_size)
    shard: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: fully_shard(model, mesh=mesh),
        lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ]
    message = r"the model has other parameters .*call fully_shard"
    for way in shard:
        model = Mlp()
        sync = fastsync.attach(model)
        sharded = way(model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(batch(rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        with pytest.raises(RuntimeError, match=message):
            sync.synchronize()
        with pytest.raises(RuntimeError, match=message):
            fastsync.clip_grad_norm_(sync, 1.0)
        sync.detach()
        optimizer.step()  # as FSDP does by itself
    dist.barrier()


def _what_is_not_sharded_is_let_through(rank: int, world_size: int) -> None:
    """Optimizers of other models before the first backward, and models that were only changed in part."""
    model, other = Mlp(), Mlp()
    sync = fastsync.attach(model)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    other(batch(0, 0)).sum().backward()
    of_other.step()
    model.layers[0].weight = nn.Parameter(torch.zeros(64, 32))
    model(batch(rank, 0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert sync.stats().num_steps == 1
    loose = [nn.Parameter(torch.ones(2))]
    fastsync.attach(loose)
    loose[0].sum().backward()
    torch.optim.SGD(loose).step()
    ddp = DistributedDataParallel(Mlp())
    fastsync.register_comm_hook(ddp)
    ddp(batch(rank, 0)).sum().backward()
    torch.optim.SGD(ddp.parameters()).step()


@pytest.mark.parametrize(
    "check",
    [
        _fsdp1_is_refused,
        _fsdp2_is_refused,
        _sharding_after_attach_is_noticed,
        _what_is_not_sharded_is_let_through,
    ],
)
def test_sharded_models(check: Callable[[int, int], None]) -> None:
    run_ranks(check, 2)
