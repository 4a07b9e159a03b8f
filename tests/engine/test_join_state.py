"""After a join() in which ranks took different numbers of steps, all go on as one process that took them all."""

from __future__ import annotations

import functools
import gc
import random
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
from tests.ranks import on_ranks
from tests.refused import refused

OPTIMIZERS: list[Callable[..., Optimizer]] = [
    functools.partial(Adam, lr=1e-2),
    functools.partial(AdamW, lr=1e-2, amsgrad=True, foreach=True),
    functools.partial(Adam, lr=1e-2, fused=True),
    functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    functools.partial(RMSprop, lr=1e-2, momentum=0.5, centered=True),
    functools.partial(Adagrad, lr=1e-2),
]
SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    functools.partial(StepLR, step_size=2, gamma=0.5),
    functools.partial(OneCycleLR, max_lr=0.1, total_steps=50, cycle_momentum=False),
    lambda each: SequentialLR(each, [LambdaLR(each, lambda step: 1 / (1 + step)), StepLR(each, 2)], [3]),
]


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal_on_ranks(values: Tensor, world_size: int) -> None:
    theirs = [torch.empty_like(values) for _ in range(world_size)]
    torch.distributed.all_gather(theirs, values)
    assert all(torch.equal(each, theirs[0]) for each in theirs), f"{theirs}"


class Parts:
    """What a training has beside its model, drawn from a seed, and its steps."""

    def __init__(self, model: nn.Sequential, draw: random.Random) -> None:
        self.model = model
        layers = (
            [[*model.parameters()]] if draw.random() < 0.6 else [[*model[0].parameters()], [*model[2].parameters()]]
        )
        given: list[Any] = [
            [{"params": each[:1], "lr": 1e-3}, {"params": each[1:]}] if draw.random() < 0.4 else each for each in layers
        ]
        self.optimizers = [draw.choice(OPTIMIZERS)(each) for each in given]
        self.schedulers = [draw.choice(SCHEDULERS)(each) for each in self.optimizers]
        scales = draw.random() < 0.5
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scales)
        self.averages, self.position = AveragedModel(model), Position()
        others = [self.averages, self.position, *([self.scaler] if scales else [])]
        self.states = [*self.optimizers, *self.schedulers, *others]

    def step(self, ranks: Sequence[int], number: int) -> None:
        """A step with the data of these ranks."""
        self.model.zero_grad()
        for rank in ranks:
            loss = self.model(inputs_of(rank, number).to(self.model[0].weight.dtype)).square().mean()
            self.scaler.scale(loss / len(ranks)).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        self.averages.update_parameters(self.model)
        self.position.read.append(number)

    def values(self) -> list[Tensor]:
        """Those that agree to rounding."""
        moments = [value for each in self.optimizers for of_one in each.state.values() for value in of_one.values()]
        return [flat(self.model), flat(self.averages), *moments]

    def numbers(self) -> list[Any]:
        """Those that are the same."""
        rates = [rate for each in self.schedulers for rate in each.get_last_lr()]
        return [rates, self.scaler.get_scale(), self.scaler._get_growth_tracker(), self.position.read,
                int(self.averages.n_averaged), [each.dtype for each in self.values()]]  # fmt: skip


@on_ranks(3, cases={"seed": range(16)})
def test_all_go_on_as_one_process(rank: int, world_size: int, seed: int) -> None:
    """One process has the mean over the ranks that have a batch. In 16 bits only what is no weight is compared."""
    draw = random.Random(seed)
    dtype = torch.bfloat16 if draw.random() < 0.2 else torch.float32
    ours, plain = (Parts(make_model().to(dtype), random.Random(seed + 1)) for _ in range(2))
    sync = fastsync.attach(ours.model)
    for epoch in range(2):
        steps = [draw.randrange(5) for _ in range(world_size)]
        with sync.join(*ours.states):
            for step in range(steps[rank]):
                ours.step([rank], 10 * epoch + step)
        for step in range(max(steps)):
            plain.step([other for other in range(world_size) if step < steps[other]], 10 * epoch + step)
        assert ours.numbers() == plain.numbers()
        if dtype == torch.float32:
            torch.testing.assert_close(ours.values(), plain.values(), rtol=1e-3, atol=1e-4)
        assert_equal_on_ranks(flat(ours.model), world_size)


def step_more_on_rank_1(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(1 + rank):
        model(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()


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
