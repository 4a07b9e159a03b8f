"""The backend "fastsync": what its collectives return, on which groups, and what they say of a rank that is missing."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.hosts import entered, hosts
from tests.ranks import on_ranks, run_ranks

Group = dist.ProcessGroup
Op = dist.ReduceOp
Lists = list[list[Tensor]]

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCED = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)
MOVED = (*REDUCED, torch.int16, torch.complex128)
# Nothing, less than a vector, more than a rank can write in a round.
NUMELS = (0, 1, 3, 1000, 100_003)


# ---- collectives, and their definitions -----------------------------------------------------------------------------


class Case(NamedTuple):
    """What the ranks call next. It is the same on all of them."""

    name: str
    dtype: torch.dtype
    numel: int
    op: Any
    root: int
    strided: bool
    seed: int


def draw(rng: random.Random, size: int) -> Case:
    name = rng.choice(list(COLLECTIVES))
    reduces = "reduce" in name
    dtype = rng.choice(REDUCED if reduces else MOVED)
    if dtype.is_complex:
        ops: tuple[Any, ...] = (Op.SUM, Op.AVG)
    elif dtype is torch.bool:
        ops = (Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR, Op.PRODUCT)
    elif dtype.is_floating_point:
        ops = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
    else:
        ops = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)
    numel = rng.choice(NUMELS) if rng.random() < 0.8 else rng.randrange(300_000)
    return Case(name, dtype, numel, rng.choice(ops), rng.randrange(size), rng.random() < 0.3, rng.randrange(1 << 30))


def values(case: Case, rank: int, numel: int | None = None, part: int = 0) -> Tensor:
    """A rank's input. Sums and products of the few values are exact in every dtype."""
    generator = torch.Generator().manual_seed(case.seed + 1000 * part + rank)
    count = case.numel if numel is None else numel
    low = 0 if case.dtype in (torch.uint8, torch.bool) else -3
    drawn = torch.randint(low, 2 if case.dtype is torch.bool else 4, (2, count), generator=generator)
    real = drawn[0].to(case.dtype)
    return real + 1j * drawn[1] if case.dtype.is_complex else real


def laid_out(case: Case, tensor: Tensor) -> Tensor:
    """The tensor, with gaps between its values if the case asks for that."""
    if not case.strided:
        return tensor
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def reduced(case: Case, inputs: Sequence[Tensor]) -> Tensor:
    result = inputs[0].clone()
    for other in inputs[1:]:
        if case.op in (Op.SUM, Op.AVG):
            result = result + other
        elif case.op == Op.PRODUCT:
            result = result * other
        elif case.op == Op.MIN:
            result = torch.minimum(result, other)
        elif case.op == Op.MAX:
            result = torch.maximum(result, other)
        else:
            bitwise = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
            result = bitwise[case.op](result, other)
    if case.op != Op.AVG:
        return result
    if case.dtype.is_complex:  # whose parts are divided, each by itself
        return torch.view_as_complex(torch.view_as_real(result) / len(inputs))
    return result / len(inputs)


class Called(NamedTuple):
    work: dist.Work | None
    outputs: list[Tensor]
    expected: list[Tensor]


Collective = Callable[[Case, Group, bool], Called]


def all_reduce(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.all_reduce(tensor, case.op, group, async_op=not wait)
    return Called(work, [tensor], [reduced(case, [values(case, rank) for rank in range(group.size())])])


def reduce(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.reduce(tensor, group=group, group_dst=case.root, op=case.op, async_op=not wait)
    if group.rank() != case.root:
        return Called(work, [], [])
    return Called(work, [tensor], [reduced(case, [values(case, rank) for rank in range(group.size())])])


def broadcast(case: Case, group: Group, wait: bool) -> Called:
    tensor = laid_out(case, values(case, group.rank()))
    work = dist.broadcast(tensor, group=group, group_src=case.root, async_op=not wait)
    return Called(work, [tensor], [values(case, case.root)])


def all_gather(case: Case, group: Group, wait: bool) -> Called:
    expected = [values(case, rank) for rank in range(group.size())]
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    work = dist.all_gather(outputs, laid_out(case, expected[group.rank()]), group, async_op=not wait)
    return Called(work, outputs, expected)


def all_gather_into_tensor(case: Case, group: Group, wait: bool) -> Called:
    expected = torch.cat([values(case, rank) for rank in range(group.size())])
    output = laid_out(case, torch.zeros_like(expected))
    own = laid_out(case, values(case, group.rank()))
    work = dist.all_gather_into_tensor(output, own, group, async_op=not wait)
    return Called(work, [output], [expected])


def reduce_scatter(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    inputs = [laid_out(case, values(case, group.rank(), part=part)) for part in ranks]
    output = laid_out(case, torch.zeros_like(inputs[0]))
    work = dist.reduce_scatter(output, inputs, case.op, group, async_op=not wait)
    return Called(work, [output], [reduced(case, [values(case, rank, part=group.rank()) for rank in ranks])])


def reduce_scatter_tensor(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    whole = laid_out(case, torch.cat([values(case, group.rank(), part=part) for part in ranks]))
    output = laid_out(case, torch.zeros(case.numel, dtype=case.dtype))
    work = dist.reduce_scatter_tensor(output, whole, case.op, group, async_op=not wait)
    return Called(work, [output], [reduced(case, [values(case, rank, part=group.rank()) for rank in ranks])])


def split_of(case: Case, source: int, to: int) -> int:
    return random.Random(f"{case.seed} {source} {to}").choice((0, case.numel // 7, case.numel))


def all_to_all_single(case: Case, group: Group, wait: bool) -> Called:
    own, ranks = group.rank(), range(group.size())
    sends = [split_of(case, own, to) for to in ranks]
    receives = [split_of(case, source, own) for source in ranks]
    whole = torch.cat([values(case, own, numel, part) for part, numel in enumerate(sends)])
    output = laid_out(case, torch.zeros(sum(receives), dtype=case.dtype))
    work = dist.all_to_all_single(output, laid_out(case, whole), receives, sends, group, async_op=not wait)
    return Called(work, [output], [torch.cat([values(case, source, receives[source], own) for source in ranks])])


def all_to_all(case: Case, group: Group, wait: bool) -> Called:
    own, ranks = group.rank(), range(group.size())
    inputs = [laid_out(case, values(case, own, split_of(case, own, to), to)) for to in ranks]
    expected = [values(case, source, split_of(case, source, own), own) for source in ranks]
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    if case.dtype.is_complex:  # which dist.all_to_all views as real
        outputs, inputs = [each.contiguous() for each in outputs], [each.contiguous() for each in inputs]
    work = dist.all_to_all(outputs, inputs, group, async_op=not wait)
    return Called(work, outputs, expected)


def gather(case: Case, group: Group, wait: bool) -> Called:
    expected = [values(case, rank) for rank in range(group.size())] if group.rank() == case.root else []
    outputs = [laid_out(case, torch.zeros_like(each)) for each in expected]
    own = laid_out(case, values(case, group.rank()))
    work = dist.gather(own, outputs or None, group=group, group_dst=case.root, async_op=not wait)
    return Called(work, outputs, expected)


def scatter(case: Case, group: Group, wait: bool) -> Called:
    is_root = group.rank() == case.root
    inputs = [laid_out(case, values(case, case.root, part=part)) for part in range(group.size())] if is_root else None
    output = laid_out(case, torch.zeros(case.numel, dtype=case.dtype))
    work = dist.scatter(output, inputs, group=group, group_src=case.root, async_op=not wait)
    return Called(work, [output], [values(case, case.root, part=group.rank())])


def coalesced_all_reduce(case: Case, group: Group, wait: bool) -> Called:
    ranks = range(group.size())
    tensors = [laid_out(case, values(case, group.rank(), part=part)) for part in range(3)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = case.op
    work = group.allreduce_coalesced([torch.view_as_real(t) if case.dtype.is_complex else t for t in tensors], options)
    if wait:
        work.wait()
    expected = [reduced(case, [values(case, rank, part=part) for rank in ranks]) for part in range(3)]
    return Called(work, tensors, expected)


COLLECTIVES: dict[str, Collective] = {
    function.__name__: function
    for function in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor,
        all_to_all_single, all_to_all, gather, scatter, coalesced_all_reduce,
    )
}  # fmt: skip


def call_at_random(group: Group, seed: int, count: int) -> None:
    """Calls so many collectives, of which some are waited for at once, and some later, in another order."""
    rng, order = random.Random(seed), random.Random(seed + group.rank() + 1)
    called: list[tuple[Case, Called]] = []
    for _ in range(count):
        case = draw(rng, group.size())
        called.append((case, COLLECTIVES[case.name](case, group, rng.random() < 0.5)))
        if rng.random() < 0.3:
            order.shuffle(called)
            while called:
                check(*called.pop())
    for each in called:
        check(*each)


def check(case: Case, called: Called) -> None:
    if called.work is not None:
        called.work.wait()
        assert called.work.is_completed()
    for output, expected in zip(called.outputs, called.expected, strict=True):
        assert torch.equal(output, expected), case


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(backend="fastsync")
def test_each_collective_is_what_its_definition_says(rank: int, world_size: int, seed: int) -> None:
    call_at_random(dist.group.WORLD, seed, 40)


@on_ranks(2, backend="fastsync")
def test_threads_with_a_group_each(rank: int, world_size: int) -> None:
    groups = [dist.new_group(backend="fastsync") for _ in range(2)]
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            call_at_random(groups[index], index, 40)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("dtype", FLOATS)
@on_ranks(2, backend="fastsync")
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


@on_ranks(3, backend="fastsync")
def test_all_ranks_get_the_same_bits(rank: int, world_size: int) -> None:
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    everyones = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyones, tensor)
    assert all(torch.equal(each, tensor) for each in everyones)


@on_ranks(3, backend="fastsync")
def test_parts_of_complex_values_are_averaged_apart(rank: int, world_size: int) -> None:
    case = Case("reduce_scatter_tensor", torch.complex64, 1000, Op.AVG, 0, False, 1)
    check(case, reduce_scatter_tensor(case, dist.group.WORLD, True))


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
def test_a_callback_may_call_the_next_collective(rank: int, world_size: int) -> None:
    first, second = torch.ones(3), torch.ones(3)

    def next_one(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        dist.all_reduce(second)
        return second

    chained = dist.all_reduce(first, async_op=True).get_future().then(next_one)
    assert chained.wait().tolist() == [2.0] * 3


@on_ranks(2, backend="fastsync")
def test_what_gloo_takes(rank: int, world_size: int) -> None:
    """Messages, in any order of their tags and from any rank; sparse tensors; monitored barriers; objects."""
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        sent = [dist.isend(tensor + 5 * tag, 1, tag=tag) for tag in (0, 1)]
        for work in sent:
            work.wait()
    else:
        second, first = torch.zeros(4), torch.zeros(4)
        dist.recv(second, 0, tag=1)
        assert dist.recv(first, tag=0) == 0
        assert (first.tolist(), second.tolist()) == ([0.0] * 4, [5.0] * 4)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


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
def test_groups_of_some_ranks(rank: int, world_size: int) -> None:
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    if rank != 1:
        assert sum_in(pair) == 2.0
        call_at_random(pair, 1, 20)
    else:
        assert sum_in(alone) == 1.0
        for name in COLLECTIVES:
            case = Case(name, torch.float32, 1000, Op.SUM, 0, False, 1)
            check(case, COLLECTIVES[name](case, alone, True))
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
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        check(case, COLLECTIVES[name](case, dist.group.WORLD, True))


def test_ranks_of_several_hosts_use_gloo() -> None:
    with hosts(2) as names:
        run_ranks(use_gloo_between, 4, names)


def use_gloo_between(rank: int, world_size: int, names: list[str]) -> None:
    """Ranks enter their hosts when Gloo has connected them."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as changed:
        connect = dist.ProcessGroupGloo

        def connect_and_enter(*args: Any, **options: Any) -> Any:
            gloo = connect(*args, **options)
            stack.enter_context(entered(names[rank // 2]))
            return gloo

        changed.setattr(dist, "ProcessGroupGloo", connect_and_enter)
        group = dist.new_group(backend="fastsync")
    assert not backend_of(group).shares_memory
    for name in COLLECTIVES.keys() - {"all_to_all"}:  # whose lists Gloo wants to be alike
        case = Case(name, torch.float32, 1000, Op.SUM, 1, False, 1)
        check(case, COLLECTIVES[name](case, group, True))


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
    use_groups(100)
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
    assert "all_reduce: rank 1's process has ended" in error or f"rank {2 - rank} has failed" in error
    assert time.monotonic() - began < 30  # of the 120 of the time-out
    assert "can do no more" in error_of(lambda: dist.all_reduce(torch.ones(3)))


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


def losses_of(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
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
def test_ddp_trains_as_over_gloo(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    ours = losses_of(DistributedDataParallel(model_of(), bucket_cap_mb=0.01), rank)
    assert ours == losses_of(DistributedDataParallel(model_of(), bucket_cap_mb=0.01, process_group=gloo), rank)


@on_ranks(2, backend="fastsync")
def test_fully_shard_trains_as_over_gloo(rank: int, world_size: int) -> None:
    losses = []
    for name in ("fastsync", "gloo"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,), backend_override={0: name})
        model = model_of()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses.append(losses_of(model, rank))
    assert losses[0] == losses[1]


@on_ranks(2, backend="fastsync")
def test_zero_trains_as_over_gloo(rank: int, world_size: int) -> None:
    losses = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(model_of(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
        losses.append(losses_of(model, rank, optimizer))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("entry_point", ["attach", "hook"])
@on_ranks(2, backend="fastsync")
def test_the_engine_does_what_it_does_over_gloo(rank: int, world_size: int, entry_point: str) -> None:
    gloo = dist.new_group(backend="gloo")
    results = []
    for group in (dist.group.WORLD, gloo):
        model = model_of()
        if entry_point == "attach":
            handle: Any = fastsync.attach(model, "fp16", process_group=group)
        else:
            model = DistributedDataParallel(model, process_group=group)
            handle = fastsync.register_comm_hook(model, "fp16")
        results.append((losses_of(model, rank), handle.stats().transport))
    assert results[0] == results[1]
    assert results[0][1] == "shared_memory"
