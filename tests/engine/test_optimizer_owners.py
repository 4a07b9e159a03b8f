"""``shard_optimizer``: owners of whole tensors, as Muon needs them, and optimizers of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import fastsync
from fastsync.optimizer import register_elementwise, register_tensorwise
from fastsync.optimizer.owners import deal
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.sharded_trainings import BOTH_WAYS, backward, held_bytes, in_both_ways, same, two_layers, values
from tests.ranks import on_ranks


def test_costly_matrices_are_dealt_first() -> None:
    shapes = [(2, 2), (100, 10), (10, 10), (50, 20), (3, 3, 2)]
    owner_of = deal({index: torch.empty(shape, device="meta") for index, shape in enumerate(shapes)}, 2)
    assert owner_of == {3: 0, 1: 1, 2: 1, 4: 1, 0: 1}


def of_muon(shared: bool) -> tuple[nn.Module, list[Optimizer], list[GradientSynchronizer]]:
    """Muon steps the matrices, and AdamW the rest."""
    model = nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 30), nn.ReLU(), nn.Linear(30, 20))
    torch.manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight)
    parts = [[p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)]
    optimizers: list[Optimizer] = [torch.optim.Muon(parts[0], lr=0.02), AdamW(parts[1], lr=0.01)]
    handles = [fastsync.attach(part) for part in parts]
    if shared:
        for handle, optimizer in zip(handles, optimizers, strict=True):
            fastsync.shard_optimizer(handle, optimizer)
    return model, optimizers, handles


@in_both_ways
def test_muon_beside_adamw(rank: int, world_size: int) -> None:
    """Clipped together, with a matrix frozen and not, another compression, and detached in the end."""
    trainings = of_muon(shared=True), of_muon(shared=False)
    for number in range(10):
        norms = []
        for model, optimizers, handles in trainings:
            model[2].weight.requires_grad_(number not in (2, 3, 4))
            if number == 6:
                for handle in handles:
                    handle.compression = fastsync.Compression("int8", algorithm="two_shot")
            if number == 8:
                for handle in handles:
                    handle.detach()
                handles[:] = [fastsync.attach(list(each.parameters())) for each in handles]
            inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * number + rank))
            model(inputs).square().mean().backward()
            norms.append(fastsync.clip_grad_norm_(handles, 1e9))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(*norms)
        (own, of_own, _), (plain, of_plain, _) = trainings
        same(values(own), values(plain))
        for mine, theirs in zip(of_own, of_plain, strict=True):
            same(mine.state_dict()["state"], theirs.state_dict()["state"])


@on_ranks(2, shared_memory=False)
def test_a_rank_has_the_state_of_its_matrices(rank: int, world_size: int) -> None:
    model = nn.ParameterList(torch.randn(60, 50) for _ in range(4))
    optimizer = torch.optim.Muon(model.parameters())
    sync = fastsync.attach(model, bucket_cap_mb=0.02)
    fastsync.shard_optimizer(sync, optimizer)
    sum(weight.square().sum() * (rank + 1) for weight in model).backward()
    optimizer.step()
    assert held_bytes(optimizer) == 0
    inner = sync._optimizer_shards._pieces.inner
    assert [tuple(parameter.shape) for parameter in inner.state] == [(60, 50)] * 2
    assert held_bytes(inner) == 2 * 4 * 60 * 50


class Odd(SGD):
    """Keeps more than it tells of, or sets what is the user's."""

    def __init__(self, params: Any, keeps: str = "", sets: str = "") -> None:
        super().__init__(params, lr=0.1)
        self.keeps, self.sets = keeps, sets

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update({self.keeps: torch.zeros_like(parameter)} if self.keeps else {})
            group.update({self.sets: 1.0} if self.sets else {})


@on_ranks(
    2,
    cases=BOTH_WAYS
    | {
        "register, told, keeps, sets, reason": [
            (register_elementwise, (), "ema", "", "the state of Odd is not .* 'ema' is not among the names"),
            (register_elementwise, ("ema",), "", "", "'ema' has no tensor"),
            (register_elementwise, (), "", "k", r"Odd\.step\(\) has changed 'k' in param_groups"),
            (register_tensorwise, ("a",), "", "", "'a' has no tensor"),
        ]
    },
)
def test_what_a_class_keeps_beside_what_was_told(
    rank: int, world_size: int, register: Any, told: tuple[str, ...], keeps: str, sets: str, reason: str
) -> None:
    register(Odd, state=told)
    model = two_layers()
    optimizer = Odd(model.parameters(), keeps, sets)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    backward(model, rank)
    with pytest.raises(RuntimeError, match=reason):
        optimizer.step()


@pytest.mark.parametrize("register", [register_elementwise, register_tensorwise])
def test_what_a_registry_refuses(register: Any) -> None:
    with pytest.raises(ValueError, match="optimizer_class: expected a class"):
        register(Odd(two_layers().parameters()), state=())
    for state in ("exp_avg", ("step",), (1,)):
        with pytest.raises(ValueError, match="state: expected names"):
            register(Odd, state=state)
