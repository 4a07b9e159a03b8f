"""The backend "fastsync": what its collectives return, on which groups, and what they say of a rank that is missing."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.collectives import (
    COLLECTIVES,
    Case,
    call_at_random,
    call_in_trouble,
    check,
    check_trouble,
)
from tests.engine.hosts import entered, host_of, hosts
from tests.ranks import on_ranks, run_ranks

Group = dist.ProcessGroup
Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# ---- collectives ----------------------------------------------------------------------------------------------------


@on_ranks(3, backend="fastsync")
def test_each_collective_is_what_its_definition_says(rank: int, world_size: int) -> None:
    """On all ranks, whose bits are the same, on two, and on one."""
    for seed in range(4):
        call_at_random(dist.group.WORLD, seed, 40)
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    call_at_random(alone if rank == 1 else pair, 0, 80)
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    everyones = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyones, tensor)
    assert all(torch.equal(each, tensor) for each in everyones)


@on_ranks(2, backend="fastsync", cases={"dtype": FLOATS})
def test_bits_are_gloos_on_two_ranks(rank: int, world_size: int, dtype: torch.dtype) -> None:
    gloo = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(rank)
    for numel in (1, 1000, 200_001):
        drawn = torch.randn(2 * numel, generator=generator).to(dtype)
        for op in (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX):
            ours, theirs = drawn.clone(), drawn.clone()
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, gloo)
            assert torch.equal(ours, theirs), op
        ours, theirs = torch.zeros(2, numel, dtype=dtype)
        dist.reduce_scatter_tensor(ours, drawn)
        dist.reduce_scatter_tensor(theirs, drawn, group=gloo)
        assert torch.equal(ours, theirs)


@on_ranks(2, backend="fastsync")
def test_a_collective_ends_though_nobody_waits(rank: int, world_size: int) -> None:
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    called = threading.Event()
    work.get_future().then(lambda future: called.set())
    assert called.wait(60)
    assert work.get_future().value()[0] is tensor or work.result()[0].data_ptr() == tensor.data_ptr()
    assert tensor.tolist() == [2.0] * 10


@on_ranks(2, backend="fastsync")
def test_works_that_are_dropped(rank: int, world_size: int) -> None:
    """As PyTorch's tests of backends ask for."""
    group, tensor = dist.new_group(backend="fastsync"), torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier(group)
    assert tensor.tolist() == [8.0] * 4
    received = torch.zeros(200_000)
    dist.isend(torch.full_like(received, rank), 1 - rank)
    dist.irecv(received, 1 - rank).wait()
    assert torch.equal(received, torch.full_like(received, 1 - rank))
    with allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(tensor, async_op=True)
        assert torch._C._distributed_c10d._get_work_registry_size() == 1
        work.wait()
        assert torch._C._distributed_c10d._get_work_registry_size() == 0


@on_ranks(2, backend="fastsync")
def test_a_callback_may_call_the_next_collective(rank: int, world_size: int) -> None:
    first, second = torch.ones(3), torch.ones(3)

    def next_one(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        dist.all_reduce(second)
        return second

    chained = dist.all_reduce(first, async_op=True).get_future().then(next_one)
    assert chained.wait().tolist() == [2.0] * 3


@on_ranks(3, backend="fastsync", cases={"seed": range(3)})
def test_messages_in_any_order(rank: int, world_size: int, seed: int) -> None:
    """Those of one tag arrive in the order in which they were sent. Some receivers take them from any rank."""
    plan, order = random.Random(seed), random.Random(f"{seed} {rank}")
    sizes = (0, 1, 1000, 300_000)
    messages = [(*plan.sample(range(3), 2), tag, plan.choice(sizes), plan.random() < 0.3) for tag in range(40)]
    messages += [(0, 1, 99, 1000, False), (0, 1, 99, 1000, False)]
    own = [each for each in messages if rank in each[:2]]
    order.shuffle(own)
    works, received = [], []
    for source, to, tag, numel, from_any in own:
        if source == rank:
            works.append(dist.isend(torch.full((numel,), float(tag)), to, tag=tag))
            continue
        tensor = torch.zeros(numel)
        works.append(dist.irecv(tensor, None if from_any else source, tag=tag))
        received.append((works[-1], source, tag, tensor))
    order.shuffle(works)
    for work in works:
        work.wait(timedelta(seconds=60))
    for work, source, tag, tensor in received:
        assert work._source_rank() == source
        assert torch.equal(tensor, torch.full_like(tensor, tag)), tag


@on_ranks(2, backend="fastsync")
def test_messages_in_the_order_of_their_calls(rank: int, world_size: int) -> None:
    numels = [0, 1, 200_000, 7] * 5
    if rank == 0:
        works = [dist.isend(torch.full((numel,), float(i)), 1) for i, numel in enumerate(numels)]
        dist.barrier()  # nobody has to expect a message before it is sent, nor to send it before it is expected
        for work in works:
            work.wait()
    else:
        dist.barrier()
        for i, numel in enumerate(numels):
            dist.recv(tensor := torch.zeros(numel), 0)
            assert torch.equal(tensor, torch.full((numel,), float(i)))


@on_ranks(2, backend="fastsync")
def test_a_message_outlives_its_senders_group(rank: int, world_size: int) -> None:
    group, store = dist.new_group(backend="fastsync"), dist.group.WORLD.get_group_store()
    if rank == 0:
        dist.send(torch.ones(3), 1, group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        store.set("left", "")
    else:
        store.wait(["left"])
        dist.recv(received := torch.zeros(3), 0, group)
        assert received.tolist() == [1.0] * 3
        assert "recv: rank 0 has left the process group" in error_of(lambda: dist.recv(received, 0, group))
    dist.barrier()


@on_ranks(3, backend="fastsync")
def test_what_may_be_wrong_with_a_message(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)
        assert "Timed out waiting 0.1 s for rank 1" in error_of(
            lambda: dist.irecv(torch.ones(3), 1).wait(timedelta(seconds=0.1))
        )
        assert "can do no more" in error_of(lambda: dist.send(torch.ones(3), 1))
        assert "can do no more" in error_of(dist.barrier)
    else:
        if rank == 1:
            error = error_of(lambda: dist.recv(torch.ones(4), 0))
            assert "rank 0 has sent 12 bytes, but this rank expects 16" in error
        error = error_of(lambda: dist.recv(torch.ones(3), 0))
        assert "rank 0 has failed: recv: Timed out" in error or "recv: Timed out waiting 0.1 s" in error


@on_ranks(2, backend="fastsync")
def test_one_host_needs_no_sockets(rank: int, world_size: int) -> None:
    def sockets() -> int:
        return sum("socket:" in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink())

    assert sockets() == 0  # the ranks have met in a file
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)  # which only Gloo can
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    assert sockets() > 0


@on_ranks(3, backend="fastsync")
def test_a_monitored_barrier_names_all_who_do_not_come(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="fastsync")
    group.monitored_barrier(timedelta(seconds=60))
    if rank == 0:
        error = error_of(lambda: group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True))
        assert re.search("monitored_barrier: Timed out waiting 0.2 s for rank 1;.*; and for rank 2;", error)
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@on_ranks(2, backend="fastsync")
def test_a_process_that_was_forked_needs_a_group_of_its_own(rank: int, world_size: int) -> None:
    child = os.fork()
    if child == 0:
        said = error_of(lambda: dist.all_reduce(torch.ones(3)))
        os._exit("before this process was forked" not in said)
    assert os.waitpid(child, 0)[1] == 0
    assert sum_in(dist.group.WORLD) == 2.0


REFUSALS: dict[str, Callable[[], object]] = {
    "non-integral": lambda: dist.all_reduce(torch.ones(2), Op.BAND),
    "ReduceOp.AVG with Int": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), Op.AVG),
    "cannot reduce Short": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)),
    "PREMUL_SUM": lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)),
    "all_gather_into_tensor: expected a tensor of 4 values": lambda: dist.all_gather_into_tensor(
        torch.ones(3), torch.ones(2)
    ),
    "reduce_scatter_tensor: expected a tensor of 4 values": lambda: dist.reduce_scatter_tensor(
        torch.ones(2), torch.ones(3)
    ),
    "all_gather: expected a list of 2 tensors": lambda: dist.all_gather([torch.ones(2)], torch.ones(2)),
    "all_gather: .*size": lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2)),
    "root rank": lambda: backend_of(dist.group.WORLD).broadcast([torch.ones(2)], broadcast_options(7)),
}


def broadcast_options(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


@on_ranks(2, backend="fastsync")
def test_what_is_refused_harms_nothing(rank: int, world_size: int) -> None:
    for error, call in REFUSALS.items():
        with pytest.raises(RuntimeError, match=error):
            call()
    call_at_random(dist.group.WORLD, 0, 3)


# ---- groups ---------------------------------------------------------------------------------------------------------


def backend_of(group: Group) -> Any:
    return group._get_backend(torch.device("cpu"))


def sum_in(group: Group) -> float:
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


@on_ranks(3, backend="fastsync")
def test_parts_of_a_group(rank: int, world_size: int) -> None:
    half = dist.group.WORLD.split_group([2] if rank == 2 else [0, 1], group_name=f"half {rank // 2}")
    tensor = torch.ones(5)
    half.allreduce([tensor]).wait()
    assert tensor[0] == (1.0 if rank == 2 else 2.0)
    assert backend_of(half).name() == "fastsync"
    assert backend_of(half).options._timeout == backend_of(dist.group.WORLD).options._timeout


@on_ranks(4, backend="fastsync")
def test_meshes_of_two_dimensions(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for index, dimension in enumerate(("rows", "columns")):
        group = mesh.get_group(dimension)
        assert backend_of(group).shares_memory
        assert sum_in(group) == 2.0
        call_at_random(group, index, 5)


@on_ranks(2, backend="cpu:fastsync")
def test_named_for_a_device(rank: int, world_size: int) -> None:
    call_at_random(dist.group.WORLD, 0, 5)


@on_ranks(2, backend="fastsync", shared_memory=False)
def test_gloo_takes_what_ranks_without_shared_memory_call(rank: int, world_size: int) -> None:
    case = Case("all_reduce", torch.float32, 1000, Op.SUM, 0, False, 1)
    assert not backend_of(dist.group.WORLD).shares_memory
    assert "FASTSYNC_SHARED_MEMORY=0" in backend_of(dist.group.WORLD).why_not_shared
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        check(case, COLLECTIVES[name](case, dist.group.WORLD, True))


BETWEEN_HOSTS = ("all_reduce", "coalesced_all_reduce", "broadcast", "all_gather", "all_gather_into_tensor",
                 "reduce_scatter", "reduce_scatter_tensor")  # fmt: skip
Nodes = Sequence[Sequence[int]]


@contextmanager
def group_between(rank: int, names: Sequence[str], nodes: Nodes, timeout: float = 60.0) -> Iterator[Group]:
    """A group whose ranks are on several hosts. Namespaces have no network, so connections are made outside."""
    connect, outside = dist.ProcessGroupGloo, os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def connect_outside(*args: Any, **options: Any) -> Any:
        with entered(f"/proc/self/fd/{outside}"):
            return connect(*args, **options)

    with pytest.MonkeyPatch.context() as changed, entered(names[host_of(nodes, rank)]):
        changed.setattr(dist, "ProcessGroupGloo", connect_outside)
        group = dist.new_group(backend="fastsync", timeout=timedelta(seconds=timeout))
    os.close(outside)
    assert isinstance(group, Group)
    yield group


@pytest.mark.parametrize("nodes", [[[0, 2], [1]], [[0], [1, 2], [3]]], ids=str)
def test_ranks_of_several_hosts(nodes: list[list[int]]) -> None:
    with hosts(len(nodes)) as names:
        run_ranks(call_between, sum(map(len, nodes)), names, nodes)


def call_between(rank: int, world_size: int, names: list[str], nodes: Nodes) -> None:
    with group_between(rank, names, nodes) as group:
        assert backend_of(group).shares_memory
        call_at_random(group, 0, 40, BETWEEN_HOSTS)
        dist.barrier(group)
        for name in COLLECTIVES.keys() - {*BETWEEN_HOSTS, "all_to_all"}:  # whose lists Gloo wants to be alike
            case = Case(name, torch.float32, 1000, Op.SUM, 1, False, 1)
            check(case, COLLECTIVES[name](case, group, True))
        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(tensor, group=group)
        everyones = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(everyones, tensor, group)
        assert all(torch.equal(each, tensor) for each in everyones)
        if rank == 0:
            dist.send(tensor, world_size - 1, group)
        elif rank == world_size - 1:
            dist.recv(received := torch.zeros(1000), 0, group)
            assert torch.equal(received, tensor)


@pytest.mark.parametrize("victim", [2, 3])
def test_hosts_hear_which_rank_of_another_one_is_lost(victim: int) -> None:
    nodes = [[0, 1], [2, 3]]
    with hosts(2) as names:
        errors = run_ranks(lose_between, 4, names, nodes, victim, lost=[victim])
    assert all(f"rank {victim}'s process has ended" in error for error in errors if error)


def lose_between(rank: int, world_size: int, names: list[str], nodes: Nodes, victim: int) -> str:
    with group_between(rank, names, nodes) as group:
        dist.barrier(group)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        assert time.monotonic() - began < 30  # of the 60 of the time-out
        return error


@on_ranks(2, backend="fastsync")
def test_the_debug_level_detail_compares_what_ranks_call(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        dist.set_debug_level_from_env()
        group = dist.new_group(timeout=timedelta(seconds=30))
    assert sum_in(group) == 2.0
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
        dist.all_reduce(torch.ones(3 + rank), group=group)


@on_ranks(2, backend="fastsync")
def test_the_profiler_sees_collectives(rank: int, world_size: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    assert [event.name for event in profile.events()].count("fastsync:all_reduce") == 2


@on_ranks(2, backend="fastsync")
def test_groups_leave_nothing_behind(rank: int, world_size: int) -> None:
    def used() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:fastsync")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    def use_groups(count: int) -> None:
        for _ in range(count):
            group = dist.new_group()
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
            del group

    use_groups(3)
    deadline = time.monotonic() + 60
    before = used()
    use_groups(40)
    while used() > before and time.monotonic() < deadline:  # threads that have no more to do end by themselves
        time.sleep(0.05)
    assert used() <= before


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


@on_ranks(3, backend="fastsync", lost=[1])
def test_a_killed_rank_is_named_at_once(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = error_of(lambda: dist.all_reduce(torch.ones(3)))
    assert "rank 1's process has ended" in error
    assert time.monotonic() - began < 30  # of the 120 of the time-out
    assert "can do no more" in error_of(lambda: dist.all_reduce(torch.ones(3)))


@pytest.mark.parametrize(
    ("what", "seed", "size", "victim"),
    [(signal.SIGKILL, 0, 4, 0), (signal.SIGKILL, 1, 4, 1), (signal.SIGSTOP, 1000, 5, 3)],
)
def test_groups_of_two_threads_in_trouble(what: signal.Signals, seed: int, size: int, victim: int) -> None:
    timeout = 3.0
    ended = run_ranks(call_in_trouble, size, seed, what, victim, timeout, lost=[victim], backend="fastsync")
    check_trouble(ended, what, victim, timeout)


@on_ranks(2, backend="fastsync")
def test_a_late_rank_is_named_after_the_time_out(rank: int, world_size: int) -> None:
    store = dist.group.WORLD.get_group_store()
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    dist.broadcast(torch.ones(1), 0, group=group)
    if rank == 0:
        error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        assert re.search(r"Timed out waiting 0.5 s for rank 1; its newest collective is number 1, broadcast", error)
        store.set("over", "")
    else:
        store.wait(["over"])
        assert "rank 0 has failed" in error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    assert sum_in(dist.group.WORLD) == 2.0


@on_ranks(2, backend="fastsync")
def test_a_time_out_may_be_set_later(rank: int, world_size: int) -> None:
    group = dist.new_group()
    backend_of(group)._set_default_timeout(timedelta(seconds=0.2))
    if rank == 0:
        assert "Timed out waiting 0.2 s" in error_of(lambda: dist.barrier(group))
    dist.barrier()


@on_ranks(2, backend="fastsync")
def test_ranks_that_call_different_collectives_are_told(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30))
    tensor = torch.ones(3 + rank)
    error = error_of(lambda: dist.all_reduce(tensor, group=group))
    assert f"rank {1 - rank}" in error


@on_ranks(2, backend="fastsync")
def test_abort_wakes_who_waits(rank: int, world_size: int) -> None:
    group = dist.new_group()
    if rank == 0:
        errors: list[str] = []

        def wait() -> None:
            errors.append(error_of(lambda: dist.all_reduce(torch.ones(3), group=group)))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        group.abort()
        waiting.join(60)
        assert "aborted" in errors[0]
    dist.barrier()
    assert re.search("aborted|rank 0 has failed", error_of(lambda: dist.all_reduce(torch.ones(3), group=group)))


# ---- trainings ------------------------------------------------------------------------------------------------------


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def ways_to_train(group: Group) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Models and optimizers that average over the group."""

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.01, process_group=group)
    yield ddp, adamw(ddp)
    zero = DistributedDataParallel(model_of(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    yield zero, optimizer
    sharded = model_of()
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    yield sharded, adamw(sharded)
    attached = model_of()
    fastsync.attach(attached, "fp16", process_group=group)
    yield attached, adamw(attached)
    assert fastsync.handle_of(attached).stats().transport == "shared_memory"
    hooked = DistributedDataParallel(model_of(), process_group=group)
    fastsync.register_comm_hook(hooked, "fp16")
    yield hooked, adamw(hooked)
    site = model_of()
    optimizer = adamw(site)
    with fastsync.DiLoCo(site, optimizer, sync_every=2, process_group=group):
        yield site, optimizer


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(16, 20, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, backend="fastsync")
def test_trainings_are_those_over_gloo(rank: int, world_size: int) -> None:
    """DDP, ZeRO, fully_shard, attach, the hook and DiLoCo."""
    ours, theirs = (
        [losses_of(*way, rank) for way in ways_to_train(group)]
        for group in (dist.group.WORLD, dist.new_group(backend="gloo"))
    )
    assert ours == theirs


def losses_with_accelerate(rank: int, world_size: int, backend: str) -> list[float]:
    from accelerate import Accelerator

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    model = model_of()
    prepared, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert isinstance(prepared, DistributedDataParallel)
    assert dist.get_backend() == backend
    return losses_of(prepared, optimizer, rank)


@pytest.mark.end_to_end
def test_accelerate_trains_as_over_gloo() -> None:
    ours, theirs = (run_ranks(losses_with_accelerate, 2, name, backend=name) for name in ("fastsync", "gloo"))
    assert ours == theirs
