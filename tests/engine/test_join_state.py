"""After a join() in which ranks took different numbers of steps, all go on as one process that took them all."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import fastsync
from tests.engine.test_elastic_state import Position
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

STEPS = [(3, 5), (0, 4), (4, 1, 3)]
OPTIMIZERS: list[Callable[..., Optimizer]] = [
    functools.partial(Adam, lr=1e-2),
    functools.partial(AdamW, lr=1e-2, amsgrad=True, foreach=True),
    functools.partial(Adam, lr=1e-2, fused=True),
    functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    functools.partial(RMSprop, lr=1e-2, momentum=0.5, centered=True),
    functools.partial(Adagrad, lr=1e-2),
]


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal_on_ranks(values: Tensor, world_size: int) -> None:
    theirs = [torch.empty_like(values) for _ in range(world_size)]
    torch.distributed.all_gather(theirs, values)
    assert all(torch.equal(each, theirs[0]) for each in theirs), f"{theirs}"


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_moments_and_step_counts(steps: tuple[int, ...]) -> None:
    run_ranks(_with_each_optimizer, len(steps), steps)


def _with_each_optimizer(rank: int, world_size: int, steps: tuple[int, ...]) -> None:
    for number, make in enumerate(OPTIMIZERS):
        _trains_two_epochs(rank, world_size, steps, make, torch.float32)
        if number % 2 == world_size % 2:
            _trains_two_epochs(rank, world_size, steps, make, torch.bfloat16)


def _trains_two_epochs(rank: int, world_size: int, steps: tuple[int, ...], make: Any, dtype: torch.dtype) -> None:
    model, reference = make_model().to(dtype), make_model().to(dtype)
    sync = fastsync.attach(model)
    optimizer, of_reference = make(model.parameters()), make(reference.parameters())
    scheduler, reference_scheduler = (StepLR(each, 2, gamma=0.5) for each in (optimizer, of_reference))
    for epoch in range(2):
        common = []
        with sync.join(optimizer, scheduler):
            for step in range(steps[rank]):
                optimizer.zero_grad()
                model(inputs_of(rank, 10 * epoch + step).to(dtype)).square().mean().backward()
                optimizer.step()
                scheduler.step()
                common.append(flat(model))
        for step in range(max(steps)):  # one process: the mean over the ranks that have a batch
            of_reference.zero_grad()
            active = [other for other in range(world_size) if step < steps[other]]
            for other in active:
                batch = inputs_of(other, 10 * epoch + step).to(dtype)
                (reference(batch).square().mean() / len(active)).backward()
            of_reference.step()
            reference_scheduler.step()
        if dtype == torch.float32:
            torch.testing.assert_close(flat(model), flat(reference), rtol=1e-4, atol=1e-5)
        for values in (common[: min(steps)], [flat(model)]):
            if values:
                assert_equal_on_ranks(torch.stack(values), world_size)
    assert scheduler.get_last_lr() == reference_scheduler.get_last_lr()
    if max(steps) != min(steps):  # also what was empty before has the dtypes that a step gives it
        kinds = [[(key, value.dtype) for key, value in state.items()] for state in optimizer.state.values()]
        assert kinds == [[(key, value.dtype) for key, value in each.items()] for each in of_reference.state.values()]


@on_ranks(2)
def test_several_optimizers_groups_and_schedulers(rank: int, world_size: int) -> None:
    model, other = make_model(), make_model()
    sync = fastsync.attach(model)
    first = Adam([{"params": model[0].weight, "lr": 1e-2}, {"params": model[0].bias, "lr": 1e-3}])
    second = SGD([*model[2].parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    schedulers = [
        OneCycleLR(first, 0.1, total_steps=50),
        SequentialLR(second, [LambdaLR(second, lambda step: 1 / (1 + step)), StepLR(second, 2)], [3]),
    ]
    for epoch in range(2):
        with sync.join(first, second, *schedulers):
            for step in range(2 + 4 * rank if epoch == 0 else 3):
                model.zero_grad()
                model(inputs_of(rank, 10 * epoch + step)).square().mean().backward()
                for each in (first, second, *schedulers):
                    each.step()
                if epoch == 1:
                    assert_equal_on_ranks(flat(model), world_size)
        assert_equal_on_ranks(torch.tensor([rate for each in schedulers for rate in each.get_last_lr()]), world_size)


def step_more_on_rank_1(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(1 + rank):
        model(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()


@on_ranks(2)
def test_averages_and_positions_in_the_data(rank: int, world_size: int) -> None:
    """Anything with a state, as a plain loop in one process has it after all steps."""
    model, expected = make_model(), make_model()
    averages, expected_averages = AveragedModel(model), AveragedModel(expected)
    optimizer, of_expected = SGD(model.parameters(), lr=0.1), SGD(expected.parameters(), lr=0.1)
    position = Position()
    sync = fastsync.attach(model)
    with sync.join(optimizer, averages, position):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(inputs_of(rank, step)).square().mean().backward()
            optimizer.step()
            averages.update_parameters(model)
            position.read.append(step)
    for step in range(5):
        of_expected.zero_grad()
        active = [0, 1] if step < 2 else [1]
        for other in active:
            (expected(inputs_of(other, step)).square().mean() / len(active)).backward()
        of_expected.step()
        expected_averages.update_parameters(expected)
    torch.testing.assert_close(flat(averages), flat(expected_averages), rtol=1e-5, atol=1e-6)
    assert int(averages.n_averaged) == 5
    assert position.read == [0, 1, 2, 3, 4]


@on_ranks(2)
def test_objects_of_one_type_are_told_apart_by_their_order(rank: int, world_size: int) -> None:
    model = make_model()
    sync = fastsync.attach(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 * rank + power)) for power in (1, 2)]
    with sync.join(optimizer, *scalers):
        step_more_on_rank_1(rank, model, optimizer)
    assert [scaler.get_scale() for scaler in scalers] == [2.0**9, 2.0**10]


@on_ranks(2)
def test_ranks_that_pass_other_objects_are_refused_before_a_step(rank: int, world_size: int) -> None:
    model = make_model()
    adam, adamw = Adam(model.parameters()), AdamW(model.parameters())
    for states in ([adam if rank else adamw], [adam, StepLR(adamw, 1)][: 1 + rank]):
        sync = fastsync.attach(model)
        before = flat(model)
        with pytest.raises(ValueError, match="object"), sync.join(*states):
            step_more_on_rank_1(rank, model, states[0])
        assert torch.equal(flat(model), before)
        sync.detach()


@on_ranks(2)
def test_what_cannot_be_sent_is_an_error_on_all_ranks(rank: int, world_size: int) -> None:
    model = make_model()
    sync = fastsync.attach(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    scheduler.file = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
    with pytest.raises(ValueError, match="the states of rank 1 cannot be sent"), sync.join(optimizer, scheduler):
        step_more_on_rank_1(rank, model, optimizer)


@pytest.mark.usefixtures("one_rank")
def test_what_steps_and_was_not_passed_is_refused() -> None:
    """Before the step, so that no rank has taken it."""
    model = make_model()
    sync = fastsync.attach(model)
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(make_model().parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = flat(model)

    def step(states: Sequence[Any], scales: bool) -> None:
        with sync.join(*states):
            loss = model(inputs_of(0, 0)).square().mean()
            (scaler.scale(loss) if scales else loss).backward()
            other.step()  # it has other parameters
            scaler.step(optimizer) if scales else optimizer.step()

    refused(lambda: step([], False), "Pass it, on every rank: sync.join(optimizer,")
    refused(lambda: step([optimizer], True), "a GradScaler takes the steps of SGD")
    scaler.update()
    gc.collect()
    scheduler = StepLR(optimizer, 1)
    refused(lambda: step([optimizer], False), "a scheduler moves the learning rates of SGD")
    assert torch.equal(flat(model), before)
    refused(lambda: step([[optimizer]], False), "with state_dict() and load_state_dict(),")
    refused(lambda: step([optimizer, scheduler], True), "a GradScaler takes the steps of SGD")
    step([optimizer, scheduler, scaler], True)
    assert not torch.equal(flat(model), before)


@on_ranks(2)
def test_a_window_that_is_not_full_is_warned_of(rank: int, world_size: int) -> None:
    model = make_model()
    sync = fastsync.attach(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    def accumulate(steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with sync.join(optimizer):
                for step in range(1, steps + 1):
                    loss = model(inputs_of(rank, step)).square().mean()
                    if step % 2 == 0:
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        continue
                    with sync.no_sync():
                        loss.backward()
        return [str(each.message) for each in caught if "gradients of no_sync() that were not averaged" in str(each)]

    assert len(accumulate(4 + rank)) == rank
    assert accumulate(4) == []
