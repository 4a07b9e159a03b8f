"""``Elastic``: what the ranks that are left end with is bitwise what the same memberships give without any loss."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import TCPStore
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import fastsync
from fastsync.elastic.elastic import JOINS, STORE, Elastic, RankLostError
from fastsync.errors import RanksDifferError
from fastsync.sync.training_state import TrainingState
from tests.engine.wrappers import OptimizerWrapper
from tests.ranks import run_ranks

NUM_STEPS = 8
Changes = list[tuple[int, dict[int, int]]]
"""The steps before which the members have changed. For each member: how many steps it had finished; -1 if it is new."""


class Counter(nn.Module):
    """Counts its forwards in a buffer that each of them replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        return inputs


class Training:
    """A model whose step draws random numbers, counts in a buffer, and leaves a parameter without a gradient."""

    def __init__(self, members: Sequence[int], compression: str = "none", op: str = "mean") -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), Counter(), nn.Linear(16, 3))
        self.model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        group = dist.new_group(list(members), use_local_synchronization=True)
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=0.0003, process_group=group, op=op)
        torch.manual_seed(100 + dist.get_rank())

    def elastic(self, **options: Any) -> tuple[Elastic, Changes]:
        """Returns an Elastic, and a list that gets the step and the progress of all members at each change."""
        changes: Changes = []
        elastic = Elastic(
            self.model,
            self.optimizer,
            self.sync,
            state=[self.scheduler],
            on_change=lambda members: changes.append((elastic._step.num_finished, elastic._members.now.progress)),
            **options,
        )
        return elastic, changes

    def step(self, index: int, backward: Callable[[Tensor], None] = Tensor.backward) -> None:
        data = torch.Generator().manual_seed(100 * index + dist.get_rank())
        loss = self.model(torch.randn(8, 6, generator=data)).square().mean()
        self.optimizer.zero_grad()
        backward(loss)
        self.optimizer.step()
        self.scheduler.step()

    def result(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        drawn = torch.rand(1)  # tells whether the random state went on as in a step that was not lost
        return [*(each.detach() for each in self.model.parameters()), *moments, *self.model.buffers(), drawn]


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Moment = tuple[int, str | float]
"""A step, and a place in it or the seconds after its begin. Step -1 begins where the Elastic is made."""


def go_on(
    rank: int,
    world_size: int,
    store: int | str,
    compression: str,
    lost: dict[int, Moment],
    new: Sequence[int] = (),
    timeout: float = 20.0,
) -> tuple[Changes, list[Tensor]]:
    """Takes steps.

    Args:
        store: the port of a TCPStore, or the file of a FileStore.
        lost: when a rank dies.
        new: the ranks that join, at the end of the first step.
    """
    kept = dist.FileStore(store, -1) if isinstance(store, str) else TCPStore("127.0.0.1", store, is_master=False)
    if rank in new:
        os.environ[JOINS] = "1"
    moment = lost.get(rank, (-2, ""))
    if rank in new and isinstance(moment[1], float) and moment[0] == -1:
        threading.Timer(moment[1], end_now).start()
    training = Training([rank] if rank in new else [each for each in range(world_size) if each not in new], compression)
    elastic, changes = training.elastic(timeout=timeout, store=kept)
    if rank not in new and isinstance(moment[1], float) and moment[0] == -1:  # all have met, or would not begin
        threading.Timer(moment[1], end_now).start()

    def die_amid(loss: Tensor) -> None:
        training.model[0].weight.register_hook(lambda gradient: end_now())
        loss.backward()

    for step in elastic.steps(NUM_STEPS):
        place = moment[1] if moment[0] == step.index else ""
        if place == "between":
            end_now()
        with step:
            if isinstance(place, float):
                threading.Timer(place, end_now).start()
            elif place == "forward":
                end_now()
            elif place == "optimizer":
                training.optimizer.register_step_pre_hook(lambda *_: end_now())
            elif place == "stop":
                moment = (-2, "")
                subprocess.Popen(["sh", "-c", f"sleep {3 * timeout}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            training.step(step.index, die_amid if place == "backward" else Tensor.backward)
            until = time.monotonic() + 10
            while rank == 0 and step.index == 0 and not (elastic._step.wants_change or {*new} <= {*elastic.members}):
                if time.monotonic() > until:  # this rank was stopped, and the others have gone on without it
                    break
                time.sleep(0.01)  # until the new ones are there
    return changes, training.result()


def replay(
    rank: int, world_size: int, compression: str, first: list[int], changes: Changes, op: str = "mean"
) -> list[Tensor] | None:
    """Takes the same steps with the same ranks, none of which is lost."""
    training, members = Training(first if rank in first else [rank], compression, op), first
    for index in range(NUM_STEPS):
        for _, progress in (change for change in changes if change[0] == index):
            members = list(progress)
            if rank in members:
                training.sync.use_group(dist.new_group(members, use_local_synchronization=True), init_sync=False)
                if min(progress.values()) < index:
                    root = list(progress.values()).index(index)
                    training.sync._init_sync(root)
                    state = TrainingState([training.optimizer, training.scheduler], "in a test")
                    state.share(training.sync._group, root, torch.device("cpu"))
        if rank in members:
            training.step(index)
    return training.result() if rank in members else None


def check(
    ran: Sequence[tuple[Changes, list[Tensor]] | None],
    first: list[int],
    compression: str,
    run: Callable[..., list[list[Tensor] | None]] = run_ranks,
) -> Changes:
    """Checks that all have gone through the same changes, and hold what a replay gives. Returns the changes."""
    left = {rank: each for rank, each in enumerate(ran) if each is not None}
    changes = next(changes for rank, (changes, _) in left.items() if rank in first)
    print(f"changes {changes}")
    expected = run(replay, len(ran), compression, first, changes)
    for rank, (seen, result) in left.items():
        assert seen == (changes if rank in first else changes[-len(seen) :])
        torch.testing.assert_close(result, expected[rank], rtol=0, atol=0)
    assert left
    return changes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compression", ["none", "int8+ef"])
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "between"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_end_as_without_a_loss(store: TCPStore, compression: str, place: str, victim: int) -> None:
    ran = run_ranks(go_on, 3, store.port, compression, {victim: (4, place)}, lost=[victim])
    left = [each for each in range(3) if each != victim]
    changes = check(ran, [0, 1, 2], compression)
    # A rank that dies in its optimizer has given its gradients, but its death may be noticed before they are taken.
    assert [(index, list(members)) for index, members in changes] in [[(4, left)], [(5 - (place != "optimizer"), left)]]


@pytest.mark.parametrize("lost", [{}, {1: (1, "backward")}], ids=["join", "a death while another joins"])
def test_a_new_rank_joins(store: TCPStore, lost: dict[int, Moment]) -> None:
    ran = run_ranks(go_on, 4, store.port, "none", lost, [3], lost=list(lost))
    changes = check(ran, [0, 1, 2], "none")
    assert list(changes[-1][1]) == [each for each in range(4) if each not in lost]


def save_a_checkpoint(rank: int, world_size: int, folder: str) -> None:
    training = Training(range(world_size), "int8+ef")
    for index in range(3):
        training.step(index)
    parts = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
    states = {name: part.state_dict() for name, part in (parts | {"sync": training.sync}).items()}
    torch.save(states, f"{folder}/{rank}")


def resumed(folder: str, make: type[Training], *given: Any) -> Training:
    """Makes a training that goes on from this rank's checkpoint, if there is one."""
    training = make(*given)
    if os.path.exists(file := f"{folder}/{dist.get_rank()}"):
        for name, state in torch.load(file, weights_only=False).items():
            getattr(training, name).load_state_dict(state)
    return training


def with_checkpoint(rank: int, world_size: int, folder: str, fn: Callable[..., Any], *given: Any) -> Any:
    with patch(f"{__name__}.Training", partial(resumed, folder, Training)):
        return fn(rank, world_size, *given)


def test_a_new_rank_joins_a_training_that_was_resumed(store: TCPStore, tmp_path: Path) -> None:
    run_ranks(save_a_checkpoint, 2, str(tmp_path))
    run = partial(run_ranks, with_checkpoint)
    ran = run(3, str(tmp_path), go_on, store.port, "int8+ef", {}, [2])
    changes = check(ran, [0, 1], "int8+ef", lambda fn, size, *given: run(size, str(tmp_path), fn, *given))
    assert list(changes[-1][1]) == [0, 1, 2]


def finish_apart(
    rank: int, world_size: int, port: int, furthest: int | None, compression: str = "int8+ef"
) -> tuple[int, list[Tensor]]:
    """Step 2 ends well on one rank alone, or on none."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size), compression)
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=20)
    num_runs = 0
    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if step.index == 2 and num_runs == 3 and rank != furthest:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
    return num_runs, training.result()


def fail_once() -> Callable[..., None]:
    errors = [RankLostError("as if a rank had been lost")]

    def fail(*_: object) -> None:
        if errors:
            raise errors.pop()

    return fail


@pytest.mark.parametrize("compression", ["fp16", "int8+ef", "lowrank:1"])
def test_a_step_that_fails_after_its_averaging_is_taken_back_on_all(store: TCPStore, compression: str) -> None:
    ran = run_ranks(finish_apart, 3, store.port, None, compression)
    expected = run_ranks(replay, 3, compression, [0, 1, 2], [])
    for (num_runs, result), replayed in zip(ran, expected, strict=True):
        assert num_runs == NUM_STEPS + 1
        torch.testing.assert_close(result, replayed, rtol=0, atol=0)


@pytest.mark.parametrize("furthest", [0, 1])
def test_a_step_that_one_has_finished_is_finished_on_all(store: TCPStore, furthest: int) -> None:
    ran = run_ranks(finish_apart, 3, store.port, furthest)
    expected = run_ranks(replay, 3, "int8+ef", [0, 1, 2], [])
    for rank, (num_runs, result) in enumerate(ran):
        # The one that had finished step 2 has begun step 3 in vain. The others do not run step 2 again.
        assert num_runs == NUM_STEPS + (rank == furthest)
        same_moments, own = result[:-5], result[-5:]
        torch.testing.assert_close(same_moments, expected[rank][:-5], rtol=0, atol=0)
        torch.testing.assert_close(own[-1], expected[rank][-1], rtol=0, atol=0)


def send_values(rank: int, world_size: int, port: int, fails_on: list[int]) -> list[float]:
    """The end of each block puts a value into the sync of the next one. Step 2 fails on some ranks."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=20)
    means: dict[int, float] = {}
    for num_runs, step in enumerate(elastic.steps(5), 1):
        with step:
            if num_runs == 3 and rank in fails_on:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
            means[step.index] = float(training.sync.piggybacked().get("next", torch.tensor(0.0)))
            training.sync.piggyback("next", torch.tensor(10.0 * step.index + rank))
    return [*means.values()]


@pytest.mark.parametrize("fails_on", [[1], [0, 1]])
def test_values_for_the_next_sync_go_along(store: TCPStore, fails_on: list[int]) -> None:
    """With a rank that has not finished the step, the one that has counts for both."""
    of_ranks = run_ranks(send_values, 2, store.port, fails_on)
    of_step_3 = 20.0 if fails_on == [1] else 20.5
    assert of_ranks[0] == [0.0, 0.5, 10.5, of_step_3, 30.5]
    assert of_ranks[1][-2:] == [of_step_3, 30.5]


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


def average_weights(
    rank: int, world_size: int, port: int, moment: str, freezes: bool
) -> tuple[list[Tensor], list[Any]]:
    """Step 1 fails at a moment: on both ranks, or on rank 1, which then takes over rank 0's state."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Averaged()
    sync = fastsync.attach(training.model)
    state = [training.scheduler, training.scaler, training.averaged, training.position]
    elastic = Elastic(training.model, training.optimizers, sync, state=state, timeout=20)
    if freezes:
        gc.freeze()
    for num_runs, step in enumerate(elastic.steps(5), 1):
        with step:
            training.zero_grad()
            training.position.read.append(-1)  # as one who reads ahead
            training.averaged.n_averaged += 7
            training.backward(step.index, rank)
            if num_runs == 2 and (moment == "on both" or rank == 1):
                raise RankLostError("as if a rank had been lost")
            training.position.read.pop()
            training.averaged.n_averaged -= 7
            training.step(step.index)
    return training.result()


@pytest.mark.parametrize(("moment", "freezes"), [("on one", False), ("on both", False), ("on one", True)])
def test_what_is_given_is_put_back_and_taken_over(store: TCPStore, moment: str, freezes: bool) -> None:
    """As a plain loop in one process has it."""
    expected = Averaged()
    for index in range(5):
        expected.zero_grad()
        for rank in range(2):
            expected.backward(index, rank, 2)
        expected.step(index)
    expected_values, expected_counts = expected.result()
    for values, counts in run_ranks(average_weights, 2, store.port, moment, freezes):
        torch.testing.assert_close(values, expected_values, rtol=1e-4, atol=1e-5)
        assert counts == expected_counts


def test_join_is_refused_until_the_steps_have_ended(alone: Training) -> None:
    given = [alone.optimizer, alone.scheduler]
    with alone.sync.join(*given), pytest.raises(RuntimeError, match="made inside join"):
        Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    with pytest.raises(RuntimeError, match="where an Elastic trains"):
        alone.sync.join(*given).__enter__()
    for step in elastic.steps(1):
        with step:
            alone.step(step.index)
    with alone.sync.join(*given):
        alone.step(1)


def other_states(rank: int, world_size: int, port: int) -> None:
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    states = [training.scheduler, *([GradScaler("cpu")] if rank else [])]
    with pytest.raises(ValueError, match="object 2"):
        Elastic(training.model, training.optimizer, training.sync, state=states)


def test_ranks_that_give_other_states_are_refused(store: TCPStore) -> None:
    run_ranks(other_states, 2, store.port)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "a scheduler moves the learning rates of Adam"),
        (["scheduler"], "a GradScaler takes the steps of Adam"),
        (["scheduler", "scaler", "optimizer"], "optimizer SGD steps parameters"),
    ],
)
def test_what_steps_and_was_not_given_is_refused(alone: Training, given: list[str], said: str) -> None:
    parts = {"scheduler": alone.scheduler, "scaler": GradScaler("cpu")}
    before = alone.model[0].weight.detach().clone()
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[parts[each] for each in given if each in parts])
    other = torch.optim.SGD(alone.model.parameters(), lr=0.1)
    steps = elastic.steps(1)
    with pytest.raises(ValueError, match=said), next(steps):  # noqa: PT012
        parts["scaler"].scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
        parts["scaler"].step(other if "optimizer" in given else alone.optimizer)
    assert torch.equal(alone.model[0].weight, before)


def test_a_step_of_several_optimizers_is_taken_as_one(alone: Training) -> None:
    """Each may step once. What fails between two of them could not be taken back, so it leaves the block."""
    first, *others = alone.model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
    steps = Elastic(alone.model, optimizers, alone.sync).steps(3)

    def step(*order: int) -> None:
        with next(steps):
            alone.model(torch.ones(4, 6)).square().mean().backward()
            for index in order:
                optimizers[index].step()
            if len(order) == 1:
                raise RankLostError("as if a rank had been lost")

    step(1, 0)
    with pytest.raises(RankLostError):
        step(0)


def finish_beside_a_loss(rank: int, world_size: int, port: int, op: str) -> tuple[Changes, list[Tensor]]:
    """Rank 0 finishes step 2, the optimizer of rank 1 fails in it, and rank 2 dies in it."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size), "int8+ef", op)
    elastic, changes = training.elastic(timeout=20)
    for num_runs, step in enumerate(elastic.steps(NUM_STEPS), 1):
        with step:
            if num_runs == 3 and rank == 1:
                training.optimizer.register_step_pre_hook(fail_once())
            if num_runs == 3 and rank == 2:
                training.optimizer.register_step_pre_hook(lambda *_: end_now())
            training.step(step.index)
    return changes, [parameter.detach() for parameter in training.model.parameters()]


@pytest.mark.parametrize("op", ["mean", "mean_of_used", "sum"])
def test_residuals_of_a_finished_step_fit_a_smaller_group(store: TCPStore, op: str) -> None:
    ran = run_ranks(finish_beside_a_loss, 3, store.port, op, lost=[2])
    (changes, _), *_ = ran
    assert changes == [(3, {0: 3, 1: 2})]
    expected = run_ranks(replay, 3, "int8+ef", [0, 1, 2], changes, op)
    for rank in (0, 1):
        weights = ran[rank][1]
        torch.testing.assert_close(weights, expected[rank][: len(weights)], rtol=0, atol=0)


def repeat_a_step(rank: int, world_size: int, port: int, fails: bool) -> list[Tensor]:
    """Step 1 fails once. Gradients are dropped behind the optimizer's step, as some loops do."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = Elastic(model, optimizer, fastsync.attach(model, ignored_states=[model[1]]))
    for num_runs, step in enumerate(elastic.steps(3), 1):
        with step:
            model(torch.full((4, 3), 1.0 + step.index)).square().mean().backward()
            if fails and num_runs == 2:
                raise RankLostError("as if a rank had been lost")
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_step_that_runs_again_drops_what_is_left_to_each_rank(store: TCPStore) -> None:
    (expected,) = run_ranks(repeat_a_step, 1, store.port, False)
    store_of_another = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (weights,) = run_ranks(repeat_a_step, 1, store_of_another.port, True)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def die_while_it_shares(rank: int, world_size: int, port: int, compression: str) -> tuple[Changes, list[Tensor]]:
    """Rank 0 alone finishes step 2, and dies amid giving the others its state."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size), compression)
    elastic, changes = training.elastic(timeout=20)
    if rank == 0:
        training.sync._init_sync = lambda root: end_now()
    for num_runs, step in enumerate(elastic.steps(NUM_STEPS), 1):
        with step:
            if num_runs == 3 and rank != 0:
                training.optimizer.register_step_pre_hook(fail_once())
            training.step(step.index)
    return changes, training.result()


@pytest.mark.parametrize("compression", ["fp16", "int8+ef", "lowrank:1"])
def test_a_step_whose_result_is_lost_with_its_rank_is_taken_back(store: TCPStore, compression: str) -> None:
    """With the residuals, scales and factors that had been changed for that result, or came with it."""
    ran = run_ranks(die_while_it_shares, 3, store.port, compression, lost=[0])
    assert check(ran, [0, 1, 2], compression) == [(2, {1: 2, 2: 2})]


def catch_an_error(rank: int, world_size: int, port: int, steps_on: bool) -> tuple[int, int, list[Tensor]]:
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler])
    num_runs, num_backwards = 0, 0

    def backward(loss: Tensor) -> None:
        nonlocal num_backwards
        loss.backward()
        num_backwards += 1

    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if (rank, num_runs) != (1, 3):
                training.step(step.index, backward)
                continue
            with contextlib.suppress(StopIteration):
                training.step(step.index, partial(fail_and_catch, training, steps_on))
    return num_runs, num_backwards, training.result()


def fail_and_catch(training: Training, steps_on: bool, loss: Tensor) -> None:
    """Some gradients are on their way when it fails. Then the block goes on to its optimizer, or to its end."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = training.model[0].weight.register_hook(fail)
    with contextlib.suppress(RuntimeError):
        loss.backward()
    handle.remove()
    time.sleep(0.5)  # the others have got what was left
    if not steps_on:
        raise StopIteration


@pytest.mark.parametrize("steps_on", [False, True])
def test_a_step_whose_error_one_rank_has_caught_runs_again_on_all(store: TCPStore, steps_on: bool) -> None:
    ran = run_ranks(catch_an_error, 3, store.port, steps_on)
    expected = run_ranks(replay, 3, "none", [0, 1, 2], [])
    for rank, (num_runs, num_backwards, result) in enumerate(ran):
        assert num_runs == NUM_STEPS + 1
        assert num_backwards == NUM_STEPS  # the others' raised, so that no scaler or scheduler has seen nan
        torch.testing.assert_close(result, expected[rank], rtol=0, atol=0)


def fail_beside_a_collective(rank: int, world_size: int, port: int) -> list[int]:
    """Rank 1 leaves a step, and lives. The others wait for it in a collective of their own, before backward."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler])
    fails = rank == 1
    for step in elastic.steps(NUM_STEPS):
        with step:
            if fails and step.index == 3:
                fails = False
                raise RankLostError("as if a rank had been lost")
            dist.all_reduce(torch.ones(1), group=elastic.group)
            training.step(step.index)
    return elastic.members


def test_a_rank_that_gives_up_ends_a_collective_of_the_others(store: TCPStore) -> None:
    assert run_ranks(fail_beside_a_collective, 3, store.port) == [[0, 1, 2]] * 3


def break_off(
    rank: int, world_size: int, port: int, ends: dict[int, int], amid: bool = False
) -> tuple[int, list[Tensor]]:
    """Takes steps, of which some ranks take fewer. These live on until the others are done.

    Args:
        ends: how many steps these ranks take.
        amid: whether they break out of the block of the next step, before its backward.
    """
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=600)
    num_runs = 0
    for step in elastic.steps(NUM_STEPS):
        num_runs += 1
        with step:
            if amid and step.index == ends.get(rank):
                break
            training.step(step.index)
        if not amid and step.index + 1 == ends.get(rank, NUM_STEPS):
            break
    result, store = training.result(), TCPStore("127.0.0.1", port, is_master=False)
    if rank not in ends:
        store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(world_size) if each not in ends])
    return num_runs, result


@pytest.mark.parametrize("amid", [False, True], ids=["behind a block", "in a block"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_others_go_on_without_a_rank_that_breaks_off(store: TCPStore, shared_memory: bool, amid: bool) -> None:
    """Long before the time-out, which is ten minutes."""
    ran = run_ranks(break_off, 3, store.port, {1: 3}, amid, timeout=60, shared_memory=shared_memory)
    without_1 = [(3, {0: 3, 2: 3})]
    expected = run_ranks(replay, 3, "none", [0, 1, 2], without_1, shared_memory=shared_memory)
    for rank in (0, 2):
        torch.testing.assert_close(ran[rank][1], expected[rank], rtol=0, atol=0)


def test_a_training_ends_where_all_ranks_break_off(store: TCPStore) -> None:
    ran = run_ranks(break_off, 3, store.port, dict.fromkeys(range(3), 3), timeout=60)
    assert [num_runs for num_runs, _ in ran] == [3] * 3
    weights = [result[:8] for _, result in ran]
    torch.testing.assert_close(weights[1:], weights[:1] * 2, rtol=0, atol=0)


def train_apart(rank: int, world_size: int, port: int) -> tuple[list[int], Tensor]:
    """Two pairs of ranks, each with a training of its own. Rank 3 dies."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    pair = [0, 1] if rank < 2 else [2, 3]
    training = Training(pair)
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=20)
    for step in elastic.steps(NUM_STEPS):
        with step:
            if (rank, step.index) == (3, 2):
                end_now()
            training.step(step.index)
    return elastic.members, training.model[0].weight.detach()


def test_groups_of_ranks_train_apart(store: TCPStore) -> None:
    first, second, third, _ = run_ranks(train_apart, 4, store.port, lost=[3], timeout=60)
    assert [first[0], second[0], third[0]] == [[0, 1], [0, 1], [0]]
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], third[1])


def die_before_a_child(rank: int, world_size: int, port: int) -> list[int]:
    """Rank 1 dies. A child that it has forked, as a DataLoader forks workers, lives on, with all its descriptors."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=600)
    for step in elastic.steps(NUM_STEPS):
        with step:
            if (rank, step.index) == (1, 3):
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                end_now()
            training.step(step.index)
    return elastic.members


def test_a_death_is_known_although_a_child_lives_on(store: TCPStore) -> None:
    """Long before the time-out, which is ten minutes."""
    ran = run_ranks(die_before_a_child, 3, store.port, lost=[1], timeout=25)
    assert ran[0] == ran[2] == [0, 2]


def join_with_another_model(rank: int, world_size: int, port: int) -> list[int] | str:
    os.environ[STORE] = f"127.0.0.1:{port}"
    is_new = rank == 2
    if is_new:
        os.environ[JOINS] = "1"
    training = Training([2] if is_new else [0, 1])
    if is_new:
        training.sync.detach()
        training.model[-1] = nn.Linear(16, 4)
        training.optimizer = torch.optim.Adam(training.model.parameters())
        group = dist.new_group([2], use_local_synchronization=True)
        training.sync = fastsync.attach(training.model, bucket_cap_mb=0.0003, process_group=group)
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler])
    try:
        for step in elastic.steps(NUM_STEPS):
            with step:
                training.step(step.index)
                while rank == 0 and step.index == 0 and not elastic._step.wants_change:
                    time.sleep(0.01)
    except ValueError as error:
        return str(error)
    return elastic.members


def test_a_new_rank_with_another_model_ends_alone(store: TCPStore) -> None:
    ran = run_ranks(join_with_another_model, 3, store.port)
    assert ran[:2] == [[0, 1], [0, 1]]
    assert "the ranks do not agree on what to synchronise: rank 0, 1: " in ran[2]


def stop_one(rank: int, world_size: int, port: int, folder: str) -> list[int] | str:
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=6)
    pid, fails_in = Path(folder) / "pid", [5, 6, 7]
    try:
        for step in elastic.steps(NUM_STEPS):
            with step:
                if (rank, step.index) == (1, 3):
                    pid.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if rank == 2 and step.index in fails_in:  # so that the stopped rank is several memberships late
                    fails_in.remove(step.index)
                    raise RankLostError("as if a rank had been lost")
                training.step(step.index)
    except RuntimeError as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return elastic.members


def test_a_rank_that_wakes_too_late_ends_by_itself(store: TCPStore, tmp_path: Path) -> None:
    ran = run_ranks(stop_one, 3, store.port, str(tmp_path))
    assert ran[0] == ran[2] == [0, 2]
    assert "ranks [0, 2] have gone on without rank 1, which was silent for 6 s" in ran[1]


def fail_alone(rank: int, world_size: int, port: int, min_ranks: int) -> list[int] | str:
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(
        training.model, training.optimizer, training.sync, state=[training.scheduler], timeout=3, min_ranks=min_ranks
    )
    try:
        for step in elastic.steps(NUM_STEPS):
            with step:
                if (rank, step.index) == (1, 3):
                    raise RuntimeError("a mistake in the script")
                training.step(step.index)
    except RuntimeError as error:
        return str(error)
    return elastic.members


@pytest.mark.parametrize("min_ranks", [1, 3])
def test_a_rank_whose_script_fails_is_a_lost_one(store: TCPStore, min_ranks: int) -> None:
    ran = run_ranks(fail_alone, 3, store.port, min_ranks)
    assert ran[1] == "a mistake in the script"
    if min_ranks == 1:
        assert ran[0] == ran[2] == [0, 2]
    else:
        assert all(
            "2 of ranks [0, 1, 2] are left, and min_ranks=3; no others have joined" in ran[each] for each in (0, 2)
        )


def change_often(rank: int, world_size: int, port: int) -> list[tuple[int, int]]:
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training(range(world_size))
    elastic = Elastic(training.model, training.optimizer, training.sync, state=[training.scheduler])
    left: list[tuple[int, int]] = []
    for step in elastic.steps(24):
        has_changed = len(left) > step.index
        with step:
            if not has_changed:
                left.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
                raise RankLostError("as if a rank had been lost")
            training.step(step.index)
    return left


def test_changes_leave_nothing_behind(store: TCPStore) -> None:
    for left in run_ranks(change_often, 2, store.port):
        descriptors, threads = zip(*left, strict=True)
        assert max(descriptors[12:]) <= max(descriptors[4:12])
        assert max(threads[12:]) <= max(threads[4:12])
    assert store.num_keys() < 50


@pytest.fixture
def alone(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv(STORE, f"127.0.0.1:{store.port}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Training([0])
    dist.destroy_process_group()


def part(rank: int, world_size: int, port: int, cause: str) -> tuple[int, str]:
    """Rank 1 does what the others do not, in step 3 or right after it."""
    kept = TCPStore("127.0.0.1", port, is_master=False)
    training = Training(range(world_size))
    elastic, changes = training.elastic(timeout=20, store=kept)

    def train() -> None:
        for step in elastic.steps(60):
            with step:
                if step.index == 3 and rank == 1 and cause == "a backward more":
                    training.model(torch.ones(8, 6)).sum().backward()
                if step.index == 3 and rank == 1 and cause == "other weights":
                    torch.nn.init.zeros_(training.model[0].weight)
                training.step(step.index)

    with pytest.raises(RanksDifferError) as raised:
        train()
    assert changes == []
    return elastic._step.num_finished, str(raised.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cause", ["a backward more", "other weights"])
def test_ranks_that_have_parted_all_end(store: TCPStore, world_size: int, cause: str) -> None:
    """None of them takes another for lost, and goes on."""
    told = run_ranks(part, world_size, store.port, cause)
    message = "do not belong together" if cause == "a backward more" else "hold different weights"
    assert all(message in error for _, error in told)
    if cause == "other weights":
        assert {num_finished for num_finished, _ in told} == {51}


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, OptimizerWrapper], ids=["torch's", "wrapped"])
def test_a_second_optimizer_step_is_refused(alone: Training, wrap: Callable[[Optimizer], Optimizer]) -> None:
    elastic = Elastic(alone.model, wrap(alone.optimizer), alone.sync, state=[alone.scheduler])
    steps = elastic.steps(3)
    next(steps).__enter__()
    alone.step(0)
    with pytest.raises(ValueError, match="the optimizer steps twice in one step"):
        alone.step(0)


def test_an_optimizer_step_behind_the_block_is_refused(alone: Training) -> None:
    """Else it would run fine until a rank is lost."""
    alone.step(0)
    steps = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(1)
    with next(steps):
        alone.model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(ValueError, match="the optimizer stepped outside the block of a step"):
        alone.optimizer.step()
    assert [*steps] == []
    alone.step(1)


def test_an_optimizer_step_without_a_sync_is_refused(alone: Training) -> None:
    steps = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(3)
    next(steps).__enter__()
    with pytest.raises(ValueError, match="no backward of this block has averaged"):
        alone.optimizer.step()


def test_the_scalers_other_optimizers_keep_their_stage(alone: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler, scaler])
    critic = nn.Linear(2, 1, bias=False)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1.0)
    scaler.scale(critic(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(of_critic)
    before = critic.weight.detach().clone()
    with next(elastic.steps(3)):
        scaler.scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
        scaler.unscale_(alone.optimizer)
        raise RankLostError("as if a rank had been lost")
    scaler.step(of_critic)
    assert torch.equal(critic.weight, before - 1.0), "unscaled once"


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_what_a_step_changes_is_put_back(alone: Training, num_drawn: int) -> None:
    """Random numbers go on as before, also where half of a pair of normal ones is left, and buffers of any kind."""
    torch.randn(num_drawn)
    buffers = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.empty(0), torch.ones(2, dtype=torch.bool)]
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    steps = elastic.steps(1)
    step = next(steps)
    holder = nn.Module()
    step._with_buffers = [holder]
    for _ in range(2):  # the second time in the memory of the first
        for i, each in enumerate(buffers):
            holder.register_buffer(str(i), each)
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
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    steps = elastic.steps(1)
    with next(steps):
        alone.model.cache = torch.ones(2)
        raise RankLostError("as if a rank had been lost")
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
                raise RankLostError("as if a rank had been lost")
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
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    for run, step in enumerate(elastic.steps(1)):
        with step:
            alone.model.cache += 1
            if run == 0:
                raise RankLostError("as if a rank had been lost")
    assert alone.model.cache.tolist() == [1.0, 1.0]


def test_where_it_is_shows_in_its_text(alone: Training) -> None:
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    assert repr(elastic) == "Elastic(step 0 of rank 0, members [0])"


def test_the_last_step_tells_its_number_after_the_loop(alone: Training) -> None:
    for step in Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(3):
        with step:
            alone.step(step.index)
    assert step.index == 2


def test_a_loop_whose_begin_has_failed_may_be_tried_again(alone: Training) -> None:
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    with patch.object(elastic, "_move", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        next(elastic.steps(3))
    steps = elastic.steps(3)
    with next(steps):
        alone.step(0)
    assert next(steps).index == 1


def test_a_change_between_two_steps_keeps_gradients(alone: Training) -> None:
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    steps = elastic.steps(3)
    with next(steps):
        alone.model(torch.ones(4, 6)).sum().backward()
    elastic._agree(has_ended=False)
    assert alone.model[0].weight.grad is not None


@pytest.mark.parametrize("steps_first", [False, True], ids=["before its step", "after its step"])
def test_a_scaler_takes_the_gradients_of_the_next_run(alone: Training, steps_first: bool) -> None:
    """Although it has unscaled those of the run that has failed, or stepped with them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler, scaler])
    num_runs = 0
    for step in elastic.steps(3):
        num_runs += 1
        with contextlib.ExitStack() as stack:
            if steps_first and num_runs == 2:
                stack.enter_context(pytest.warns(UserWarning, match="has failed after its optimizer had stepped"))
            with step:
                alone.optimizer.zero_grad()
                scaler.scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
                scaler.unscale_(alone.optimizer)
                if num_runs == 2 and steps_first:
                    scaler.step(alone.optimizer)
                if num_runs == 2:
                    raise RankLostError("as if a rank had been lost")
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
            raise RankLostError("as if a rank had been lost")

    elastic = Elastic(alone.model, optimizer, alone.sync, state=[scaler])
    optimizer.register_step_pre_hook(look)
    for step in elastic.steps(3):
        with step:
            scaler.scale(sum(each.sum() for each in alone.model.parameters())).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scales == [4.0] * (4 if fails else 3)


def test_an_error_that_comes_again_and_again_leaves_its_block(alone: Training) -> None:
    runs: list[int] = []

    def train() -> None:
        for step in Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(3):
            runs.append(step.index)
            with step:
                if step.index == 1:
                    raise RankLostError("as if a rank had been lost")
                alone.step(step.index)

    with pytest.raises(RankLostError, match="as if a rank had been lost"):
        train()
    assert runs == [0, 1, 1, 1, 1]


def test_an_error_that_was_caught_outside_the_block_is_told(alone: Training) -> None:
    def train() -> None:
        for step in Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(3):
            with contextlib.suppress(KeyError), step:
                if step.index == 1:
                    raise KeyError("mine")
                alone.step(step.index)

    with pytest.raises(RuntimeError, match="an error has left the block of step 1, so this rank is out"):
        train()


def test_a_step_that_is_not_entered_is_an_error(alone: Training) -> None:
    with pytest.raises(RuntimeError, match="write `with step:` around its code"):
        for _ in Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler]).steps(3):
            pass


def test_what_follows_the_optimizer_is_told_to_be_left_out(alone: Training) -> None:
    elastic = Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])
    steps = elastic.steps(3)
    step, error = next(steps), RankLostError("as if a rank had been lost")
    step.__enter__()
    alone.step(0)
    with pytest.warns(UserWarning, match="step 0 has failed after its optimizer had stepped") as warned:
        assert step.__exit__(type(error), error, None)
    assert warned[0].filename == __file__
    assert next(steps).index == 1


def test_bad_arguments_are_refused(alone: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, sync = alone.model, alone.optimizer, alone.sync
    with pytest.raises(ValueError, match=r"sync: expected what fastsync\.attach"):
        Elastic(model, optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer: expected a torch\.optim\.Optimizer, or a list of them, got list"):
        Elastic(model, [[optimizer]], sync)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"state=.*: expected objects with state_dict.*got int"):
        Elastic(model, optimizer, sync, state=[3])
    with pytest.raises(ValueError, match=r"state: expected a list of objects, got StepLR"):
        Elastic(model, optimizer, sync, state=alone.scheduler)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state: this SGD steps parameters of the model; pass it in optimizer"):
        Elastic(model, optimizer, sync, state=[torch.optim.SGD(model.parameters())])
    with pytest.raises(ValueError, match="model: expected a module"):
        Elastic(model.parameters(), optimizer, sync)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(sync, "_optimizer_shards", object())
        with pytest.raises(ValueError, match="leave shard_optimizer out"):
            Elastic(model, optimizer, sync)
    elastic = Elastic(model, optimizer, sync)
    with pytest.raises(ValueError, match="sync: an Elastic trains with it"):
        fastsync.shard_optimizer(sync, torch.optim.AdamW(model.parameters()), parameter_compression="bf16")
    del elastic
    first = next(iter(model.parameters()))
    with pytest.raises(ValueError, match="does not step all trained parameters"):
        Elastic(model, torch.optim.SGD([first], lr=0.1), sync)
    with pytest.raises(ValueError, match="expected the module that attach"):
        Elastic(nn.Linear(2, 2), optimizer, sync)
    with pytest.raises(ValueError, match="1 ranks have made this Elastic"):
        Elastic(model, optimizer, sync, min_ranks=2)
    with pytest.raises(ValueError, match="min_ranks=0 must be at least 1"):
        Elastic(model, optimizer, sync, min_ranks=0)
    with pytest.raises(ValueError, match="max_ranks=2 must be at least 3"):
        Elastic(model, optimizer, sync, min_ranks=3, max_ranks=2)
    with pytest.raises(ValueError, match="timeout: expected a positive number of seconds"):
        Elastic(model, optimizer, sync, timeout=0)
    monkeypatch.delenv(STORE)
    with pytest.raises(ValueError, match=r"fastsync launch local -n 4 train\.py"):
        Elastic(model, optimizer, sync)


def test_a_store_that_does_not_answer_is_named(alone: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsync.elastic.elastic.STORE_LIMIT", timedelta(seconds=1))
    for place, error, said in (
        ("localhost", ValueError, "FASTSYNC_STORE='localhost': expected HOST:PORT"),
        ("127.0.0.1:1", RuntimeError, "no store answers at 127.0.0.1:1 within 1 s, .* MASTER_ADDR:MASTER_PORT"),
    ):
        monkeypatch.setenv(STORE, place)
        with pytest.raises(error, match=said):
            Elastic(alone.model, alone.optimizer, alone.sync, state=[alone.scheduler])


def test_an_elastic_that_is_dropped_before_its_loop_leaves_the_group_alone(store: TCPStore) -> None:
    run_ranks(drop_before_the_loop, 2, store.port)


def drop_before_the_loop(rank: int, world_size: int, store: int) -> None:
    training = Training(range(world_size))
    elastic, _ = training.elastic(store=TCPStore("localhost", store, is_master=False))
    if rank == 0:
        elastic._membership.watch.close()  # as garbage collection does
    time.sleep(1.0)  # in which the other rank learns of it
    total = torch.ones(1)
    dist.all_reduce(total, group=training.sync._group)
    assert total == world_size
