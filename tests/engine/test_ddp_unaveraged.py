"""Gradients that DDP hands to nobody, layers in another order, and models that share a state and a backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.ddp import HookState
from tests.models import Mlp, assert_same_on_all_ranks, batch
from tests.ranks import on_ranks
from tests.refused import refused


def _loss(model: Any, rank: int, number: int) -> Tensor:
    return model(batch(rank, number)).square().mean()


# ---- gradients that no rank has averaged -----------------------------------------------------------------------------


@on_ranks(2, cases={"kind": ["always", "some steps", "another dtype"]})
def test_a_backward_past_the_wrapper(rank: int, world_size: int, kind: str) -> None:
    model = Mlp()
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind != "always":
        _loss(ddp, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "another dtype":
        model.to(torch.float64)
        model(batch(rank, 1).double()).square().mean().backward()
    else:
        _loss(ddp.module, rank, 2).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    refused(lambda: optimizer.step(), "no rank has averaged", kind=RuntimeError)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    if kind != "another dtype":  # the way out
        optimizer.zero_grad()
        _loss(ddp, rank, 3).backward()
        optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
def test_a_backward_past_the_wrapper_after_a_sync(rank: int, world_size: int) -> None:
    """It cannot be told from a regulariser's, but the weights differ afterwards."""
    model = Mlp()
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(ddp, rank, 0).backward()
    _loss(ddp.module, rank, 1).backward()
    optimizer.step()
    refused(lambda: _loss(ddp, rank, 2).backward(), "the ranks hold different weights", kind=RuntimeError)


@on_ranks(2)
def test_a_backward_with_the_same_gradients_on_all_ranks(rank: int, world_size: int) -> None:
    model = Mlp()
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        _loss(ddp, rank, number).backward()
        torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum().backward()
        optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


def _average_by_hand(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


@on_ranks(2)
def test_gradients_averaged_by_hand(rank: int, world_size: int) -> None:
    """After no_sync, or after a backward past the wrapper. The last step forgets it."""
    model = Mlp()
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        with ddp.no_sync() if number % 2 else nullcontext():
            _loss(ddp if number < 4 else ddp.module, rank, number).backward()
        if number in (1, 3, 4):
            _average_by_hand(model, world_size)
        with pytest.raises(RuntimeError, match="no rank has averaged") if number == 5 else nullcontext():
            optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(1)
def test_one_rank_has_nothing_to_average(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Mlp())
    fastsync.register_comm_hook(ddp)
    _loss(ddp.module, rank, 0).backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()


@on_ranks(2)
def test_steps_that_are_meant(rank: int, world_size: int) -> None:
    model, idle = Mlp(), Mlp()
    ddp, other = DistributedDataParallel(model), DistributedDataParallel(idle)
    fastsync.register_comm_hook(ddp)
    fastsync.register_comm_hook(other)
    both = torch.optim.SGD([*model.parameters(), *idle.parameters()], lr=0.1)
    _loss(other, rank, 0).backward()
    _loss(ddp, rank, 0).backward()
    both.step()
    for number in range(3):  # one optimizer, and models that take turns
        both.zero_grad(set_to_none=False)
        with ddp.no_sync():
            _loss(ddp, rank, 2 * number).backward()
        _loss(ddp, rank, 2 * number + 1).backward()
        both.step()
    assert_same_on_all_ranks([*model.parameters(), *idle.parameters()])
    with ddp.no_sync():  # a step of this rank's own
        both.zero_grad()
        _loss(ddp, rank, 9).backward()
        both.step()


# ---- names -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_layers_in_another_order(rank: int, world_size: int) -> None:
    layers = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]
    model = nn.Sequential(OrderedDict(reversed(layers) if rank else layers))
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp)
    of_bucket = [f"rank {each}: parameter 0 of bucket 0, {name}.weight," for each, name in enumerate("ab")]
    refused(lambda: ddp(torch.ones(2, 4)).sum().backward(), *of_bucket)


# ---- models that share a state and a backward ------------------------------------------------------------------------


class _Outer(nn.Module):
    """Calls another model in the middle, so that its buckets are full before and after the other's.

    The embedding, whose gradients are sparse, comes first in backward.
    """

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.rows = nn.Embedding(6, 4, sparse=True)
        self._inner = [inner]  # no part of this model

    def forward(self, inputs: Tensor, indices: Tensor) -> Tensor:
        hidden = self._inner[0](self.dense(inputs))
        return self.rows(indices) + hidden


def _models(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, list[nn.Parameter]]:
    inner = nn.Linear(4, 4, bias=False)
    outer = _Outer(wrap(inner))
    parameters = [*outer.parameters(), *inner.parameters()]
    for parameter in parameters:
        nn.init.ones_(parameter)
    return wrap(outer), parameters


@on_ranks(2, cases={"has_state": [True, False]})
def test_two_models_in_one_backward_with_a_shared_state(rank: int, world_size: int, has_state: bool) -> None:
    """Small whole numbers, whose means have no rounding."""
    state = HookState() if has_state else None

    def wrap(model: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(model, bucket_cap_mb=2.0**-20)
        ddp.register_comm_hook(state, fastsync.allreduce_hook)
        return ddp

    call, parameters = _models(wrap)
    alone, expected = _models(lambda model: model)
    for _ in range(3):
        for parameter in [*parameters, *expected]:
            parameter.grad = None
        for other in range(world_size):
            (alone(torch.ones(2, 4) * (other + 1), torch.tensor([other, 2])).sum() / world_size).backward()
        call(torch.ones(2, 4) * (rank + 1), torch.tensor([rank, 2])).sum().backward()
        for got, want in zip(parameters, expected, strict=True):
            assert got.grad is not None
            assert want.grad is not None
            assert torch.equal(got.grad.to_dense(), want.grad.to_dense())
