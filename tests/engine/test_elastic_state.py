"""``Elastic``: what is put back before a step runs again, and what ranks take over from each other."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import FileStore
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import fastsync
from fastsync.elastic.elastic import Elastic
from tests.engine.elastic import Alone, Training, as_if_lost, fail_once
from tests.ranks import on_ranks


class Position:
    """A data loader's place in its data."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.read = state["read"]


class Averaged:
    """A model with two optimizers, and all that a training may have beside it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
        self.averaged = AveragedModel(self.model)
        first, second = self.model[0].parameters(), self.model[1].parameters()
        self.optimizers = [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(second, lr=0.1)]
        self.scheduler = lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.scaler = GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.position = Position()

    def backward(self, index: int, rank: int, num_ranks: int = 1) -> None:
        data = torch.Generator().manual_seed(100 * index + rank)
        loss = self.model(torch.randn(8, 4, generator=data)).square().mean() / num_ranks
        self.scaler.scale(loss).backward()

    def step(self, index: int) -> None:
        for each in self.optimizers:
            self.scaler.step(each)
        self.scaler.update()
        self.scheduler.step()
        self.averaged.update_parameters(self.model)
        self.position.read.append(index)

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def result(self) -> tuple[list[Tensor], list[Any]]:
        values = [*self.model.parameters(), *self.averaged.parameters()]
        values += [state["exp_avg"] for state in self.optimizers[1].state.values()]
        counts = [self.scheduler.get_last_lr(), self.scaler.get_scale(), self.scaler._get_growth_tracker()]
        return [each.detach() for each in values], [*counts, int(self.averaged.n_averaged), self.position.read]


@on_ranks(2, cases={"moment, freezes": [("on one", False), ("on both", False), ("on one", True)]})
def test_what_is_given_is_put_back_and_taken_over(
    rank: int, world_size: int, moment: str, freezes: bool, tmp_path: Path
) -> None:
    """As a plain loop has it. Step 1 fails on both ranks, or on rank 1, which then takes over rank 0's state."""
    training = Averaged()
    sync, store = fastsync.attach(training.model), FileStore(str(tmp_path / f"{moment} {freezes}"), -1)
    state = [training.scheduler, training.scaler, training.averaged, training.position]
    elastic = Elastic(training.model, training.optimizers, sync, state=state, timeout=20, store=store)
    if freezes:
        gc.freeze()
    for num_runs, step in enumerate(elastic.steps(5), 1):
        with step:
            training.zero_grad()
            training.position.read.append(-1)  # as one who reads ahead
            training.averaged.n_averaged += 7
            training.backward(step.index, rank)
            if num_runs == 2 and (moment == "on both" or rank == 1):
                raise as_if_lost()
            training.position.read.pop()
            training.averaged.n_averaged -= 7
            training.step(step.index)
    expected = Averaged()
    for index in range(5):
        expected.zero_grad()
        for each in range(2):
            expected.backward(index, each, 2)
        expected.step(index)
    (values, counts), (expected_values, expected_counts) = training.result(), expected.result()
    torch.testing.assert_close(values, expected_values, rtol=1e-4, atol=1e-5)
    assert counts == expected_counts


def test_the_scalers_other_optimizers_keep_their_stage(alone: Training) -> None:
    scaler = GradScaler("cpu", init_scale=16.0)
    elastic = alone.elastic(scaler)
    critic = nn.Linear(2, 1, bias=False)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1.0)
    scaler.scale(critic(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(of_critic)
    before = critic.weight.detach().clone()
    with next(elastic.steps(3)):
        scaler.scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
        scaler.unscale_(alone.optimizer)
        raise as_if_lost()
    scaler.step(of_critic)
    assert torch.equal(critic.weight, before - 1.0), "unscaled once"


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_what_a_step_changes_is_put_back(alone: Training, num_drawn: int) -> None:
    """Random numbers go on as before, also where half of a pair of normal ones is left, and buffers of any kind."""
    torch.randn(num_drawn)
    buffers = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.empty(0), torch.ones(2, dtype=torch.bool)]
    step = next(alone.elastic().steps(1))
    holder = nn.Module()
    step._with_buffers = [holder]
    for _ in range(2):  # the second time in the memory of the first
        for index, each in enumerate(buffers):
            holder.register_buffer(str(index), each)
        expected, state = [each.clone() for each in buffers], torch.get_rng_state()
        step.__enter__()
        torch.randn(1), torch.randn(1, dtype=torch.float64), torch.rand(700)
        for each in buffers:
            each.fill_(0)
        step.put_back()
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(buffers, expected, rtol=0, atol=0)
        buffers[1] += 1
        buffers.reverse()


def test_a_change_between_two_steps_keeps_gradients(alone: Training) -> None:
    elastic = alone.elastic()
    steps = elastic.steps(3)
    with next(steps):
        alone.model(torch.ones(4, 6)).sum().backward()
    elastic._agree(has_ended=False)
    assert alone.model[0].weight.grad is not None


def test_a_scaler_takes_the_gradients_after_a_step_that_has_failed_late(alone: Training) -> None:
    """Although it has stepped with those of before."""
    scaler = GradScaler("cpu", init_scale=16.0)
    for num_runs, step in enumerate(alone.elastic(scaler).steps(3), 1):
        with pytest.warns(UserWarning) if num_runs == 2 else nullcontext(), step:
            alone.optimizer.zero_grad()
            scaler.scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
            scaler.step(alone.optimizer)
            if num_runs == 2:
                raise as_if_lost()
            scaler.update()
    assert num_runs == 3


class Drawn:
    """An optimizer, a schedule and perhaps a scaler, drawn from a seed, and the steps of a training with them."""

    def __init__(self, training: Alone, draw: random.Random) -> None:
        self.training, self.model = training, training.model
        made: list[Callable[..., Optimizer]] = [
            partial(torch.optim.AdamW, lr=0.5, fused=True),
            partial(torch.optim.AdamW, lr=torch.tensor(0.5)),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        ]
        training.optimizer = self.optimizer = draw.choice(made)(self.model.parameters())  # type: ignore[assignment]
        self.schedule = self.made_schedule(draw.choice(["cycle", "nested", "steps"]))
        self.place = draw.choice(["before the block", "in it", "at its end"])
        self.scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=draw.random() < 0.6)
        self.unscales = draw.random() < 0.5
        self.model.register_buffer("left", None)
        with torch.inference_mode(isinstance(training, Training)):  # of which an Elastic makes plain ones
            self.model.register_buffer("cache", torch.zeros(2))

    def made_schedule(self, kind: str) -> LRScheduler:
        if kind == "cycle":
            return lr_scheduler.OneCycleLR(self.optimizer, 1.0, total_steps=20)
        parts = [lr_scheduler.ExponentialLR(self.optimizer, 0.5), lr_scheduler.StepLR(self.optimizer, 2, 0.25)]
        return lr_scheduler.SequentialLR(self.optimizer, parts, [2]) if kind == "nested" else parts[0]

    def step(self, index: int, block: Any, fails: str = "") -> None:
        if self.place == "before the block":
            self.schedule.step()
        with block:
            if self.place == "in it":
                self.schedule.step()
            self.model.cache += 1
            if fails:
                self.model.left = torch.ones(2)
            self.training.backward(index, lambda loss: self.scaler.scale(loss).backward())
            if fails == "after backward":
                raise as_if_lost()
            if self.unscales:
                self.scaler.unscale_(self.optimizer)
            if fails == "unscaled":
                raise as_if_lost()
            if fails == "in the step":
                self.optimizer.register_step_pre_hook(fail_once())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.place == "at its end":
                self.schedule.step()

    def result(self) -> list[Any]:
        group, rates = self.optimizer.param_groups[0], self.schedule.get_last_lr()
        settings = [group["lr"], *group.get("betas", ()), group.get("momentum", 0.0), *rates, self.schedule.last_epoch]
        scales = [self.scaler.get_scale(), self.scaler._get_growth_tracker()]
        return [*self.training.result(), *map(float, settings), *scales]


@pytest.mark.parametrize("seed", range(30))
def test_steps_that_run_again_leave_what_steps_without_a_loss_leave(alone: Training, seed: int) -> None:
    """Weights, moments, learning rates, scales, buffers and random numbers are those of a plain loop."""
    expected = Drawn(Alone(0), random.Random(seed))
    for index in range(6):
        expected.step(index, nullcontext())
    expected_result = expected.result()
    torch.manual_seed(100)
    drawn, failures = Drawn(alone, random.Random(seed)), random.Random(seed)
    elastic = Elastic(alone.model, drawn.optimizer, alone.sync, state=[drawn.schedule, drawn.scaler])
    fails = ""
    for step in elastic.steps(6):
        may_fail = not fails and failures.random() < 0.5  # for more than some failures in a row leave the block
        fails = failures.choice(["after backward", "unscaled", "in the step"]) if may_fail else ""
        drawn.step(step.index, step, fails)
    assert drawn.model.left is None
    torch.testing.assert_close(drawn.result(), expected_result, rtol=0, atol=0)
