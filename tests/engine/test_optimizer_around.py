"""What is around ``shard_optimizer``: other optimizers, wrappers, closures, GradScalers, and writes to gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fastsync
from tests.engine.sharded_trainings import (
    BOTH_WAYS,
    after_attach,
    assert_alike,
    attached,
    in_both_ways,
    loss_of,
    same,
    step,
    step_alike,
    twins,
    two_layers,
    values,
)
from tests.engine.wrappers import OptimizerWrapper
from tests.ranks import on_ranks
from tests.refused import refused

# ---- another optimizer ----------------------------------------------------------------------------------------------


@in_both_ways
def test_a_step_by_another_optimizer_is_refused(rank: int, world_size: int) -> None:
    """As code has it that makes the optimizer anew to resume. Also one of some of the parameters."""
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    other, of_some, before = SGD(model.parameters(), 0.1), AdamW(model[2].parameters()), values(model)
    other.step()  # without gradients it steps nothing
    loss_of(model, rank).backward()
    refused(other.step, "SGD was about to step parameter 0.weight", kind=RuntimeError)
    refused(of_some.step, "another AdamW was about to step parameter", kind=RuntimeError)
    with sync.no_sync():
        refused(other.step, "SGD was about to step", kind=RuntimeError)
    same(values(model), before)
    optimizer.step()
    sync.detach()
    other.step()


@in_both_ways
def test_a_gradient_of_a_parameter_that_was_frozen_is_refused(rank: int, world_size: int) -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    step(model, optimizer, rank)
    before = values(model)
    model[0].weight.requires_grad_(True)
    loss_of(model, rank).backward()
    refused(optimizer.step, "parameter 0.weight has a gradient now", kind=RuntimeError)
    same(values(model), before)
    model[0].weight.requires_grad_(False)
    step(model, optimizer, rank)


# ---- wrappers and closures ------------------------------------------------------------------------------------------


def wrapped_by_accelerate(optimizer: Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def _backward(model: nn.Module, optimizer: Any, rank: int, number: int, losses: list[Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, rank, number)
    loss.backward()
    losses.append(loss.detach())
    return losses[-1]


STEPS: dict[str, Callable[[Any, Callable[[], Tensor]], object]] = {
    "none": lambda optimizer, closure: (closure(), optimizer.step(None)),
    "none by name": lambda optimizer, closure: (closure(), optimizer.step(closure=None)),
    "closure": lambda optimizer, closure: optimizer.step(closure),
    "closure by name": lambda optimizer, closure: optimizer.step(closure=closure),
    "a closure of nothing": lambda optimizer, closure: (closure(), optimizer.step(lambda: None)),
}


@on_ranks(2, cases=BOTH_WAYS | {"way": STEPS})
def test_steps_with_and_without_a_closure(rank: int, world_size: int, way: str) -> None:
    trainings = twins()
    for number in range(2):
        for model, optimizer, _ in trainings:
            losses: list[Tensor] = []
            returned = STEPS[way](optimizer, partial(_backward, model, optimizer, rank, number, losses))
            assert len(losses) == 1
            assert not way.startswith("closure") or returned is losses[0]
        assert_alike(trainings)


class WritesAfterwards(OptimizerWrapper):
    """Halves the weights after each step, as Lookahead writes them after some."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)


@on_ranks(2, cases=BOTH_WAYS | {"wrap": [OptimizerWrapper, wrapped_by_accelerate, WritesAfterwards]})
def test_wrappers_step_as_without_shards(rank: int, world_size: int, shared_memory: bool, wrap: Any) -> None:
    """Those that only delegate; others may write weights that are this rank's own."""
    if wrap is WritesAfterwards and shared_memory:
        return
    trainings = [
        (model, wrap(AdamW(model.parameters(), lr=0.1, fused=True)), sync)
        for model, sync in (after_attach(), after_attach())
    ]
    fastsync.shard_optimizer(trainings[0][2], trainings[0][1])
    for number in range(3):
        step_alike(trainings, rank, number)


@on_ranks(2, cases={"wrap": [OptimizerWrapper, wrapped_by_accelerate]})
def test_a_write_between_steps_is_no_wrapper_s(rank: int, world_size: int, wrap: Any) -> None:
    """A rank that is ahead clamps weights, as a WGAN does, while another may still be in the wrapper's step."""
    model, sync = after_attach()
    optimizer = wrap(SGD(model.parameters(), lr=0.5))
    fastsync.shard_optimizer(sync, optimizer)
    for number in range(50):
        step(model, optimizer, rank, number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)


class WritesBefore(OptimizerWrapper):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        super().step(closure)


@on_ranks(2, cases={"wrap": [WritesAfterwards, WritesBefore]})
def test_a_wrapper_that_writes_weights_is_told(rank: int, world_size: int, wrap: Any) -> None:
    model = two_layers()
    optimizer = wrap(AdamW(model.parameters(), fused=True))
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    loss_of(model, rank).backward()
    with pytest.raises(RuntimeError, match=rf"{wrap.__name__} has written parameter 0\.weight itself"):
        optimizer.step()


class Copied(WritesAfterwards):
    """Is copied with all that it has, as Accelerate's."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@on_ranks(2)
def test_copies_of_a_wrapper_and_a_detached_one(rank: int, world_size: int) -> None:
    model = two_layers()
    optimizer = Copied(AdamW(model.parameters(), fused=True))
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    LambdaLR(optimizer.optimizer, lambda count: 0.5)
    copied_model, copied = copy.deepcopy((model, optimizer))
    before = values(model)
    loss_of(copied_model, rank).backward()
    copied.step()
    same(values(model), before)
    assert not torch.equal(copied_model[0].weight, model[0].weight)
    sync.detach()
    step(model, optimizer, rank)


# ---- settings -------------------------------------------------------------------------------------------------------


class Schedule:
    def __init__(self, rank: int) -> None:
        self.rank = rank


@in_both_ways
def test_functions_and_objects_among_the_settings(rank: int, world_size: int) -> None:
    """A repr of theirs has an address. What is equal on all ranks is their class or their name."""
    model, optimizer, _ = attached()
    group = optimizer.param_groups[0]
    group.update(decay=lambda count: 0.1, schedule=Schedule(rank), kind=Schedule, of=[print, {"b": 1, "a": {2, 3}}])
    step(model, optimizer, rank)
    group["of"][1]["b"] = 1 + rank
    loss_of(model, rank).backward()
    refused(lambda: optimizer.step(), "different settings in param_groups", kind=RuntimeError)


# ---- GradScaler, and writes to gradients ----------------------------------------------------------------------------

SCALED: dict[str, Any] = {
    "SGD": lambda p: SGD(p, 0.1),
    "foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: AdamW(p, lr=0.1, fused=True),
}


@on_ranks(2, cases=BOTH_WAYS | {"directly": [False, True], "kind": SCALED})
def test_gradients_that_a_scaler_has_divided_are_refused(rank: int, world_size: int, kind: str, directly: bool) -> None:
    """``unscale_`` raises no version counter. The means would be stepped times the scale."""
    model = two_layers()
    optimizer = SCALED[kind](model.parameters())
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    scaler, before = GradScaler("cpu", init_scale=256.0), values(model)
    scaler.scale(loss_of(model, rank)).backward()
    if directly or kind == "fused":
        scaler.unscale_(optimizer)
    refused(lambda: optimizer.step() if directly else scaler.step(optimizer), "unscale_", kind=RuntimeError)
    same(values(model), before)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "by data": lambda gradient: gradient.data.mul_(0.5),
    "by numpy": lambda gradient: np.multiply(gradient.numpy(), 2, out=gradient.numpy()),
    "in place": lambda gradient: gradient.mul_(0.5),
}


@on_ranks(2, cases=BOTH_WAYS | {"write": WRITES, "scales": [False, True]})
def test_gradients_that_were_changed_are_refused(rank: int, world_size: int, scales: bool, write: str) -> None:
    """On one rank: the others are told, and all go on."""
    trainings = (model, optimizer, _), _ = twins()
    scaler = GradScaler("cpu", init_scale=4.0, enabled=scales)
    scaler.scale(loss_of(model, rank)).backward()
    if rank == 1:
        for parameter in model.parameters():
            WRITES[write](parameter.grad)
    said = "was changed since" if rank == 1 else "rank 1 refuses this step"
    refused(lambda: scaler.step(optimizer), said, kind=RuntimeError)
    optimizer.zero_grad()
    step_alike(trainings, rank, 1)


@in_both_ways
def test_a_failure_of_the_optimizer_s_own_step_leaves_the_gradients(rank: int, world_size: int) -> None:
    model, own = two_layers(), nn.Embedding(4, 3, sparse=True)
    optimizer = AdamW([*model.parameters(), *own.parameters()], fused=True)
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    (loss_of(model, rank) + own(torch.tensor([1])).sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    refused(lambda: optimizer.step(), "sparse", kind=RuntimeError)
    assert [id(parameter.grad) for parameter in model.parameters()] == [id(each) for each in gradients]


# ---- memory of another process --------------------------------------------------------------------------------------


@in_both_ways
def test_parameters_that_other_processes_read_are_refused(rank: int, world_size: int) -> None:
    model = two_layers().share_memory()
    sync = fastsync.attach(model)
    refused(lambda: fastsync.shard_optimizer(sync, AdamW(model.parameters())), "optimizer:")
