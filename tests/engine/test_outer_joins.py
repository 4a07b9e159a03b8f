"""Sites of ``DiLoCo`` that are lost and come back, that are stopped, and that do not fit."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.optim import SGD

from fastsync import DiLoCo, TopK
from fastsync._checks import resolve_group
from fastsync.elastic.members_store import JOINS, STORE
from fastsync.outer import surviving_group
from fastsync.outer.surviving_group import SurvivingGroup
from tests.engine.sites import assert_sites_are_equal, make_model, make_optimizer, make_site, train_step, weights
from tests.engine.test_launch_local import launch
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

LR, SYNC_EVERY = 1e-3, 2
NUM_STEPS = 12
JOINED = 4
"""The step after which a new site takes part in the mean; it trains from there."""


class Batched(nn.Module):
    """A model with a buffer that sites average, one that they do not, and a parameter that nobody trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) + self.frozen


def begin(rank: int, port: int, new: int, model: nn.Module, **options: Any) -> tuple[DiLoCo, torch.optim.Optimizer]:
    """Makes a DiLoCo of all ranks but the new one, which joins them."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    others = [each for each in range(dist.get_world_size()) if each != new]
    group = dist.new_group([rank] if rank == new else others, use_local_synchronization=True)
    if rank == new:
        os.environ[JOINS] = "1"
        TCPStore("127.0.0.1", port, is_master=False).wait(["new ones may come"])
    optimizer = SGD(model.parameters(), lr=LR)
    given: dict[str, Any] = {"sync_every": SYNC_EVERY, "compression": "none", "timeout": 60.0, **options}
    return DiLoCo(model, optimizer, process_group=group, **given), optimizer


def let_in(sync: DiLoCo, port: int, step: int) -> None:
    """Waits until the first site knows that another one wants to join, which is taken in at the mean of this step."""
    if step != JOINED or sync._sites.own != sync._sites.ranks[0]:
        return
    TCPStore("127.0.0.1", port, is_master=False).set("new ones may come", "")
    until = time.monotonic() + 30
    while not sync._sites._wants_change:
        assert time.monotonic() < until
        time.sleep(0.01)


def outer_state(sync: DiLoCo) -> list[Tensor]:
    """The common weights, and what the outer optimizer keeps for them."""
    weights = [each.detach() for fragment in sync._state.fragments for each in fragment.outer.values()]
    moments = [
        each
        for fragment in sync._state.fragments
        for state in fragment.optimizer.state.values()
        for each in state.values()
    ]
    return [*weights, *moments]


def train_with_a_new_site(rank: int, world_size: int, port: int, options: dict[str, Any]) -> tuple[int, list[Tensor]]:
    model = Batched(seed=rank)
    sync, optimizer = begin(rank, port, 2, model, **options)
    first = sync.num_steps
    if rank == 2:
        with pytest.raises(RuntimeError, match=r"this process joined others at step .*only if num_steps is 0"):
            sync.load_state_dict(sync.state_dict())
    with sync:
        for step in range(first + 1, NUM_STEPS + 1):
            let_in(sync, port, step)
            train_step(model, optimizer, rank, step)
    assert sync._sites.ranks == [0, 1, 2]
    return first, [*weights(model), model.layers[1].running_mean, *outer_state(sync)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"compression": "int8+ef"},
    {"compression": TopK(), "fragments": 2, "fragment_sync_delay": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_new_site_joins_with_the_outer_state_of_the_others(store: TCPStore, options: dict[str, Any]) -> None:
    ran = run_ranks(train_with_a_new_site, 3, store.port, options)
    (_, expected), *_ = ran
    for first, result in ran:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert first in (0, JOINED)
    assert ran[2][0] == JOINED
    for mine, theirs in zip(expected, play_a_new_site() if not options else [], strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def play_a_new_site() -> list[Tensor]:
    """In plain PyTorch: the new site begins with the common weights, and counts from the next mean on."""
    models = [Batched(seed=0) for _ in range(3)]
    optimizers = [SGD(model.parameters(), lr=LR) for model in models]
    outer = [parameter.detach().clone() for parameter in models[0].parameters() if parameter.requires_grad]
    outer_optimizer = SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    trained = [[each for each in model.parameters() if each.requires_grad] for model in models]
    for step in range(1, NUM_STEPS + 1):
        sites = range(3) if step > JOINED else range(2)
        for site in sites:
            train_step(models[site], optimizers[site], site, step)
        if step % SYNC_EVERY == 0:
            for index, weight in enumerate(outer):
                weight.grad = torch.stack([weight - trained[site][index].detach() for site in sites]).mean(0)
            outer_optimizer.step()
            with torch.no_grad():
                for model in trained:
                    for own, weight in zip(model, outer, strict=True):
                        own.copy_(weight)
    return [parameter.detach() for parameter in models[0].parameters()]


def train_where_one_is_replaced(rank: int, world_size: int, port: int) -> tuple[list[int], list[Tensor]]:
    """Site 1 dies. Another one comes in its place, and one of the others dies afterwards."""
    model = make_model()
    sync, optimizer = begin(rank, port, 3, model)
    with sync:
        for step in range(sync.num_steps + 1, NUM_STEPS + 1):
            if (rank, step) in ((1, 3), (0, 9)):
                os.kill(os.getpid(), signal.SIGKILL)
            let_in(sync, port, step)
            train_step(model, optimizer, rank, step)
    return sync._sites.ranks, outer_state(sync)


@pytest.mark.filterwarnings("ignore:fastsync. ranks")
def test_a_site_comes_in_place_of_a_lost_one_and_the_first_may_be_lost_then(store: TCPStore) -> None:
    *_, third, fourth = run_ranks(train_where_one_is_replaced, 4, store.port, lost=[0, 1], timeout=60)
    assert third[0] == fourth[0] == [2, 3]
    torch.testing.assert_close(third[1], fourth[1], rtol=0, atol=0)


def join_amid_a_begin(rank: int, world_size: int, port: int) -> tuple[int, list[int], list[Tensor]]:
    """Site 1 dies before its first step, while the others wait for it, and another one waits to join them."""
    model = make_model()
    sync, optimizer = begin(rank, port, 3, model)
    first = sync.num_steps
    if rank == 0:
        let_in(sync, port, JOINED)
    if rank == 1:
        TCPStore("127.0.0.1", port, is_master=False).wait(["new ones may come"])
        time.sleep(0.5)  # the new one asks meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    with sync:
        for step in range(first + 1, NUM_STEPS + 1):
            if step == SYNC_EVERY:
                let_in(sync, port, JOINED)
            train_step(model, optimizer, rank, step)
    return first, sync._sites.ranks, outer_state(sync)


@pytest.mark.filterwarnings("ignore:fastsync. ranks")
def test_a_new_site_waits_for_the_mean_if_one_is_lost_at_the_begin(store: TCPStore) -> None:
    ran = run_ranks(join_amid_a_begin, 4, store.port, lost=[1], timeout=60)
    assert [first for first, *_ in (ran[0], ran[2], ran[3])] == [0, 0, SYNC_EVERY]
    for _, ranks, state in (ran[2], ran[3]):
        assert ranks == [0, 2, 3]
        torch.testing.assert_close(state, ran[0][2], rtol=0, atol=0)


def join_with_another_model(rank: int, world_size: int, port: int) -> list[int] | str:
    model = nn.Linear(7, 3) if rank == 2 else make_model()
    try:
        sync, optimizer = begin(rank, port, 2, model)
    except ValueError as error:
        return str(error)
    with sync:
        for step in range(1, NUM_STEPS + 1):
            let_in(sync, port, step)
            train_step(model, optimizer, rank, step)
    return sync._sites.ranks


def test_a_new_site_with_another_model_ends_alone(store: TCPStore) -> None:
    first, second, new = run_ranks(join_with_another_model, 3, store.port)
    assert first == second == [0, 1]
    assert "the ranks do not agree" in new


def join_after_the_end(rank: int, world_size: int, port: int) -> str:
    if rank == 0:
        model = make_model()
        sync, optimizer = begin(rank, port, 1, model)
        with sync:
            train_step(model, optimizer, rank, 1)
        sync._sites.close()
        TCPStore("127.0.0.1", port, is_master=False).set("new ones may come", "")
        return ""
    with pytest.raises(RuntimeError) as ended:
        begin(rank, port, 1, make_model(), timeout=1.0)
    return str(ended.value)


def test_a_site_that_comes_after_the_end_says_so(store: TCPStore) -> None:
    _, said = run_ranks(join_after_the_end, 2, store.port)
    assert "waited to join ranks [0], none of which could be reached for 1 s; they have ended, or are lost" in said


def train_while_one_is_stopped(rank: int, world_size: int, folder: str) -> list[int] | str:
    model, pid = make_model(), Path(folder) / "pid"
    optimizer = make_optimizer(model)
    try:
        with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, timeout=2.0) as sync:
            for step in range(1, NUM_STEPS + 1):
                if (rank, step) == (1, 5):
                    pid.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                train_step(model, optimizer, rank, step)
    except RuntimeError as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return sync._sites.ranks


@pytest.mark.filterwarnings("ignore:fastsync. ranks")
def test_a_stopped_site_is_left_and_ends_by_itself(tmp_path: Path) -> None:
    """Here the sites agree in the default group's store, because no launcher has one."""
    first, stopped, third = run_ranks(train_while_one_is_stopped, 3, str(tmp_path), timeout=60)
    assert first == third == [0, 2]
    assert "ranks [0, 2] have gone on without rank 1" in stopped
    assert "start it again from their state" in stopped


@on_ranks(2, timeout=60)
def test_a_site_that_is_behind_at_the_begin_goes_on_with_the_others(rank: int, world_size: int) -> None:
    """Rank 1 takes the comparison at the begin of a block for failed, and rank 0 is at the first mean already."""
    model, optimizer, sync = make_site(DiLoCo, sync_every=SYNC_EVERY, timeout=20.0)
    with torch.no_grad():
        for parameter in model.parameters():  # all load the same, which the comparison finds out
            parameter.add_(1.0)
    compare = sync._take_over_loaded_weights

    def fail() -> None:
        sync._take_over_loaded_weights = compare
        compare()
        raise RuntimeError("the connection broke")

    if rank == 1:
        sync._take_over_loaded_weights = fail
    with sync:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, rank, step)
    assert_sites_are_equal(model, world_size)


def left_with_a_silent_one(rank: int, world_size: int) -> list[int]:
    """Rank 2 ends, and rank 1 only stands still."""
    sites = SurvivingGroup(resolve_group(None), timedelta(minutes=10))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        os._exit(0)
    sites.go_on(lambda: 0, lambda progress: None, RuntimeError("the connection broke"))
    return sites.ranks


def test_silence_is_told_of_the_group_that_was_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another site may be lost before the group of a new membership is there."""
    monkeypatch.setattr(surviving_group, "PATIENCE_SECONDS", 0.0)
    sites: Any = object.__new__(SurvivingGroup)
    sites._formed, sites._members = [0, 1, 2, 3], SimpleNamespace(now=SimpleNamespace(members=[0, 2, 3]))
    sites._liveness = SimpleNamespace(silent_ranks=lambda: [1, 3])
    silent = sites._silences()
    assert [silent(), silent()] == [set(), {1, 3}]


def test_a_site_without_a_heartbeat_is_left_after_some_seconds() -> None:
    """Long before the time-out, which is ten minutes."""
    assert run_ranks(left_with_a_silent_one, 3, lost=[1, 2], timeout=60)[0] == [0]


@on_ranks(1)
def test_a_process_that_joins_needs_the_launchers_store(rank: int, world_size: int) -> None:
    os.environ[JOINS] = "1"
    refused(lambda: make_site(DiLoCo), f"{STORE} does not tell where they are")


SCRIPT = """
import os, signal, time, torch, fastsync
with fastsync.distributed.process_group(timeout=60):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastsync.DiLoCo(model, optimizer, sync_every=5) as diloco:
        for step in range(diloco.num_steps, 60):
            if os.environ["LOCAL_RANK"] == "1" and diloco.num_steps == 20 and "FASTSYNC_JOINS" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            while diloco.num_steps == 28 and not diloco._sites._wants_change:  # importing torch takes seconds
                time.sleep(0.1)
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    joined = "FASTSYNC_JOINS" in os.environ
    print(f"joined {joined} weights {model.weight.tolist()}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.end_to_end
def test_launch_local_replaces_a_site(tmp_path: Path) -> None:
    ran = launch(tmp_path, SCRIPT, "-n", "2", "--replace")
    assert ran.returncode == 0, ran.stderr
    assert "rank 1 was ended by SIGKILL; 1 rank goes on, and rank 2 is started in its place" in ran.stderr
    said = sorted(ran.stdout.splitlines())
    assert [line.partition(" weights ")[0] for line in said] == ["joined False", "joined True"], ran.stderr
    assert len({line.partition(" weights ")[2] for line in said}) == 1
