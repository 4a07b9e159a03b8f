"""A training with an ``Elastic``, and what its ranks have to hold: by a plain loop in one process, or by a replay."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

import fastsync
from fastsync.elastic.elastic import Elastic
from fastsync.elastic.members_store import JOINS, STORE
from fastsync.errors import RankLostError
from fastsync.sync.training_state import TrainingState
from tests import reference
from tests.ranks import run_ranks

NUM_STEPS = 8
Changes = list[tuple[int, dict[int, int]]]
"""The steps before which the members have changed. For each member: how many steps it had finished; -1 if it is new."""
Moment = tuple[int, str | float]
"""A step, and a place in it or the seconds after its begin. Step -1 begins where the Elastic is made."""


class Counter(nn.Module):
    """Counts its forwards in a buffer that each of them replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        return inputs


class Alone:
    """A model whose step draws random numbers, counts in a buffer, and leaves a parameter without a gradient."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), Counter(), nn.Linear(16, 3))
        self.model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        torch.manual_seed(100 + rank)

    def backward(self, index: int, backward: Callable[[Tensor], None] = Tensor.backward) -> None:
        data = torch.Generator().manual_seed(100 * index + self.rank)
        loss = self.model(torch.randn(8, 6, generator=data)).square().mean()
        self.optimizer.zero_grad()
        backward(loss)

    def step(self, index: int, backward: Callable[[Tensor], None] = Tensor.backward) -> None:
        self.backward(index, backward)
        self.optimizer.step()
        self.scheduler.step()

    def shared(self) -> list[Tensor]:
        """What all members have alike."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(each.detach() for each in self.model.parameters()), *moments]

    def result(self) -> tuple[list[Tensor], list[Tensor]]:
        """What all members have alike, and each rank's own."""
        drawn = torch.rand(1)  # tells whether the random state went on as in a step that was not lost
        return self.shared(), [*self.model.buffers(), drawn]


Result = tuple[list[Tensor], list[Tensor]]


class Training(Alone):
    """Averages over the members."""

    def __init__(self, members: Sequence[int], compression: str = "none", op: str = "mean") -> None:
        super().__init__(dist.get_rank())
        random_state = torch.get_rng_state()
        group = dist.new_group(list(members), use_local_synchronization=True)
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=0.0003, process_group=group, op=op)
        torch.set_rng_state(random_state)

    def elastic(self, *state: Any, **options: Any) -> Elastic:
        """Shares the scheduler, and these states."""
        return Elastic(self.model, self.optimizer, self.sync, state=[self.scheduler, *state], **options)

    def noting(self, **options: Any) -> tuple[Elastic, Changes]:
        """Returns an Elastic, and a list that gets the step and the progress of all members at each change."""
        changes: Changes = []

        def note(members: Sequence[int]) -> None:
            changes.append((elastic._step.num_finished, elastic._members.now.progress))

        elastic = self.elastic(on_change=note, **options)
        return elastic, changes


def begun(store: int | str, compression: str = "none", op: str = "mean", **options: Any) -> tuple[Training, Elastic]:
    """A training of all ranks, with the store at this port, or in this file."""
    if isinstance(store, str):
        options["store"] = dist.FileStore(store, -1)
    else:
        os.environ[STORE] = f"127.0.0.1:{store}"
    training = Training(range(dist.get_world_size()), compression, op)
    return training, training.elastic(**options)


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def as_if_lost() -> RankLostError:
    return RankLostError("as if a rank had been lost")


def fail_once() -> Callable[..., None]:
    """Makes a hook of an optimizer's step."""
    errors = [as_if_lost()]

    def fail(*_: object) -> None:
        if errors:
            raise errors.pop()

    return fail


def go_on(
    rank: int,
    world_size: int,
    store: int | str,
    compression: str,
    lost: dict[int, Moment],
    new: Sequence[int] = (),
    timeout: float = 20.0,
) -> tuple[Changes, Result]:
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
    elastic, changes = training.noting(timeout=timeout, store=kept)
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


# ---- what they have to hold -----------------------------------------------------------------------------------------


def play(world_size: int, first: Sequence[int], changes: Changes) -> dict[int, Result]:
    """A training of these memberships at full width, as a plain loop in one process, for ranks that share memory."""
    with torch.random.fork_rng(devices=[]):
        return _play(world_size, first, changes)


def _play(world_size: int, first: Sequence[int], changes: Changes) -> dict[int, Result]:
    members, ranks, random_states = [*first], {}, {}
    for rank in range(world_size):
        ranks[rank], random_states[rank] = Alone(rank), torch.get_rng_state()
    for index in range(NUM_STEPS):
        for _, progress in (change for change in changes if change[0] == index):
            members = [*progress]
            if min(progress.values()) < index:
                root = next(ranks[each] for each, done in progress.items() if done == index)
                for each in members:
                    for name in ("model", "optimizer", "scheduler"):
                        getattr(ranks[each], name).load_state_dict(copy.deepcopy(getattr(root, name).state_dict()))
        for each in members:
            torch.set_rng_state(random_states[each])
            ranks[each].backward(index)
            random_states[each] = torch.get_rng_state()
        trained = [[weight for weight in ranks[each].model.parameters() if weight.grad is not None] for each in members]
        means = reference.all_reduce_mean([[weight.grad for weight in each] for each in trained], reduce="fp32")
        for each, weights in zip(members, trained, strict=True):
            for weight, mean in zip(weights, means, strict=True):
                weight.grad = mean
            ranks[each].optimizer.step()
            ranks[each].scheduler.step()
    results = {}
    for each in members:
        torch.set_rng_state(random_states[each])
        results[each] = ranks[each].result()
    return results


def replay(
    rank: int, world_size: int, compression: str, first: list[int], changes: Changes, op: str = "mean"
) -> Result | None:
    """Takes the same steps with the same ranks, none of which is lost: for what a compression keeps from step to step.

    It goes over to other groups as ``Elastic`` does. ``play`` tells whether that is right.
    """
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


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def check(
    ran: Sequence[tuple[Changes, Result] | None],
    first: list[int],
    compression: str,
    run: Callable[..., list[Result | None]] = run_ranks,
    plays: bool = True,
) -> Changes:
    """Checks that all have gone through the same changes, and hold what they have to. Returns the changes.

    That is what a plain loop gives at full width, unless not ``plays``, and otherwise a replay.
    """
    left = {rank: each for rank, each in enumerate(ran) if each is not None}
    changes = next(changes for rank, (changes, _) in left.items() if rank in first)
    print(f"changes {changes}")
    plays &= compression == "none"
    expected: Any = play(len(ran), first, changes) if plays else run(replay, len(ran), compression, first, changes)
    of_first = left[min(left)][1]
    for rank, (seen, result) in left.items():
        assert seen == (changes if rank in first else changes[-len(seen) :])
        assert_same(result[0], of_first[0])
        assert_same(result, expected[rank])
    return changes
