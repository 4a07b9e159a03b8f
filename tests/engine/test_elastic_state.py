"""``Elastic``: what is put back before a step runs again, and what ranks take over from each other."""

from __future__ import annotations

import contextlib
import gc
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
from tests.engine.elastic import Training, as_if_lost
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


def test_a_buffer_that_a_failed_step_made_is_gone(alone: Training) -> None:
    alone.model.register_buffer("cache", None)
    steps = alone.elastic().steps(1)
    with next(steps):
        alone.model.cache = torch.ones(2)
        raise as_if_lost()
    next(steps)
    assert alone.model.cache is None


@pytest.mark.parametrize(
    ("kind", "place"), [("nested", "in the block"), ("cycle", "before it"), ("tensors", "in the block")]
)
def test_a_schedule_that_steps_first_is_put_back(alone: Training, kind: str, place: str) -> None:
    """Learning rates, momenta, and schedulers' own state are those of as many steps without a loss."""

    def made() -> tuple[Optimizer, LRScheduler]:
        lr = torch.tensor(0.5) if kind == "tensors" else 0.5
        optimizer = torch.optim.AdamW(alone.model.parameters(), lr=lr)
        if kind == "cycle":
            return optimizer, lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
        parts = [lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 2, 0.25)]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [2]) if kind == "nested" else parts[0]

    optimizer, schedule = made()
    expected_optimizer, expected = made()
    elastic = Elastic(alone.model, optimizer, alone.sync, state=[schedule])
    for run, step in enumerate(elastic.steps(5)):
        if place == "before it":
            schedule.step()
        with step:
            if place == "in the block":
                schedule.step()
            sum(each.sum() for each in alone.model.parameters()).backward()
            if run in (1, 2, 4):
                raise as_if_lost()
            optimizer.step()
    for _ in range(5):
        expected.step()

    def settings(optimizer: Optimizer) -> list[Any]:
        return [optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")]

    assert settings(optimizer) == settings(expected_optimizer)
    assert schedule.get_last_lr() == expected.get_last_lr()
    assert schedule.last_epoch == expected.last_epoch == 5


def test_a_buffer_made_under_inference_mode_is_put_back(alone: Training) -> None:
    with torch.inference_mode():
        alone.model.register_buffer("cache", torch.zeros(2))
    for run, step in enumerate(alone.elastic().steps(1)):
        with step:
            alone.model.cache += 1
            if run == 0:
                raise as_if_lost()
    assert alone.model.cache.tolist() == [1.0, 1.0]


def test_a_change_between_two_steps_keeps_gradients(alone: Training) -> None:
    elastic = alone.elastic()
    steps = elastic.steps(3)
    with next(steps):
        alone.model(torch.ones(4, 6)).sum().backward()
    elastic._agree(has_ended=False)
    assert alone.model[0].weight.grad is not None


@pytest.mark.parametrize("steps_first", [False, True], ids=["before its step", "after its step"])
def test_a_scaler_takes_the_gradients_of_the_next_run(alone: Training, steps_first: bool) -> None:
    """Although it has unscaled those of the run that has failed, or stepped with them."""
    scaler = GradScaler("cpu", init_scale=16.0)
    num_runs = 0
    for step in alone.elastic(scaler).steps(3):
        num_runs += 1
        with contextlib.ExitStack() as stack:
            if steps_first and num_runs == 2:
                stack.enter_context(pytest.warns(UserWarning))
            with step:
                alone.optimizer.zero_grad()
                scaler.scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
                scaler.unscale_(alone.optimizer)
                if num_runs == 2 and steps_first:
                    scaler.step(alone.optimizer)
                if num_runs == 2:
                    raise as_if_lost()
                scaler.step(alone.optimizer)
                scaler.update()
    assert num_runs == (3 if steps_first else 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_runs_again_has_the_scale_of_one(alone: Training, fails: bool) -> None:
    """A fused optimizer keeps a scaler's attributes if its step fails, and the next step would multiply by them."""
    optimizer, scaler = torch.optim.AdamW(alone.model.parameters(), fused=True), GradScaler("cpu", init_scale=4.0)
    scales: list[float] = []

    def look(optimizer: Any, *_: object) -> None:
        scales.append(optimizer.grad_scale.item())
        if fails and len(scales) == 2:
            raise as_if_lost()

    elastic = Elastic(alone.model, optimizer, alone.sync, state=[scaler])
    optimizer.register_step_pre_hook(look)
    for step in elastic.steps(3):
        with step:
            scaler.scale(sum(each.sum() for each in alone.model.parameters())).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scales == [4.0] * (4 if fails else 3)
