"""all_reduce_gradients with sets of parameters that change: which engine serves, and what error feedback keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastsync
from fastsync.all_reduce import MAX_ENGINES
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
    for num_new in (1, 15, 16, 17, MAX_ENGINES - 1, MAX_ENGINES, MAX_ENGINES + 1):
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
def test_what_error_feedback_has_not_sent_stays_with_the_set(rank: int, world_size: int) -> None:
    """What one engine gives that is never forgotten, bit for bit, with other sets and compressions in between."""
    compression = fastsync.Compression("int8", error_feedback=True)
    lasting, expected = [_parameter(1024), _parameter(256)], [_parameter(1024), _parameter(256)]
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
        other = _parameter(128)
        other.grad = torch.ones(128)
        fastsync.all_reduce_gradients([other], compression)
