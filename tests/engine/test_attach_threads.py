"""attach() where there are other threads, and in forked processes."""

from __future__ import annotations

import errno
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from tests.engine.attached import (
    Fallible,
    assert_averages,
    assert_averages_nothing,
    attach,
    backward,
    fail,
    mean_gradients,
)
from tests.engine.system_calls import Call, refuse
from tests.models import SMALL_BUCKETS, Mlp, assert_all_bitwise_equal, assert_same_on_all_ranks, grads_of
from tests.ranks import on_ranks

HANG_SECONDS = 10.0  # what is waited for takes milliseconds
CHILD_SECONDS = 60.0  # how long a forked child may take
FORKED = "this process was forked from the one that attached the engine"


def _threads(number: int) -> ThreadPoolExecutor:
    # Each of them starts with torch's default, and the result of a matrix product depends on it in the last bit.
    return ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,))


# ---- threads --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_statistics_read_while_backward_runs(rank: int, world_size: int) -> None:
    model = Mlp()
    sync = attach(model, compression="fp16")
    backward(model, rank, 0)
    num_buckets = len(sync.stats().buckets)
    assert num_buckets >= 3
    done = threading.Event()

    def read() -> None:
        num_steps = 0
        while True:
            is_last = done.is_set()
            stats = sync.stats()
            assert stats.num_steps >= num_steps
            assert len(stats.buckets) == num_buckets
            assert sync.grad_stats().num_nonfinite.item() == 0
            assert len(sync.state_dict()["scales"]) == 6
            assert sync.piggybacked().keys() <= {"kl"}
            num_steps = stats.num_steps
            if is_last:
                return

    with _threads(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for step in range(1, 30):
                sync.piggyback("kl", torch.tensor(float(rank)))
                assert_same_on_all_ranks(backward(model, rank, step))
        finally:
            done.set()
        for reader in readers:
            reader.result()
    assert sync.piggybacked()["kl"].item() == 0.5
    assert sync.stats().num_steps == 30


@on_ranks(2)
def test_python_runs_while_backward_waits(rank: int, world_size: int) -> None:
    model, others = Mlp(), dist.new_group()
    attach(model)
    backward(model, rank, 0)
    if rank == 1:
        dist.barrier(others)  # until Python has run on the other rank, whose backward waits for this one's
        backward(model, rank, 1)
        return
    has_begun = threading.Event()
    model.layers[4].weight.register_post_accumulate_grad_hook(lambda _: has_begun.set())

    def let_the_other_rank_come() -> None:
        has_begun.wait()
        time.sleep(0.1)  # by now backward waits; if it held the GIL, this line would not be left
        dist.barrier(others)

    with _threads(1) as pool:
        came = pool.submit(let_the_other_rank_come)
        backward(model, rank, 1)
        came.result()


@on_ranks(2, cases={"overlap": [True, False]})
def test_one_engine_is_ahead_of_another(rank: int, world_size: int, overlap: bool) -> None:
    """Rank 0's second model waits for rank 1's, whose first is a step ahead of rank 0's: none may wait for itself."""
    torch.manual_seed(1)
    models = [Mlp(), Mlp()]
    syncs = [attach(model, process_group=dist.new_group(), overlap=overlap) for model in models]

    def train(index: int, steps: range) -> None:
        for step in steps:
            expected = mean_gradients(models[index], step)
            backward(models[index], rank, step)
            if not overlap:
                syncs[index].synchronize()
            assert_all_bitwise_equal(grads_of(models[index]), expected, f"step {step}: averaged gradient")

    train(0, range(1))
    train(1, range(1))
    with _threads(2) as pool:
        one = pool.submit(train, 1 - rank, range(1, 4))
        time.sleep(0.5 + 0.5 * rank)  # by now it waits for the other rank, and rank 1's first model is a step ahead
        other = pool.submit(train, rank, range(1, 4))
        one.result()
        other.result()


@on_ranks(2, shared_memory=False)
def test_the_progress_thread_starts_later_where_it_could_not_at_first(rank: int, world_size: int) -> None:
    model = Mlp()
    compression = Compression("none", reduce="fp32", algorithm="two_shot")
    sync = fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS, overlap=False)

    def step(number: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(number + rank))
        sync.synchronize()
        for grad in grads_of(model):
            assert grad.unique().tolist() == [number + 0.5]

    def step_without_new_threads() -> None:
        refuse(Call("clone3"), errno.EAGAIN)
        step(0)

    def has_progress_thread() -> bool:
        return "fastsync\n" in (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

    with _threads(1) as threads:
        threads.submit(step_without_new_threads).result(HANG_SECONDS)
    assert not has_progress_thread()
    step(1)
    assert has_progress_thread()


@on_ranks(1)
def test_a_hook_is_registered_while_an_accumulator_is_destroyed(rank: int, world_size: int) -> None:
    """Objects of Python go with the accumulator, and the thread that destroys it waits for the GIL."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    sync = fastsync.attach(parameters)
    is_destroying, has_registered = threading.Event(), threading.Event()

    class Owned:
        def __call__(self, *grads: object) -> None:
            pass

        def __del__(self) -> None:
            is_destroying.set()
            has_registered.wait(HANG_SECONDS)  # lets go of the GIL

    def register() -> None:
        is_destroying.wait()
        parameters[0]._backward_hooks = None  # destroys hooks of C++, as the first of Python does
        parameters[1].register_hook(lambda grad: grad)
        has_registered.set()

    parameters[0].register_hook(lambda grad: grad)  # from here on the engine keeps the accumulator
    accumulator = parameters[0].view_as(parameters[0]).grad_fn.next_functions[0][0]
    accumulator.register_hook(Owned())
    del accumulator
    parameters[0].data = parameters[0].data.double()  # the next gradient comes from another one
    with _threads(1) as pool:
        registered = pool.submit(register)
        sum(parameter.sum() for parameter in parameters).backward()
        registered.result()
    sum(parameter.sum() for parameter in parameters).backward()
    assert sync.stats().num_steps == 2


# ---- forks ----------------------------------------------------------------------------------------------------------


def _in_fork(call: Callable[[], object]) -> str:
    """Runs it in a forked child, and returns what it raised there: "" where it did not."""
    mine, childs = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        message = ""
        try:
            call()
        except Exception as error:
            message = str(error)
        childs.send(message)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    childs.close()
    try:
        assert mine.poll(CHILD_SECONDS), "the forked child hangs"
        message = mine.recv()
        child.join(CHILD_SECONDS)
        assert child.exitcode == 0
        return message
    finally:
        child.kill()
        child.join()


@on_ranks(2)
def test_forked_children(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Fallible()
    sync = attach(model)

    def train_alone() -> None:
        sync.detach()
        assert_averages_nothing(model, rank, 3)

    for step in range(3):
        assert_averages(model, rank, step)
        if step == 2:
            fail(model, rank, step)  # buckets are left to send, and only the parent can send them
        assert _in_fork(lambda: None) == ""
        for call in (lambda: backward(model, rank, 2), sync.synchronize):
            message = _in_fork(call)
            assert FORKED in message
            assert "call detach() in the child" in message
        assert _in_fork(train_alone) == ""
    assert_averages(model, rank, 4)


@on_ranks(2, cases={"shared_memory, compression": [(True, "none"), (True, "bf16"), (False, "bf16")]})
def test_forked_children_of_a_ddp_hook_and_of_fully_shard(rank: int, world_size: int, compression: str) -> None:
    ddp = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    fastsync.register_comm_hook(ddp, compression)
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression(compression, reduce="fp32"))]))
    identity = torch.empty(8, device="meta")

    def reduce_scatter() -> None:
        output = torch.empty(8 // world_size)
        engine.reduce_scatter(identity, "part", output, torch.ones(8), dist.ReduceOp.AVG)
        assert output.eq(1).all()

    for call in (partial(backward, ddp, rank, 0), reduce_scatter):
        for _ in range(2):  # DDP regroups its buckets after the first
            call()
        assert FORKED in _in_fork(call)
        call()
    dist.barrier()


@on_ranks(2)
def test_fork_while_another_thread_is_in_backward(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model, unused, has_forked = Mlp(), [Mlp()], dist.new_group()
    sync = attach(model)
    attach(unused[0])
    assert_averages(model, rank, 0)
    if rank == 1:
        dist.barrier(has_forked)
        assert_averages(model, rank, 1)
        return
    with _threads(2) as pool:
        waiting = pool.submit(backward, model, rank, 1)  # for rank 1
        while True:
            try:
                pool.submit(sync.stats).result(timeout=0.5)
            except FutureTimeoutError:
                break  # the engine is busy: it waits
        try:
            assert _in_fork(unused.clear) == ""
        finally:
            dist.barrier(has_forked)
        assert_all_bitwise_equal(waiting.result(), mean_gradients(model, 1), "gradient of the parent")
