"""A DDP backward with each hook, two Gloo ranks on this machine, against a backward without communication (no_sync).

The model's own backward is next to nothing, so what is timed is DDP's copies, the hook, and the collective. This
process is rank 0; a second one runs the same steps as rank 1. ``python -m benchmarks sync`` compares more, in turns.
"""

import functools
import importlib
import multiprocessing
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from benchmarks.baselines.ways import WAYS, Step, is_right
from benchmarks.baselines.workloads import SIZES, Workload

WARMUP = 10
TIMEOUT = timedelta(seconds=120)
COMPARED = (
    "no_sync",
    "ddp",
    "ddp/allreduce_hook",
    "ddp/fp16_compress_hook",
    "fastsync.register_comm_hook/none",
    "fastsync.register_comm_hook/fp16",
    "fastsync.register_comm_hook/bf16",
    "fastsync.fp16_compress_hook",
)


def _start(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    # DDP imports it; imported while a group is open, it keeps the group's threads alive beyond the group.
    importlib.import_module("torch._dynamo")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=TIMEOUT)


@functools.cache
def _workload(size: str) -> Workload:
    return Workload(SIZES[size], torch.device("cpu"))


def _build(size: str, way: str) -> Step:
    return WAYS[way].build(_workload(size), dist.group.WORLD)


def _prepare(step: Step) -> None:
    """Prepares a step and meets the other rank, so that neither waits for the other's start."""
    step.prepare()
    dist.barrier()


def _peer(store: str, orders: Connection) -> None:
    """Rank 1: runs what it is told, a (size, way, number of steps) at a time, until None comes."""
    _start(1, store)
    for size, way, num_steps in iter(orders.recv, None):
        step = _build(size, way)
        for _ in range(num_steps):
            _prepare(step)
            step.run()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def peer() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_peer, args=(f"{folder}/store", theirs), daemon=True)
        process.start()
        _start(0, f"{folder}/store")
        yield ours
        ours.send(None)
        dist.destroy_process_group()
        process.join(TIMEOUT.total_seconds())


@pytest.mark.parametrize("way", COMPARED)
@pytest.mark.parametrize("size", SIZES)
def test_backward(benchmark, peer: Connection, size: str, way: str) -> None:
    benchmark.group = f"DDP backward, {size} float32 parameters, 2 Gloo ranks"
    benchmark.extra_info["what"] = way
    num_rounds = SIZES[size].repetitions
    peer.send((size, way, 1 if benchmark.disabled else WARMUP + num_rounds))
    step = _build(size, way)
    benchmark.pedantic(step.run, setup=lambda: _prepare(step), rounds=num_rounds, warmup_rounds=WARMUP)
    assert is_right(WAYS[way], step, _workload(size))
