"""A small model with ``shard_optimizer``, and the same without: steps of both, and what has to be alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.ranks import on_ranks

BOTH_WAYS = {"shared_memory": [True, False]}
in_both_ways = on_ranks(2, cases=BOTH_WAYS)
"""Makes a test of what each of two ranks does that share memory, and then of what two do that do not."""


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 3))


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(inputs.to(model[0].weight.dtype)).square().mean()


def step(model: nn.Module, optimizer: Optimizer, rank: int, number: int = 0) -> None:
    loss_of(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def attached(shared: bool = True, **options: Any) -> tuple[nn.Module, AdamW, GradientSynchronizer]:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    sync = fastsync.attach(model, **options)
    if shared:
        fastsync.shard_optimizer(sync, optimizer)
    return model, optimizer, sync


def twins(**options: Any) -> list[tuple[nn.Module, AdamW, GradientSynchronizer]]:
    """A training with shards, and the same one in which every rank steps."""
    return [attached(**options), attached(shared=False, **options)]


def step_alike(trainings: Any, rank: int, number: int = 0) -> None:
    """Takes a step of each, after which all have the same weights."""
    for model, optimizer, *_ in trainings:
        step(model, optimizer, rank, number)
    assert_alike(trainings)


def assert_alike(trainings: Any) -> None:
    for model, *_ in trainings[1:]:
        same(values(trainings[0][0]), values(model))


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((1, 5), 1.0 + rank)).sum().backward()


def after_attach(**options: Any) -> tuple[nn.Module, GradientSynchronizer]:
    model = two_layers()
    return model, fastsync.attach(model, **options)


def assert_averages(model: nn.Module, rank: int, world_size: int) -> None:
    """Raises AssertionError unless ``.grad`` is the mean over ranks, as with ``attach`` alone."""
    each = [copy.deepcopy(model) for _ in range(world_size)]
    for of_rank, trained in [*enumerate(each), (rank, model)]:
        trained(torch.full((1, 5), 1.0 + of_rank)).sum().backward()
    for name, parameter in model.named_parameters():
        mean = torch.stack([of_rank.get_parameter(name).grad for of_rank in each]).double().mean(0)
        torch.testing.assert_close(parameter.grad.double(), mean, rtol=1e-6, atol=1e-6)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def held_bytes(optimizer: Optimizer) -> int:
    """The bytes of state that this rank has for itself."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return sum(each.nbytes for each in tensors if not each.is_meta and each.dim() > 0)
