"""A rank that is killed or stopped, wherever it is in what ranks do to share memory: the others raise and name it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.system_calls import OPENS_MEMORY, Call, claims_above, end_at
from tests.forked import state_of, until
from tests.ranks import run_ranks

STOPPED = signal.SIGSTOP
KILLED = signal.SIGKILL
# The time-out of the groups of which a rank is stopped, and killed: which is noticed long before that.
TIMEOUTS = {STOPPED: timedelta(seconds=6), KILLED: timedelta(seconds=600)}
MOST_SECONDS = 25.0
FUTEX_WAIT = Call("futex", 1, 0)  # on a word that processes share, which nobody else waits for like that

Group = dist.ProcessGroup
Step = Callable[[], object]
IsLost = Callable[[Step, signal.Signals], None]
Others = Callable[[Step, int], None]


def step_of(entry_point: str, group: Group) -> Step:
    """What takes a step, the first of which shares the memory."""
    two_shot = entry_point == "two_shot"
    model: nn.Module = nn.Linear(30, 30_000 if two_shot else 20)
    if entry_point == "hook":
        model = DistributedDataParallel(model, process_group=group)
        fastsync.register_comm_hook(model)
    else:
        compression = fastsync.Compression("bf16", reduce="fp32", algorithm="two_shot") if two_shot else "none"
        fastsync.attach(model, compression, process_group=group)

    def step() -> None:
        model.zero_grad()
        model(torch.full((2, 30), 1.0 + group.rank())).sum().backward()

    return step


# ---- where the lost rank is, and what the others do -----------------------------------------------------------------


def in_set_up(step: Step, how: signal.Signals, *, at: Call) -> None:
    end_at(at, how)
    step()


def before_a_step(step: Step, how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


def in_a_step(step: Step, how: signal.Signals) -> None:
    """Its gradients are there, and it waits for those of the others."""
    end_at(FUTEX_WAIT, how)
    step()


def take_one_step(step: Step, lost: int) -> None:
    step()


def take_two_steps_once_it_is_lost(step: Step, lost: int) -> None:
    until(lambda: state_of(lost) in ("", "T"), "its end")
    step()
    step()


class Case(NamedTuple):
    world_size: int
    entry_point: str
    lost: int
    is_lost: IsLost
    others: Others
    waits_for: str
    """What of the lost rank's the others wait for in the shared memory; empty where it is lost in the set-up."""


CASES = {
    **{
        f"{at.name}, rank {lost}, {entry_point}": Case(
            size, entry_point, lost, partial(in_set_up, at=at), take_one_step, ""
        )
        for size, entry_point, lost, at in [
            (2, "attach", 0, Call("memfd_create")),
            (2, "attach", 1, Call("fallocate")),
            (3, "attach", 2, OPENS_MEMORY),
            (3, "hook", 1, OPENS_MEMORY),
            (3, "attach", 0, Call("ftruncate", 1, 1, is_more=True)),  # of what the others are to open
            (3, "hook", 1, claims_above(1)),  # which all have opened
        ]
    },
    "before a step, attach": Case(2, "attach", 1, before_a_step, take_one_step, "'s gradients"),
    "before a step, hook": Case(2, "hook", 0, before_a_step, take_one_step, "'s gradients"),
    # The others have its gradients, but it has not read theirs.
    "in a step, attach": Case(
        2, "attach", 0, in_a_step, take_two_steps_once_it_is_lost, " to have read the gradients of the step before"
    ),
    "in a step, hook": Case(
        2, "hook", 1, in_a_step, take_two_steps_once_it_is_lost, " to have read the gradients of the step before"
    ),
    # The others have its gradients, but not the means that it was to make.
    "in a step, two_shot": Case(3, "two_shot", 2, in_a_step, take_two_steps_once_it_is_lost, "'s gradients"),
}


def _all_cases(rank: int, world_size: int, how: signal.Signals) -> tuple[str, float]:
    """Each case has a group of its own, so that all of them wait at the same time. What the error says, and when."""
    mine: tuple[Case, Group] | None = None
    first = 0
    for case in CASES.values():
        members = list(range(first, first + case.world_size))
        group = dist.new_group(members, timeout=TIMEOUTS[how])
        if rank in members:
            mine = case, group
        first += case.world_size
    assert mine is not None
    case, group = mine
    step = step_of(case.entry_point, group)
    if case.waits_for:
        # Two, for after the first DDP makes its buckets anew, and they share memory anew.
        step()
        step()
    pids = [0] * case.world_size
    dist.all_gather_object(pids, os.getpid(), group=group)
    dist.barrier()  # before any is lost, so no rank waits for another to have read the gradients of these steps
    if group.rank() == case.lost:
        case.is_lost(step, how)
        raise AssertionError("this rank was to be lost")
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        case.others(step, pids[case.lost])
    return str(error.value), time.monotonic() - began


def lost_ranks() -> list[int]:
    sizes = [case.world_size for case in CASES.values()]
    return [sum(sizes[:index]) + case.lost for index, case in enumerate(CASES.values())]


@pytest.mark.parametrize("how", [STOPPED, KILLED])
def test_a_lost_rank_is_named_in_time(how: signal.Signals) -> None:
    sizes = sum(case.world_size for case in CASES.values())
    told = iter(run_ranks(_all_cases, sizes, how, lost=lost_ranks()))
    for name, case in CASES.items():
        for rank in range(case.world_size):
            of_rank = next(told)
            if rank == case.lost:
                continue
            said, seconds = of_rank
            context = f"{name}: rank {rank} after {seconds:.1f} s: {said}"
            print(context)
            assert said.startswith(f"fastsync: averaging bucket 0 failed on rank {rank} of {case.world_size}: "), (
                context
            )
            assert re.search(rf"Where the .*ranks are: rank {case.lost}( \(global \d+\))?: no answer", said), context
            if case.waits_for and how == STOPPED:
                assert f"waited for rank {case.lost}{case.waits_for} until the process group's time-out" in said, (
                    context
                )
            if case.waits_for and how == KILLED:
                assert f"rank {case.lost} has ended, or has left the process group, and this rank waits" in said, (
                    context
                )
            assert seconds < MOST_SECONDS, context
