"""A model of a site that trains by itself, its steps, and what sites have to have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def make_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


def make_muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices inside, AdamW for all others, as Muon is meant to be used."""
    inside = model[2].weight
    others = [parameter for parameter in model.parameters() if parameter is not inside]
    return [Muon([inside], lr=0.02), AdamW(others, lr=0.01)]


def make_site(kind: Any, **options: Any) -> tuple[nn.Module, AdamW, Any]:
    """A model, its optimizer, and the DiLoCo or LocalSGD around them."""
    model = make_model()
    optimizer = make_optimizer(model)
    return model, optimizer, kind(model, optimizer, **options)


def train_step(model: nn.Module, optimizer: Optimizer | list[Optimizer], site: int, step: int) -> None:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * site + step))
    for each in optimizers:
        each.zero_grad()
    model(inputs).square().sum().backward()
    for each in optimizers:
        each.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def everyones(model: nn.Module, world_size: int) -> list[Tensor]:
    """The parameters and floating buffers of each rank, as vectors."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    mine = torch.cat([each.detach().double().reshape(-1) for each in tensors])
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(theirs, mine)
    return theirs


def assert_sites_are_equal(model: nn.Module, world_size: int) -> None:
    first, *others = everyones(model, world_size)
    for other in others:
        assert torch.equal(other, first), f"sites differ by {(other - first).abs().max():.2g}"
