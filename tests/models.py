"""Small models, and the steps that the tests of the DDP hook take with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from tests.bitwise import assert_bitwise_equal

# In MiB, as DDP takes it: 1 KiB, which cuts the models here into several buckets.
SMALL_BUCKETS = 2.0**-10

# Values of each rank that go along with the gradients and tell whether those of all ranks belong together.
STAMP = 6


class Fails(torch.autograd.Function):
    """Its input, and an error in place of the input's gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("as told")


class Given(nn.Module):
    """A model whose gradients are the tensors it is called with: exactly, of any value, real or complex.

    ``None`` stands for a parameter that is not used.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros_like(grad)) for grad in like)

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        losses = [
            torch.view_as_real(weight * grad.conj())[..., 0].sum() if grad.is_complex() else (weight * grad).sum()
            for weight, grad in zip(self.weights, grads, strict=True)
            if grad is not None
        ]
        return torch.stack([loss.double() for loss in losses]).sum()


def given_ddp(like: Sequence[Tensor], **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Given(like), **options)


def backward_of(ddp: DistributedDataParallel, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """One backward of a ``Given`` model on this rank's gradients. Returns copies of the synchronised ones."""
    ddp.zero_grad()
    ddp(grads).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


class Mlp(nn.Module):
    """Three layers: 8,082 parameters in six tensors of very different sizes."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64, dtype=dtype),
            nn.Tanh(),
            nn.Linear(64, 84, dtype=dtype),
            nn.Tanh(),
            nn.Linear(84, 6, dtype=dtype),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def batch(rank: int, step: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs for an ``Mlp``, other ones on every rank in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype)


def random_grads(rank: int, step: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Ordinary gradients, other ones on every rank in every step, the same in each run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def train_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    ddp(inputs).square().mean().backward()
    optimizer.step()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_all_bitwise_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(one, other, f"{what} {index}")


def assert_same_on_all_ranks(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Raises AssertionError unless every rank of the group has the same bits."""
    if not tensors:
        return
    mine = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    bits = torch.cat([tensor.flatten().view(torch.uint8) for tensor in mine])
    theirs = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, bits, group=group)
    sizes = [tensor.nbytes for tensor in mine]
    for rank, all_of_rank in enumerate(theirs):
        if torch.equal(all_of_rank, bits):
            continue
        for index, (tensor, other) in enumerate(zip(mine, all_of_rank.split(sizes), strict=True)):
            same = other.clone().view(tensor.dtype).view(tensor.shape)
            assert_bitwise_equal(tensor, same, f"tensor {index} here and on rank {rank}")


@contextmanager
def group_of_one() -> Iterator[None]:
    """A Gloo process group of this process alone, for what needs a group and no second rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # A thread of the group may be about to let go of its last work, and wants the GIL for it. A DDP model that ends
        # meanwhile as the group's last owner waits for the thread and holds the GIL.
        time.sleep(0.05)
        dist.destroy_process_group()
