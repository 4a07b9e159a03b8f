"""An attached ``Mlp`` on two ranks: a backward of it, and what its gradients then have to be."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.models import SMALL_BUCKETS, Fails, Given, Mlp, assert_all_bitwise_equal, batch, grads_of


class Fallible(Mlp):
    """An ``Mlp`` whose backward may raise once the gradients of its last layer are there."""

    fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[:4](inputs)
        return self.layers[4](Fails.apply(hidden) if self.fails else hidden)


def attach(model: nn.Module | list[Tensor], **options: Any) -> GradientSynchronizer:
    return fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, **options)


def assert_flags_pair_up_after_failures(rank: int, num_steps: int, group: dist.ProcessGroup, device: str) -> None:
    """In each second step rank 0's backward fails. Rank 1 gets nan, and the flags meet each other, not a bucket."""
    model = Fallible().to(device)
    sync = attach(model, process_group=group)
    inputs = torch.ones(16, 32, device=device)
    for step in range(num_steps):
        model.zero_grad()
        model.fails = rank == 0 and step % 2 == 1
        ok = torch.ones(1, device=device)
        try:
            model(inputs).square().mean().backward()
        except ArithmeticError:
            ok.zero_()
        sync.abandon_step()
        dist.all_reduce(ok, op=dist.ReduceOp.MIN, group=group)
        assert ok.item() == (0 if step % 2 else 1)
        if rank == 1:
            finite = [parameter.grad.isfinite().all().item() for parameter in model.parameters()]
            assert all(finite) == (step % 2 == 0)
    assert sync.stats().num_steps == num_steps


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """What that rank's backward gives by itself."""
    return list(torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())))


def mean_gradients(model: nn.Module, step: int) -> list[Tensor]:
    """What the sync gives on two ranks, to the bit: halving is exact."""
    return [(one + other) / 2 for one, other in zip(*(gradients(model, rank, step) for rank in range(2)), strict=True)]


def backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return grads_of(model)


def assert_averages(model: nn.Module, rank: int, step: int = 0) -> None:
    expected = mean_gradients(model, step)
    assert_all_bitwise_equal(backward(model, rank, step), expected, f"step {step}: averaged gradient")


def assert_averages_nothing(model: nn.Module, rank: int, step: int = 0) -> None:
    expected = gradients(model, rank, step)
    assert_all_bitwise_equal(backward(model, rank, step), expected, f"step {step}: this rank's own gradient")


def references_to(model: nn.Module) -> list[weakref.ref[Any]]:
    return [weakref.ref(thing) for thing in (model, *model.parameters())]


def assert_freed(references: list[weakref.ref[Any]]) -> None:
    assert_soon_none(lambda: [type(alive).__name__ for each in references if (alive := each()) is not None])


def assert_soon_none(alive: Callable[[], Any]) -> None:
    """Waits: autograd's thread of a device says that backward is done before it lets go of the graph."""
    deadline = time.monotonic() + 30
    gc.collect()
    while left := alive():
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.01)
        gc.collect()


def fail(model: Fallible, rank: int, step: int) -> None:
    """A backward that raises when some buckets are on their way."""
    model.fails = True
    with pytest.raises(ArithmeticError, match="as told"):
        backward(model, rank, step)
    model.fails = False


def backward_of_given(model: Given, grads: list[Tensor], *, fails: bool = False) -> list[list[float]]:
    """A backward that fails does so when all gradients but the first are there. Returns the values of each gradient."""
    model.zero_grad()
    weights = [Fails.apply(weight) if fails and index == 0 else weight for index, weight in enumerate(model.weights)]
    loss = torch.stack([(weight * grad).sum() for weight, grad in zip(weights, grads, strict=True)]).sum()
    if fails:
        with pytest.raises(ArithmeticError, match="as told"):
            loss.backward()
    else:
        loss.backward()
    return [grad.unique().tolist() for grad in grads_of(model)]
