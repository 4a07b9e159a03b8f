"""A wait for other ranks that fails says who is missing: which ranks do not answer, and where the others are."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.entry_points import Averaged, average
from tests.ppo.test_launch_torchrun import LIMIT, ROOT, free_port, launched
from tests.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.end_to_end

TIMEOUT = timedelta(seconds=6)
TWO_SHOT = fastsync.Compression("bf16", reduce="fp32", algorithm="two_shot")
GOOD_STEPS = 2

NO_ANSWER = "no answer, so it is stopped or gone, or has no engine of this group"
AVERAGING = "averaging in step 2 of the engine of parameter 0.weight"
IN_HOOK = "averaging in step 2 of a DDP hook"
ON_EVERY_RANK = ". Do what is said after 'because' on every rank, between the same steps, or on none"
LOOK_THERE = ". Look first at the output of the rank that gives no answer"
CURE = ". Where ranks have different numbers of batches, put the training loop inside `with "

Group = dist.ProcessGroup
Case = Callable[[Group], str]
"""What the ranks of a group do. Returns what the error says of where the ranks are, or nothing where there is none."""


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((2, 30), 1.0 + dist.get_rank())).sum().backward()


def error_of(step: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match=r"^fastsync: .* failed on rank .* of ") as error:
        step()
    return str(error.value)


def where_ranks_are(model: nn.Module) -> str:
    """What the error of its next backward says."""
    return error_of(lambda: backward(model)).partition(". Where the ")[2]


def trained(way: str | fastsync.Compression, group: Group) -> tuple[nn.Module, Any]:
    """A model and its handle after the good steps."""
    model = small_model()
    if way == "hook":
        model = DistributedDataParallel(model, process_group=group)
        handle: object = fastsync.register_comm_hook(model, "bf16")
    else:
        handle = fastsync.attach(model, way, process_group=group)
    for _ in range(GOOD_STEPS):
        backward(model)
    return model, handle


def is_stopped(group: Group, way: str | fastsync.Compression, who: int, seconds: float = 0.0) -> str:
    """So long after its good steps, until all others have raised."""
    model, _ = trained(way, group)
    time.sleep(seconds)
    pids = [0] * group.size()
    dist.all_gather_object(pids, os.getpid(), group=group)
    if group.rank() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        return where_ranks_are(model)
    finally:
        store = dist.distributed_c10d._get_default_store()
        if group.size() == 2 or store.add(f"raised/{pids[who]}", 1) == group.size() - 1:
            os.kill(pids[who], signal.SIGCONT)


def last_has_ended(group: Group) -> str:
    model, handle = trained("none", group)
    if group.rank() == 0:
        return where_ranks_are(model)
    del model, handle
    gc.collect()
    time.sleep(TIMEOUT.total_seconds())
    return ""


def last_is_busy(group: Group) -> str:
    model, _ = trained("none", group)
    if group.rank() == 1:
        time.sleep(TIMEOUT.total_seconds() + 4)
        return ""
    return where_ranks_are(model)


def live_until_all_have_raised(group: Group) -> None:
    """With its engine, which answers."""
    store = dist.distributed_c10d._get_default_store()
    store.add(f"has raised/{group.group_name}", 1)
    with contextlib.suppress(dist.DistNetworkError):  # all have raised, and the rank that holds the store has left
        while store.add(f"has raised/{group.group_name}", 0) < group.size():
            time.sleep(0.05)


CASES: dict[str, tuple[int, Case, dict[int, str]]] = {
    # How many ranks do what, and where each of them is, as those that raise have to say.
    "attached, stopped": (2, partial(is_stopped, way="none", who=1), {1: NO_ANSWER, 0: AVERAGING}),
    "two_shot, stopped": (
        3,
        partial(is_stopped, way=TWO_SHOT, who=2),
        {2: NO_ANSWER, 0: AVERAGING, 1: AVERAGING},
    ),
    "hook, stopped": (2, partial(is_stopped, way="hook", who=1), {1: NO_ANSWER, 0: IN_HOOK}),
    "ended": (2, last_has_ended, {1: NO_ANSWER, 0: AVERAGING}),
    "busy": (2, last_is_busy, {1: "in no sync, after step 1 of the engine of parameter 0.weight", 0: AVERAGING}),
}


def of_rank(rank: int, cases: Iterable[tuple[int, Any]], timeout: timedelta) -> tuple[Any, Group]:
    """Of cases of so many ranks each, the rank's, and its group. So all of them wait at the same time."""
    first, mine = 0, None
    for size, case in cases:
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=timeout)
        if rank in members:
            mine = case, group
        first += size
    assert mine is not None
    return mine


def _positions(said: str) -> dict[int, str]:
    """By rank of the group, from "ranks are: rank 1 (global 3): no answer; rank 0 (global 2), 2: averaging"."""
    positions = {}
    for camp in (
        said.partition(CURE)[0]
        .partition(LOOK_THERE)[0]
        .partition(ON_EVERY_RANK)[0]
        .removeprefix("ranks are: ")
        .split("; ")
    ):
        ranks, where = re.fullmatch(r"rank ([^:]+): (.*)", camp).groups()
        where = re.sub(rf"^({NO_ANSWER}), last heard of \d+ s ago: .*", r"\1", where)
        positions.update(dict.fromkeys(map(int, re.sub(r" \(global \d+\)", "", ranks).split(", ")), where))
    return positions


def _takes_its_case(rank: int, world_size: int) -> str:
    case, group = of_rank(rank, [each[:2] for each in CASES.values()], TIMEOUT)
    return case(group)


def test_every_rank_says_who_is_missing() -> None:
    said = iter(run_ranks(_takes_its_case, sum(size for size, *_ in CASES.values()), shared_memory=False))
    for name, (size, _, where) in CASES.items():
        cure = CURE + ("Join([ddp_model]):`" if name.startswith("hook") else "sync.join():`")
        for rank in range(size):
            text, raises = next(said), where[rank].startswith("averaging")
            assert (_positions(text) if text else None) == (where if raises else None), (name, rank, text)
            is_silent = any(at.startswith("no answer") for at in where.values())
            assert text.endswith(LOOK_THERE if is_silent else cure) == raises, (name, rank, text)


@on_ranks(2)
def test_join_is_no_advice_to_those_who_are_in_it(rank: int, world_size: int) -> None:
    """Another rank's own error has ended its block."""
    group = dist.new_group(timeout=TIMEOUT)
    model, handle = trained("none", group)
    said = ""
    with contextlib.suppress(ArithmeticError), handle.join():
        if rank == 0:
            said = where_ranks_are(model)
        raise ArithmeticError
    live_until_all_have_raised(group)
    if rank == 0:
        assert _positions(said)[1].startswith("in no sync")
        assert CURE not in said


@dataclass(frozen=True)
class Alone:
    """What rank 1 does after some steps, and the others do not. Which entry point, and how many ranks."""

    what: Callable[[Averaged], object]
    why: str
    entry_point: str = "attach"
    compression: str = "none"
    size: int = 2
    error: str = ""
    """Of another rank, if not that rank 1 has failed."""


def set_weight(step: Averaged) -> None:
    step.handle.set_weight(2.0)


def set_compression(step: Averaged) -> None:
    step.compression = "fp16"


def piggyback(step: Averaged) -> None:
    step.handle.piggyback("loss", torch.tensor(1.0))


def join(step: Averaged) -> object:
    """Returns the block, which ends with it."""
    block = step.handle.join()
    block.__enter__()
    return block


def load_state(step: Averaged) -> None:
    step.handle.load_state_dict(step.handle.state_dict())


def freeze(step: Averaged) -> None:
    next(step.model.parameters()).requires_grad_(False)


SET, WEIGHT, FROZEN = "its compression was set", "a weight was set", "parameter 0.weight was frozen"
ANEW = "rank 1 has made its buckets anew, as after a parameter was frozen"
ALONE = {
    "weight": Alone(set_weight, WEIGHT),
    "weight, int8, 3 ranks": Alone(set_weight, WEIGHT, compression="int8", size=3),
    "weight, hook": Alone(set_weight, WEIGHT, "hook"),
    "compression": Alone(set_compression, SET, compression="int8"),
    "compression, synchronize": Alone(set_compression, SET, "synchronize"),
    "compression, hook": Alone(set_compression, SET, "hook"),
    "compression, hook, int8, 3 ranks": Alone(set_compression, SET, "hook", "int8", size=3),
    "compression, sharded": Alone(set_compression, SET, "sharded"),
    "state, hook": Alone(load_state, "a state was loaded", "hook"),
    "piggyback": Alone(piggyback, "piggybacked value 'loss' is new"),
    "join": Alone(join, "join() began"),
    "frozen": Alone(freeze, FROZEN, error=ANEW),
    "frozen, int8, 3 ranks": Alone(freeze, FROZEN, compression="int8", size=3, error=ANEW),
}
LONG = timedelta(seconds=600)


def _each_does_it_alone(rank: int, world_size: int) -> str:
    """What the error says. No group has a time-out that the test reaches."""
    case, group = of_rank(rank, [(case.size, case) for case in ALONE.values()], LONG)
    averaged = average(case.entry_point, small_model(), case.compression, group=group)

    def step() -> None:
        averaged.model.zero_grad()
        averaged.backward(averaged.model(torch.full((2, 30), 1.0 + rank)).sum())

    for _ in range(GOOD_STEPS):
        step()
    done = case.what(averaged) if group.rank() == 1 else None
    said = error_of(step)
    live_until_all_have_raised(group)
    del done
    return said


@pytest.mark.parametrize("shared_memory", [False, True])
def test_ranks_do_not_wait_for_the_time_out_after_what_one_did_alone(shared_memory: bool) -> None:
    sizes = [case.size for case in ALONE.values()]
    said = iter(run_ranks(_each_does_it_alone, sum(sizes), timeout=60, shared_memory=shared_memory))
    for name, case in ALONE.items():
        for rank in range(case.size):
            text = next(said)
            told = re.match(r"fastsync: (.*?) failed on rank (\d) of \d: (.*?)\. Where the ranks are: ", text)
            assert told, (name, text)
            assert int(told[2]) == rank
            assert told[1].startswith("agreement" if rank == 1 else "averaging"), (name, text)
            if rank == 1:
                assert "averaged without agreeing anew" in told[3], (name, text)
                assert told[3].endswith(f"What it did and they did not: {case.why}"), (name, text)
            elif shared_memory:
                assert told[3].startswith(case.error or "rank 1 has failed"), (name, text)
            where = rf"rank 1( \(global \d+\))?: agreeing before .*, because {re.escape(case.why)}"
            assert re.search(where, text), (name, text)
            assert ON_EVERY_RANK in text, (name, text)  # more follows if another rank has ended its sync by then


class _Late(torch.autograd.Function):
    """Backward comes so many seconds later here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


LATE_SECONDS = 5.0  # more than it takes to find out that a rank never comes


@on_ranks(2, cases={"entry_point": ["hook", "attach"]})
def test_a_rank_that_is_late_is_waited_for(rank: int, world_size: int, entry_point: str) -> None:
    """Also where some of its buckets are on their way, and it has to agree on the others."""
    torch.manual_seed(rank)
    first, second = nn.Linear(30, 20), nn.Linear(20, 10)
    averaged = average(entry_point, nn.Sequential(first, second), bucket_cap_mb=0.0005)
    for step in range(GOOD_STEPS + 1):
        if step == GOOD_STEPS:
            averaged.compression = "bf16"
        is_late = rank == 0 and step == GOOD_STEPS
        handle = second.register_forward_pre_hook(
            lambda _module, args, late=is_late: (_Late.apply(args[0], LATE_SECONDS if late else 0.0),)
        )
        averaged.model.zero_grad()
        averaged.backward(averaged.model(torch.full((2, 30), 1.0 + rank)).sum())
        handle.remove()
    assert averaged.grads()[0] is not None


def _open_group_over_tcp(rank: int, world_size: int, port: int) -> Group:
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return dist.distributed_c10d._get_default_group()


def _is_stopped_over_tcp(rank: int, world_size: int, port: int, who: int) -> str:
    return is_stopped(_open_group_over_tcp(rank, world_size, port), "none", who=who, seconds=1.5)


def _waits_in_the_store(rank: int, world_size: int, port: int) -> str:
    group = _open_group_over_tcp(rank, world_size, port)
    model, _ = trained("none", group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["raised"], timedelta(seconds=60))
        return ""
    try:
        return where_ranks_are(model)
    finally:
        store.set("raised", "")


def test_a_rank_that_waits_in_the_store_is_not_called_gone() -> None:
    """As one that waits for others in ``dist.new_group``."""
    said, _ = run_ranks(_waits_in_the_store, 2, free_port())
    assert _positions(said) == {1: "in no sync, after step 1 of the engine of parameter 0.weight", 0: AVERAGING}


def _are_in_two_groups(rank: int, world_size: int, port: int) -> str:
    _open_group_over_tcp(rank, world_size, port)
    models = [nn.ModuleDict({name: nn.Linear(30, 20)}) for name in ("first", 'a "second"')]
    for model in models:
        fastsync.attach(model, process_group=dist.new_group(timeout=TIMEOUT))
    error = error_of(lambda: next(iter(models[rank].values()))(torch.ones(2, 30)).sum().backward())
    live_until_all_have_raised(dist.distributed_c10d._get_default_group())
    return error.partition(". Where the ")[2]


def test_a_rank_that_waits_in_another_group_is_said_to() -> None:
    """By the heartbeats of the group that it does not come to."""
    for said in run_ranks(_are_in_two_groups, 2, free_port()):
        positions = _positions(said)
        for rank, name in enumerate(("first", 'a "second"')):
            where = f"agreeing before step 0 of the engine of parameter {name}.weight, because "
            assert positions[rank].startswith(where)


def test_a_store_that_does_not_answer_is_said() -> None:
    _, said = run_ranks(_is_stopped_over_tcp, 2, free_port(), 0)
    assert said == (
        "other ranks are is not known, for the store of their group does not answer: the process that holds it, the "
        "launcher or rank 0's, is stopped or gone"
    )


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, fastsync

dist.init_process_group("gloo")
model = torch.nn.Linear(3, 2)
sync = fastsync.attach(model)
model(torch.full((1, 3), float(os.environ["RANK"]))).sum().backward()
if os.environ["RANK"] == "1":
    if os.fork() == 0:
        fastsync.attach(torch.nn.Linear(3, 2), init_sync=False)
        sys.exit()
    assert os.wait()[1] == 0
    time.sleep(3)  # rank 0, which holds the store, ends first
"""


def start_ranks(script: str) -> list[subprocess.Popen[str]]:
    """Two of them, by a port that is free."""
    return [
        subprocess.Popen(
            # Python 3.12 and newer warn of a fork beside threads.
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
            | {"MASTER_PORT": port, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for port in [str(free_port())]
        for rank in range(2)
    ]


def test_ranks_end_without_a_word() -> None:
    """With engines and a process group that nobody ends, in a fork, and where the store goes first."""
    ranks = start_ranks(SCRIPT)
    for rank in ranks:
        said = rank.communicate(timeout=LIMIT)
        assert (rank.returncode, *said) == (0, "", "")


OUTER_STEP = """
import ctypes, os, sys, time, torch, torch.distributed as dist, fastsync

dist.init_process_group("gloo")
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = fastsync.DiLoCo(model, optimizer, sync_every=2, fragment_sync_delay=1)
store = dist.distributed_c10d._get_default_store()
for _ in range(int(os.environ["STEPS"])):
    sync.step()
if os.environ["RANK"] == "1":
    store.wait(["ends"])
    time.sleep(1.5)
    os._exit(0)
sync.step()
store.set("ends", "")
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # for as many seconds as the status, when the interpreter has ended
sys.exit(4)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("steps", "shared_memory"), [("1", "0"), ("3", "1")])
def test_an_outer_step_under_way_leaves_the_process_its_status(
    steps: str, shared_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread, which waits for a rank that ends now, must not come back to Python: first or later step."""
    monkeypatch.setenv("STEPS", steps)
    monkeypatch.setenv("FASTSYNC_SHARED_MEMORY", shared_memory)
    said = [(*rank.communicate(timeout=LIMIT), rank.returncode) for rank in start_ranks(OUTER_STEP)]
    assert said == [("", "", 4), ("", "", 0)]


def test_a_train_job_with_a_stopped_rank_ends(tmp_path: Path) -> None:
    """A rank that waits in a sync names it. In a collective of the script's own it cannot."""
    with launched(tmp_path, "--nproc", "2", "--timeout", "3") as launcher:
        launcher.waits_for("attempt0-rank0")
        pid = launcher.waits_for("attempt0-rank1")[0]
        os.kill(int(pid), signal.SIGSTOP)
        status, said = launcher.ends()
    assert status == 1
    assert "torchrun saw rank 0 fail first: " in said
