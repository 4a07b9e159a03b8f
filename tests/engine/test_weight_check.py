"""Ranks that hold different weights are told so in the next backward, whatever has parted them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests import fake_device
from tests.models import Given, Mlp, assert_same_on_all_ranks, batch, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

EVERY = 50
"""Once in so many steps the ranks compare their weights."""
HOOK_CHECKS_ONE_OF = 16
"""Where it would cost a collective, the hook has room for it in one of so many steps."""

SHAPES = [(7, 33), (300,), (2, 3, 4)]

Model = Callable[[Tensor], Tensor]


def _attached(model: nn.Module, **options: Any) -> Model:
    fastsync.attach(model, **options)
    return model


def _hooked(model: nn.Module, **options: Any) -> Model:
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp, **options)
    return ddp


ENTRY_POINTS = [_attached, _hooked]


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _backward(call: Model, rank: int, number: int) -> None:
    call(batch(rank, number)).square().mean().backward()


def _train(
    call: Model,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int,
    before_step: Callable[[int], object] = lambda number: None,
) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        _backward(call, rank, number)
        before_step(number)
        optimizer.step()


def _told(train: Callable[[], object]) -> tuple[int, str]:
    """Returns the step that an error names that is raised for different weights, and its text."""
    text = refused(train, "the ranks hold different weights", kind=RuntimeError)
    return int(text.partition("found by step ")[2].partition(",")[0]), text


@on_ranks(3, cases={"entry_point": ENTRY_POINTS, "changed": [0, 3]}, shared_memory=False)
def test_the_first_parameter_and_the_ranks_are_named(
    rank: int, world_size: int, entry_point: Callable[..., Model], changed: int
) -> None:
    """Momentum that one rank alone has, as after an optimizer's state that only it has loaded."""
    model = Mlp()
    call, optimizer = entry_point(model), _sgd(model)
    name, third = list(model.named_parameters())[2]

    def load(number: int) -> None:
        if number == changed and rank == 1:
            optimizer.state[third]["momentum_buffer"] = torch.ones(third.shape)

    step, error = _told(lambda: _train(call, optimizer, rank, EVERY + HOOK_CHECKS_ONE_OF, load))
    assert f"the first parameter that differs is {name}" in error
    assert "rank 0, 2; rank 1" in error
    steps: list[Any] = [None] * world_size
    dist.all_gather_object(steps, step)
    assert {*steps} == {step}
    assert step == 1 if changed == 0 else step <= EVERY + HOOK_CHECKS_ONE_OF  # at once after the first step


@on_ranks(2)
def test_another_optimizer_on_one_rank(rank: int, world_size: int) -> None:
    model = Mlp()
    fastsync.attach(model)
    optimizer = [torch.optim.SGD, torch.optim.Adam][rank](model.parameters(), lr=0.1)
    assert "rank 0; rank 1" in _told(lambda: _train(model, optimizer, rank, 2))[1]


@on_ranks(2, cases={"entry_point": ENTRY_POINTS})
def test_weights_that_may_differ_and_weights_that_do_not(
    rank: int, world_size: int, entry_point: Callable[..., Model]
) -> None:
    model = Mlp()
    call = entry_point(model, check_weights=False)
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    _train(call, _sgd(model), rank, EVERY + 2)
    model = Mlp()
    _train(entry_point(model), _sgd(model), rank, EVERY + 2)
    assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
def test_what_each_rank_has_for_itself_and_what_nobody_trains_may_differ(rank: int, world_size: int) -> None:
    model = nn.ModuleDict({"shared": Mlp(), "own": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)})
    fastsync.attach(model, ignored_states=[model["own"]])
    with torch.no_grad():
        model["own"].weight.add_(rank)
        model["frozen"].weight.add_(rank)
    _train(model["shared"], _sgd(model["shared"]), rank, 3)


@on_ranks(2)
def test_ranks_that_step_for_themselves_for_a_while(rank: int, world_size: int) -> None:
    """One has run out of batches, and gets the others' weights at the end. Or they step inside no_sync, and the
    weights are made one before the next sync.
    """
    model = Mlp()
    sync = fastsync.attach(model)
    for _ in range(2):
        optimizer = _sgd(model)
        with sync.join(optimizer):
            _train(model, optimizer, rank, [3, 6][rank])
    _train(model, _sgd(model), rank, EVERY)
    model = Mlp()
    sync, optimizer = fastsync.attach(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        with sync.no_sync():
            _train(model, optimizer, rank, 1)
        fastsync.sync_weights(model)
        _train(model, optimizer, rank, 1)


@on_ranks(4)
def test_ranks_of_a_site_hold_the_same_weights(rank: int, world_size: int) -> None:
    """Sites of DiLoCo differ, and the ranks of one site do not, whenever a mean in the background arrives."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    model = Mlp()
    fastsync.attach(model, process_group=mesh["ranks"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastsync.DiLoCo(
        model, optimizer, sync_every=8, fragments=2, fragment_sync_delay=1, process_group=mesh["sites"]
    ):
        _train(model, optimizer, rank, EVERY + 6)


# ---- right programs --------------------------------------------------------------------------------------------------


def _sam(rank: int, entry_point: Callable[..., Model], subtracts: bool = False) -> None:
    """Each rank looks for the worst weights nearby by its own gradient, as sharpness-aware minimisation does."""
    model = Mlp()
    call, parameters = entry_point(model), list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for number in range(4):
        own = torch.autograd.grad(model(batch(rank, number)).square().mean(), parameters)
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, own)
        optimizer.zero_grad()
        _backward(call, rank, number)
        with torch.no_grad():
            if subtracts:
                torch._foreach_sub_(parameters, own)
            else:
                torch._foreach_copy_(parameters, before)
        optimizer.step()


def _freed(rank: int, entry_point: Callable[..., Model]) -> None:
    """Weights whose memory is freed while nobody needs them: amid a backward, and in a step of the other weights."""
    model = Mlp()
    call = entry_point(model)
    last, *others = reversed(list(model.parameters()))
    of_last, of_others = (torch.optim.SGD(each, lr=0.01) for each in ([last], others))
    kept: list[Tensor] = []

    def free(parameter: Tensor) -> None:
        kept[:] = [parameter.detach().clone()]
        parameter.untyped_storage().resize_(0)

    last.register_post_accumulate_grad_hook(free)
    for number in range(4):
        model.zero_grad()
        _backward(call, rank, number)
        of_others.step()
        last.untyped_storage().resize_(kept[0].nbytes)
        with torch.no_grad():
            last.copy_(kept[0])
        of_last.step()


@on_ranks(2, cases={"entry_point": ENTRY_POINTS})
def test_weights_that_differ_between_two_steps_alone(
    rank: int, world_size: int, entry_point: Callable[..., Model]
) -> None:
    _sam(rank, entry_point)
    _freed(rank, entry_point)


@on_ranks(2)
def test_roundings_are_told_once(rank: int, world_size: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _sam(rank, _attached, subtracts=True)
    said = [str(each.message) for each in caught if "looks like roundings" in str(each.message)]
    assert ["rank 0; rank 1" in each for each in said] == [True] * (rank == 0)


# ---- ranks that have no sample ---------------------------------------------------------------------------------------


@on_ranks(3, cases={"num_batches, changed": [(0, 0), (1, 0), (EVERY - 10, EVERY)]})
def test_a_rank_without_batches_is_not_compared(rank: int, world_size: int, num_batches: int, changed: int) -> None:
    model = Mlp()
    sync, optimizer = fastsync.attach(model), torch.optim.SGD(model.parameters(), lr=0.01)
    name, third = list(model.named_parameters())[2]

    def train() -> None:
        with sync.join(optimizer):
            for number in range(num_batches if rank == 2 else EVERY + 10):
                if number == changed and rank == 1:
                    with torch.no_grad():
                        third.add_(1.0)
                optimizer.zero_grad()
                _backward(model, rank, number)
                optimizer.step()

    step, error = _told(train)
    assert step == changed + 1
    assert f"the first parameter that differs is {name}, and these have the same values: rank 0; rank 1." in error


# ---- ranks on unlike machines ----------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_on_unlike_machines_are_not_compared(rank: int, world_size: int) -> None:
    def differ(number: int) -> None:  # as another rounding does
        if rank == 1 and number == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(1 + 2**-20)

    with (
        patch("torch.backends.cpu.get_cpu_capability", return_value=["AVX2", "AVX512", "AVX2"][rank]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = Mlp()
        _train(_attached(model), _sgd(model), rank, EVERY + 3, differ)
    said = [str(each.message) for each in caught if "unlike machines" in str(each.message)]
    found = [re.search(r"rank 0, 2: [^;]*AVX2[^;]*; rank 1: [^;]*AVX512", each) is not None for each in said]
    assert found == [True] * (rank == 0)


@pytest.mark.usefixtures("one_rank")
def test_an_argument_that_is_neither_true_nor_false() -> None:
    for entry_point in ENTRY_POINTS:
        refused(lambda: entry_point(Mlp(), check_weights="no"), "check_weights:")


def _on_a_device(rank: int, world_size: int, entry_point: str) -> tuple[int, str]:
    group = fake_device.new_group()
    model: nn.Module = Given(random_grads(rank, 0, SHAPES, torch.float32)).to(fake_device.DEVICE)
    call = model
    if entry_point == "attach":
        fastsync.attach(model, process_group=group)
    else:
        call = DistributedDataParallel(model, process_group=group)
        fastsync.register_comm_hook(call, process_group=group)
    inputs = [[g.to(fake_device.DEVICE) for g in random_grads(rank, step, SHAPES, torch.float32)] for step in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for number in range(2 * EVERY):
        optimizer.zero_grad()
        try:
            with fake_device.unwaited() if number > 2 else nullcontext():
                call(inputs[number % len(inputs)]).backward()
        except RuntimeError as error:
            return number, str(error)
        optimizer.step()
        if number == 3 and rank == 1:
            with torch.no_grad():
                list(model.parameters())[1].mul_(2.0)
    raise AssertionError("no error")


@pytest.mark.parametrize("entry_point", ["attach", "register_comm_hook"])
def test_on_a_device_the_host_does_not_wait(entry_point: str) -> None:
    """The number made of the weights travels some steps after they were read, and its sum is read later still."""
    (step, error), (other_step, _) = fake_device.run_ranks(_on_a_device, 2, entry_point)
    assert step == other_step > 3
    assert "the first parameter that differs is weights.1" in error
