"""Which reduce-scatters are of one step, and what is kept of those before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from fastsync.sync.stats import SUM_OF_SQUARES
from tests.ranks import on_ranks
from tests.refused import refused

STEPS = 4


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(5, 17, generator=generator)).float().square().mean()


@on_ranks(2, cases={"shared_memory": [True, False]})
def test_modules_without_a_root_are_complete_after_backward(rank: int, world_size: int) -> None:
    """Each has an end of backward of its own, in which the first layer's gradients are reduce-scattered."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, alone = Chain(), Chain()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    handle = fastsync.register_fsdp(model, gradients=Compression("none"))
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        alone.zero_grad()
        torch.stack([loss_of(alone, each, step) for each in range(world_size)]).mean().backward()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    assert handle.stats().num_steps == STEPS


class _InBackward(torch.autograd.Function):
    """Makes a call in the middle of backward."""

    @staticmethod
    def forward(context: Any, values: Tensor, call: Callable[[], object]) -> Tensor:
        context.call = call
        return values.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        context.call()
        return *grads, None


def _backward(*calls: Callable[[], object]) -> None:
    values = torch.ones((), requires_grad=True)
    for call in reversed(calls):
        values = _InBackward.apply(values, call)
    values.backward()


@on_ranks(2, shared_memory=False)
def test_a_backward_that_fails_leaves_nothing_behind(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression("none"))]))
    identities = [torch.empty(world_size * 100, device="meta") for _ in range(2)]
    outputs = [torch.zeros(100) for _ in range(2)]

    def send(which: int, value: float) -> None:
        values = torch.full([world_size * 100], value + rank)
        engine.reduce_scatter(identities[which], f"module {which}", outputs[which], values, dist.ReduceOp.SUM)

    def fail() -> None:
        raise ArithmeticError("in the middle of backward")

    refused(lambda: _backward(lambda: send(0, 1.0), fail), "in the middle", kind=ArithmeticError)
    _backward(lambda: send(0, 10.0), lambda: send(1, 20.0), lambda: send(1, 30.0))
    assert [output.unique().tolist() for output in outputs] == [[21.0], [61.0]]
    assert engine.num_steps() == 2
    assert engine.grad_stats()[SUM_OF_SQUARES] == 100 * (21**2 + 61**2)
    _backward(lambda: send(0, 1.0))
    assert engine.grad_stats()[SUM_OF_SQUARES] == 100 * 3**2  # of what has come in the newest step


@on_ranks(1)
def test_nothing_is_kept_of_modules_that_are_gone(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression("none"))]))
    for numel in (4, 8):
        identity = torch.empty(numel, device="meta")
        engine.reduce_scatter(identity, "part", torch.empty(numel), torch.ones(numel), dist.ReduceOp.SUM)
        assert len(engine.stats()["buckets"]) == 1
