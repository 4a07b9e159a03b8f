"""A small model under fully_shard, its trainings on several ranks, and the same on one process that holds all data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tensor import DTensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

STEPS = 8
ROWS = 8  # of a step's batch, over all ranks


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 3 * width + 1)  # which no number of ranks divides
        self.narrow = nn.Linear(3 * width + 1, width)
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self._checkpointed = checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        if self._checkpointed:
            return checkpoint(self._inner, inputs, use_reentrant=False)
        return self._inner(inputs)

    def _inner(self, inputs: Tensor) -> Tensor:
        return inputs + self.narrow(torch.tanh(self.wide(inputs))) * self.frozen


class Tied(nn.Module):
    """Blocks between an embedding and a head that is the same matrix; frozen and unused parameters in each block."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 9)
        self.blocks = nn.ModuleList(Block(9, checkpointed) for _ in range(2))
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (ROWS, 6), generator=generator)
    return tokens, tokens.roll(1, dims=1)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def trained_alone(steps: int = STEPS) -> nn.Module:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch_of(step)).backward()
        optimizer.step()
    return model


def sharded(mesh: Any, *, checkpointed: bool = False, **options: Any) -> nn.Module:
    model = Tied(checkpointed=checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: nn.Module, rank: int, world_size: int, *, steps: int = STEPS, micro_batches: int = 1, device: str = "cpu"
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, step, rank, world_size, micro_batches, device)
        if step == 0:
            assert_gradients_are_the_mean(model)
        optimizer.step()


def step_of(model: Any, step: int, rank: int, world_size: int, micro_batches: int = 1, device: str = "cpu") -> None:
    parts = [part.to(device).chunk(world_size)[rank].chunk(micro_batches) for part in batch_of(step)]
    for index, (tokens, targets) in enumerate(zip(*parts, strict=True)):
        model.set_requires_gradient_sync(index == micro_batches - 1)
        (loss_of(model, tokens, targets) / micro_batches).backward()


def assert_gradients_are_the_mean(model: nn.Module) -> None:
    """But for what the wire loses: Adam would not notice a factor, such as that of a sum."""
    alone = Tied()
    loss_of(alone, *batch_of(0)).backward()
    mine, theirs = (
        torch.cat([full(p.grad).cpu().float().flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, alone)
    )
    assert (mine - theirs).norm() < 0.05 * theirs.norm()


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def distance(model: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a parameter's elements, relative to what training has changed at most."""
    begun = Tied()
    moved = max((b - a).abs().max().item() for a, b in zip(begun.parameters(), alone.parameters(), strict=True))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((full(a).cpu().float() - b).abs().max().item() for a, b in pairs) / moved


LIMITS = {"none": 1e-4, "fp16": 5e-3, "bf16": 0.03, "int8": 0.3}
