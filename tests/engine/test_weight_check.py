"""Ranks that hold different weights are told so in the next backward, whatever has parted them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests import fake_device
from tests.models import Given, Mlp, assert_same_on_all_ranks, batch, random_grads
from tests.ranks import on_ranks, run_ranks
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


def _sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)


def _steps(
    call: Model, model: nn.Module, rank: int, optimizer: torch.optim.SGD | None = None, **options: Any
) -> Iterator[int]:
    """Trains for as long as it is asked to, and yields the number of each step."""
    optimizer = optimizer or _sgd(model, **options)
    number = 0
    while True:
        optimizer.zero_grad()
        call(batch(rank, number)).square().mean().backward()
        optimizer.step()
        yield number
        number += 1


def _error_after(steps: Iterator[int], within: int) -> str:
    def run() -> None:
        for _ in range(within):
            next(steps)

    with pytest.raises(RuntimeError, match="the ranks hold different weights") as raised:
        run()
    return str(raised.value)


def _state_on_one_rank(rank: int, world_size: int, entry_point: Callable[..., Model], before: int) -> tuple[str, int]:
    """Momentum that one rank alone has, as after an optimizer's state that only it has loaded."""
    model = Mlp()
    call = entry_point(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    number, changed = 0, before

    def steps() -> Iterator[int]:
        nonlocal number
        while True:
            optimizer.zero_grad()
            call(batch(rank, number)).square().mean().backward()
            if number == changed and rank == 1:
                optimizer.state[list(model.parameters())[2]]["momentum_buffer"] = torch.ones(
                    list(model.parameters())[2].shape
                )
            optimizer.step()
            number += 1
            yield number

    return _error_after(steps(), EVERY + HOOK_CHECKS_ONE_OF), number


@pytest.mark.parametrize("entry_point", [_attached, _hooked])
@pytest.mark.parametrize("before", [0, 3])
def test_the_first_parameter_and_the_ranks_are_named(entry_point: Callable[..., Model], before: int) -> None:
    found = run_ranks(_state_on_one_rank, 3, entry_point, before, shared_memory=False)
    third = [name for name, _ in Mlp().named_parameters()][2]
    assert len({number for _, number in found}) == 1
    for error, number in found:
        assert f"the first parameter that differs is {third}" in error
        assert "rank 0, 2; rank 1" in error
        if before == 0:
            assert number == 1  # the backward after the first step
        else:
            assert number <= EVERY + HOOK_CHECKS_ONE_OF


def _another_optimizer(rank: int, world_size: int) -> str:
    model = Mlp()
    fastsync.attach(model)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(model.parameters(), lr=0.1),
    ]
    model(batch(rank, 0)).square().mean().backward()
    optimizers[rank].step()
    with pytest.raises(RuntimeError, match="the ranks hold different weights") as raised:
        model(batch(rank, 1)).square().mean().backward()
    return str(raised.value)


def test_another_optimizer_on_one_rank() -> None:
    for error in run_ranks(_another_optimizer, 2):
        assert "rank 0; rank 1" in error


def _meant_to_differ(rank: int, world_size: int, entry_point: Callable[..., Model]) -> None:
    model = Mlp()
    call = entry_point(model, check_weights=False)
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    steps = _steps(call, model, rank)
    for _ in range(EVERY + 2):
        next(steps)


def _same_weights(rank: int, world_size: int, entry_point: Callable[..., Model]) -> None:
    model = Mlp()
    steps = _steps(entry_point(model), model, rank)
    for _ in range(2 * EVERY + 2):
        next(steps)
    assert_same_on_all_ranks(list(model.parameters()))


def _frozen_and_own(rank: int, world_size: int) -> None:
    """What each rank has for itself, and what nobody trains, may differ."""
    model = nn.ModuleDict({"shared": Mlp(), "own": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)})
    fastsync.attach(model, ignored_states=[model["own"]])
    with torch.no_grad():
        model["own"].weight.add_(rank)
        model["frozen"].weight.add_(rank)
    steps = _steps(model["shared"], model["shared"], rank)
    for _ in range(3):
        next(steps)


@on_ranks(2)
def test_weights_that_may_differ_and_weights_that_do_not(rank: int, world_size: int) -> None:
    for entry_point in (_attached, _hooked):
        _meant_to_differ(rank, world_size, entry_point)
        _same_weights(rank, world_size, entry_point)
    _frozen_and_own(rank, world_size)


def _joined(rank: int, world_size: int) -> None:
    """A rank that has run out of batches does not step, and gets the weights of the others at the end."""
    model = Mlp()
    sync = fastsync.attach(model)
    for _ in range(2):
        optimizer = _sgd(model)
        with sync.join(optimizer):
            steps = _steps(model, model, rank, optimizer)
            for _ in range([3, 6][rank]):
                next(steps)
    steps = _steps(model, model, rank)
    for _ in range(EVERY):
        next(steps)


def _swapped(rank: int, world_size: int) -> None:
    """Steps inside no_sync are a rank's own; the weights are made one before the next sync."""
    model = Mlp()
    sync = fastsync.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(4):
        with sync.no_sync():
            optimizer.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
        fastsync.sync_weights(model)
        optimizer.zero_grad()
        model(batch(rank, number)).square().mean().backward()
        optimizer.step()


@on_ranks(2)
def test_ranks_that_step_for_themselves_for_a_while(rank: int, world_size: int) -> None:
    _joined(rank, world_size)
    _swapped(rank, world_size)


@on_ranks(4)
def test_ranks_of_a_site_hold_the_same_weights(rank: int, world_size: int) -> None:
    """Sites of DiLoCo differ, and the ranks of one site do not, whenever a mean in the background arrives."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    model = Mlp()
    fastsync.attach(model, process_group=mesh["ranks"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastsync.DiLoCo(
        model, optimizer, sync_every=8, fragments=2, fragment_sync_delay=1, process_group=mesh["sites"]
    ):
        for number in range(EVERY + 6):
            optimizer.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()


# ---- right programs --------------------------------------------------------------------------------------------------


def _sam(rank: int, world_size: int, entry_point: Callable[..., Model], subtracts: bool = False) -> None:
    """Each rank looks for the worst weights nearby by its own gradient, as sharpness-aware minimisation does."""
    model = Mlp()
    call = entry_point(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(4):
        own = torch.autograd.grad(model(batch(rank, number)).square().mean(), list(model.parameters()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), own)
        optimizer.zero_grad()
        call(batch(rank, number)).square().mean().backward()
        with torch.no_grad():
            if subtracts:
                torch._foreach_sub_(list(model.parameters()), own)
            else:
                torch._foreach_copy_(list(model.parameters()), before)
        optimizer.step()


def _freed(rank: int, world_size: int, entry_point: Callable[..., Model]) -> None:
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
        call(batch(rank, number)).square().mean().backward()
        of_others.step()
        last.untyped_storage().resize_(kept[0].nbytes)
        with torch.no_grad():
            last.copy_(kept[0])
        of_last.step()


@on_ranks(2)
def test_weights_that_differ_between_two_steps_alone(rank: int, world_size: int) -> None:
    for entry_point in (_attached, _hooked):
        _sam(rank, world_size, entry_point)
        _freed(rank, world_size, entry_point)


def _rounded(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _sam(rank, world_size, _attached, subtracts=True)
    return [str(each.message) for each in caught if "looks like roundings" in str(each.message)]


def test_roundings_are_told_once() -> None:
    (warning,), others = run_ranks(_rounded, 2)
    assert "rank 0; rank 1" in warning
    assert others == []


# ---- ranks that have no sample ---------------------------------------------------------------------------------------


def _without_batches(rank: int, world_size: int, num_batches: int, changed: int) -> tuple[int, str]:
    model = Mlp()
    sync = fastsync.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with sync.join(optimizer):
            for number in range(num_batches if rank == 2 else EVERY + 10):
                if number == changed and rank == 1:
                    with torch.no_grad():
                        list(model.parameters())[2].add_(1.0)
                optimizer.zero_grad()
                model(batch(rank, number)).square().mean().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="the ranks hold different weights") as raised:
        train()
    return _step_of(str(raised.value)), str(raised.value)


def _step_of(error: str) -> int:
    return int(error.partition("found by step ")[2].partition(",")[0])


@pytest.mark.parametrize(("num_batches", "changed"), [(0, 0), (1, 0), (EVERY - 10, EVERY)])
def test_a_rank_without_batches_is_not_compared(num_batches: int, changed: int) -> None:
    third = [name for name, _ in Mlp().named_parameters()][2]
    for step, error in run_ranks(_without_batches, 3, num_batches, changed):
        assert step == changed + 1
        assert f"the first parameter that differs is {third}, and these have the same values: rank 0; rank 1." in error


# ---- ranks on unlike machines ----------------------------------------------------------------------------------------


def _unlike(rank: int, world_size: int, entry_point: Callable[..., Model]) -> list[str]:
    with (
        patch("torch.backends.cpu.get_cpu_capability", return_value=["AVX2", "AVX512", "AVX2"][rank]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = Mlp()
        steps = _steps(entry_point(model), model, rank)
        next(steps)
        with torch.no_grad():  # what another rounding does
            if rank == 1:
                next(model.parameters()).mul_(1 + 2**-20)
        for _ in range(EVERY + 2):
            next(steps)
    return [str(each.message) for each in caught if "unlike machines" in str(each.message)]


def test_ranks_on_unlike_machines_are_not_compared() -> None:
    (warning,), *others = run_ranks(_unlike, 3, _attached)
    assert others == [[], []]
    assert re.search(r"rank 0, 2: [^;]*AVX2[^;]*; rank 1: [^;]*AVX512", warning)


@pytest.mark.parametrize("entry_point", ["attach", "register_comm_hook"])
def test_an_argument_that_is_neither_true_nor_false(entry_point: str) -> None:
    run_ranks(_wrong_argument, 1, entry_point)


def _wrong_argument(rank: int, world_size: int, entry_point: str) -> None:
    model: nn.Module = Mlp()
    if entry_point == "register_comm_hook":
        model = DistributedDataParallel(model)
    refused(lambda: getattr(fastsync, entry_point)(model, check_weights="no"), "check_weights:")


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
