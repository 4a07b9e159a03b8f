"""PyTorch's Join over an attached engine, alone and beside an optimizer that has collectives of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

import fastsync
from tests.models import SMALL_BUCKETS, assert_same_on_all_ranks
from tests.ranks import on_ranks, run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, rank: int, step: int, is_reentrant: bool = False) -> Tensor:
    inputs = _inputs(rank, step).requires_grad_()
    outputs = checkpoint(model, inputs, use_reentrant=True) if is_reentrant else model(inputs)
    return outputs.square().mean()


def _alone(num_steps: list[int]) -> list[Tensor]:
    """What one process makes of the same means."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(max(num_steps)):
        active = [rank for rank in range(len(num_steps)) if step < num_steps[rank]]
        everyone = [torch.autograd.grad(_loss(model, rank, step), list(model.parameters())) for rank in active]
        for parameter, *grads in zip(model.parameters(), *everyone, strict=True):
            parameter.grad = torch.stack(grads).sum(dim=0) / len(active)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _joins(rank: int, world_size: int, num_steps: list[int], overlap: bool, is_reentrant: bool) -> None:
    model = _model()
    sync = fastsync.attach(model, overlap=overlap, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([sync, optimizer], divide_by_initial_world_size=False):
        for step in range(num_steps[rank]):
            optimizer.zero_grad()
            with sync.no_sync():
                (0 * _loss(model, rank, step)).backward()
            _loss(model, rank, step, is_reentrant).backward()
            if not overlap:
                sync.synchronize()
            optimizer.step()
    assert sync.stats().num_steps == max(num_steps)
    rtol = 0 if world_size == 2 else 1e-4  # two thirds of a third are not quite a half
    for parameter, expected in zip(model.parameters(), _alone(num_steps), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=rtol, atol=rtol)
    assert_same_on_all_ranks(list(model.parameters()))
    for _ in range(2):  # and afterwards it is as before, by either way
        with sync.join():
            _loss(model, rank, 99).backward()
            if not overlap:
                sync.synchronize()
            assert_same_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("num_steps", "overlap", "is_reentrant"),
    [([4, 2], True, False), ([0, 3], False, False), ([1, 3], True, True), ([2, 4, 3], True, False)],
)
def test_uneven_inputs(num_steps: list[int], overlap: bool, is_reentrant: bool) -> None:
    run_ranks(_joins, len(num_steps), num_steps, overlap, is_reentrant)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_early_termination(rank: int, world_size: int) -> None:
    model = _model()
    sync = fastsync.attach(model)
    message = "Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one rank that exhausted inputs"

    def train() -> None:
        with Join([sync], throw_on_early_termination=True):
            for step in range(2 + rank):
                _loss(model, rank, step).backward()

    with pytest.raises(RuntimeError, match=message):
        train()
    assert sync.stats().num_steps == 2
    model.zero_grad()
    for _ in range(2):
        _loss(model, rank, 9).backward()
    assert_same_on_all_ranks([p.grad for p in model.parameters()])
    with sync.join():
        for step in range(1 + rank):
            _loss(model, rank, step).backward()
    assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
def test_without_uneven_inputs(rank: int, world_size: int) -> None:
    model = _model()
    sync = fastsync.attach(model)
    with pytest.raises(ValueError, match="divide_by_initial_world_size: fastsync's means are over those that"):
        Join([sync], divide_by_initial_world_size=True)
    with Join([sync], enable=False):
        _loss(model, rank, 0).backward()
    assert_same_on_all_ranks([p.grad for p in model.parameters()])
    sync.detach()
