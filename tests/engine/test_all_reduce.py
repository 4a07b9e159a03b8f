"""all_reduce_gradients with sets of parameters that change: which engine serves, and what error feedback keeps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.all_reduce import _MAX_REDUCERS
from tests.bitwise import assert_bitwise_equal
from tests.models import group_of_one
from tests.ranks import on_ranks


def _parameter(numel: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel))


def _averages(parameters: list[Tensor], rank: int, world_size: int, compression: str = "none") -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(rank + index))
    fastsync.all_reduce_gradients(parameters, compression)
    for index, parameter in enumerate(parameters):
        assert parameter.grad.unique().tolist() == [(world_size - 1) / 2 + index]


@on_ranks(2, timeout=60)
def test_what_still_lives_on_one_rank_decides_nothing(rank: int, world_size: int) -> None:
    """Rank 1's garbage is collected late: what it still holds must not tell it what to forget."""
    model = [_parameter(), _parameter(3)]
    held = []
    for num_new in (1, 15, 16, 17, _MAX_REDUCERS - 1, _MAX_REDUCERS, _MAX_REDUCERS + 1):
        _averages(model, rank, world_size)
        for _ in range(num_new):
            fast = [_parameter(), _parameter(3)]
            _averages(fast, rank, world_size)
            if rank == 1:
                held.append(fast)
        _averages(model, rank, world_size)


def test_none_does_not_pass_for_a_parameter_that_is_gone() -> None:
    with group_of_one():
        _averages([_parameter()], 0, 1)
        with pytest.raises(ValueError, match="number 0 is a NoneType"):
            fastsync.all_reduce_gradients([None])


@on_ranks(2)
def test_what_error_feedback_has_not_sent_follows_the_parameter(rank: int, world_size: int) -> None:
    """What one engine gives that is never forgotten, bit for bit, whatever sets the parameters come in."""
    compression = fastsync.Compression("int8", error_feedback=True)
    numels = (1024, 256)  # whole blocks, so that the parameters' are the same in every set
    lasting = [_parameter(numel) for numel in numels]
    expected = [_parameter(numel) for numel in numels]
    syncs = [fastsync.attach([parameter], compression, overlap=False) for parameter in expected]
    held = []
    for step in range(3 * _MAX_REDUCERS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        grads = [torch.randn(numel, generator=generator) for numel in numels]
        for each in (lasting, expected):
            for parameter, grad in zip(each, grads, strict=True):
                parameter.grad = grad.clone()
        for sync in syncs:
            sync.synchronize()
        fast = _parameter(128)
        fast.grad = torch.ones(128)
        if rank == 1:
            held.append(fast)
        if step % 5 == 0:
            together = [lasting[:1], lasting[1:]]
        elif step % 5 == 1:
            together = [lasting]
        elif step % 5 == 2:
            together = [[lasting[1], fast], lasting[:1]]
        elif step % 5 == 3:
            together = [[*lasting, fast]]
        else:  # after so many others that all are forgotten
            for _ in range(_MAX_REDUCERS):
                other = _parameter(128)
                other.grad = torch.ones(128)
                fastsync.all_reduce_gradients([other], compression)
            together = [lasting]
        for parameters in together:
            fastsync.all_reduce_gradients(parameters, compression)
        for index, (mine, theirs) in enumerate(zip(lasting, expected, strict=True)):
            assert_bitwise_equal(mine.grad, theirs.grad, f"step {step}, parameter {index}")
        dist.barrier()
