"""all_reduce_gradients with sets of parameters that change; register_prepared, whichever way a trainer has wrapped."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.all_reduce import MAX_ENGINES
from fastsync.sync.ddp import CommHook
from fastsync.sync.fsdp import ShardedHandle
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.bitwise import assert_bitwise_equal
from tests.models import Mlp, batch
from tests.ranks import on_ranks
from tests.refused import refused


def _parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def _averages(parameters: list[Tensor], rank: int, world_size: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(rank + index))
    fastsync.all_reduce_gradients(parameters)
    for index, parameter in enumerate(parameters):
        assert parameter.grad.unique().tolist() == [(world_size - 1) / 2 + index]


@on_ranks(2, timeout=60)
def test_what_still_lives_on_one_rank_decides_nothing(rank: int, world_size: int) -> None:
    """Rank 1's garbage is collected late: what it still holds must not tell it what to forget."""
    model = _parameters(4, 3)
    held = []
    for num_new in (1, 15, 16, 17, MAX_ENGINES - 1, MAX_ENGINES, MAX_ENGINES + 1):
        _averages(model, rank, world_size)
        for _ in range(num_new):
            fast = _parameters(4, 3)
            _averages(fast, rank, world_size)
            if rank == 1:
                held.append(fast)
        _averages(model, rank, world_size)


@pytest.mark.usefixtures("one_rank")
def test_none_does_not_pass_for_a_parameter_that_is_gone() -> None:
    _averages(_parameters(4), 0, 1)
    refused(lambda: fastsync.all_reduce_gradients([None]), "number 0 is a NoneType")


@on_ranks(2)
def test_what_error_feedback_has_not_sent_stays_with_the_set(rank: int, world_size: int) -> None:
    """What one engine gives that is never forgotten, bit for bit, with other sets and compressions in between."""
    compression = fastsync.Compression("int8", error_feedback=True)
    lasting, expected = _parameters(1024, 256), _parameters(1024, 256)
    sync = fastsync.attach(expected, compression, overlap=False)
    for step in range(6):
        chosen = "bf16" if step == 3 else compression
        sync.compression = chosen
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for mine, theirs in zip(lasting, expected, strict=True):
            mine.grad = torch.randn(mine.numel(), generator=generator)
            theirs.grad = mine.grad.clone()
        sync.synchronize()
        fastsync.all_reduce_gradients(lasting, chosen)
        for index, (mine, theirs) in enumerate(zip(lasting, expected, strict=True)):
            assert_bitwise_equal(mine.grad, theirs.grad, f"step {step}, parameter {index}")
        (other,) = _parameters(128)
        other.grad = torch.full((128,), 1.0 + rank)
        fastsync.all_reduce_gradients([other], compression)


@on_ranks(2)
def test_a_call_before_any_backward_is_told(rank: int, world_size: int) -> None:
    """Once, on rank 0. Ranks without a gradient, and later steps without any, are as they should be."""
    for having in ([], [1]):
        parameters = _parameters(4, 3)
        if rank in having:
            parameters[1].grad = torch.ones(3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fastsync.all_reduce_gradients(parameters)
            for parameter in parameters:
                parameter.grad = None
            fastsync.all_reduce_gradients(parameters)
        told = [str(each.message) for each in said if "no rank has a gradient of any of these 2" in str(each.message)]
        assert len(told) == (rank == 0 and not having)


# ---- register_prepared ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_whatever_is_wrapped_is_registered(rank: int, world_size: int) -> None:
    torch._logging.set_logs(dynamo=logging.ERROR)  # it warns that it leaves out what DDP marks for profilers
    mesh = init_device_mesh("cpu", (world_size,))
    compiled = torch.compile(DistributedDataParallel(Mlp()), backend="eager")
    ways = [(DistributedDataParallel(Mlp()), CommHook), (compiled, CommHook)]
    for model, kind in [*ways, (fully_shard(Mlp(), mesh=mesh), ShardedHandle)]:
        handle = fastsync.register_prepared(model, "fp16")
        assert isinstance(handle, kind)
        model(batch(rank, 0)).sum().backward()
        assert handle.stats().num_steps == 1
    refused(lambda: fastsync.register_prepared(Mlp()), "pass what accelerator.prepare() returned")


@pytest.mark.parametrize("has_group", [True, False])
def test_one_rank_has_a_handle_too(has_group: bool, request: pytest.FixtureRequest) -> None:
    if has_group:
        request.getfixturevalue("one_rank")
    model = Mlp()
    handle = fastsync.register_prepared(model, "fp16")
    assert isinstance(handle, GradientSynchronizer)
    model(batch(0, 0)).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    assert handle.stats().num_steps == 1
    handle.load_state_dict(handle.state_dict())
    handle.detach()
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-6)
