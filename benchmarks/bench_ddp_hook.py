"""A DDP backward with each hook, two Gloo ranks on this machine, against DDP without communication (no_sync).

The model's own backward is next to nothing (each parameter's gradient is a constant), so what is timed is DDP's copies,
the hook, and the collective. This process is rank 0; a second one runs the same steps as rank 1.
"""

import importlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fastsync

WARMUP = 10
TIMEOUT = timedelta(seconds=120)
# One small policy (6 tensors), one middle-sized, one of about two DDP buckets.
MODELS = {
    "5 K": [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)],
    "0.5 M": [(512, 256), (512,), (512, 512), (512,), (256, 512), (256,)],
    "12 M": [(1024, 1024), (1024,)] * 12,
}
ROUNDS = {"5 K": 300, "0.5 M": 100, "12 M": 20}


class Parameters(nn.Module):
    """Parameters whose gradient is a number each."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()


def _no_hook(model: DistributedDataParallel) -> None:
    del model


def _torch_hook(hook: Callable) -> Callable[[DistributedDataParallel], None]:
    return lambda model: model.register_comm_hook(None, hook)


def _fastsync_hook(compression: str) -> Callable[[DistributedDataParallel], object]:
    return lambda model: fastsync.register_comm_hook(model, compression)


WAYS = {
    "no_sync": _no_hook,
    "DDP": _no_hook,
    "torch allreduce_hook": _torch_hook(default_hooks.allreduce_hook),
    "torch fp16_compress_hook": _torch_hook(default_hooks.fp16_compress_hook),
    "fastsync none": _fastsync_hook("none"),
    "fastsync fp16": _fastsync_hook("fp16"),
    "fastsync bf16": _fastsync_hook("bf16"),
    "fastsync.fp16_compress_hook": _torch_hook(fastsync.fp16_compress_hook),
}


class Step:
    """One way's model, ready to run backward after backward."""

    def __init__(self, size: str, way: str) -> None:
        self.model = DistributedDataParallel(Parameters(MODELS[size]))
        WAYS[way](self.model)
        self.context = self.model.no_sync if way == "no_sync" else nullcontext
        self.factor = torch.tensor(1.0 + dist.get_rank())

    def prepare(self) -> None:
        """The forward, which is not timed, and a barrier, so that no rank waits for the other's start."""
        self.model.zero_grad()
        with self.context():
            self.loss = self.model(self.factor)
        dist.barrier()

    def run(self) -> None:
        with self.context():
            self.loss.backward()

    def check(self, synchronised: bool) -> None:
        """Ranks 0 and 1 have gradients of 1 and 2: the mean is 1.5 at any width."""
        expected = 1.5 if synchronised else self.factor.item()
        for weight in self.model.parameters():
            assert torch.equal(weight.grad, torch.full_like(weight, expected))


def _start(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    # DDP imports it; imported while a group is open, it keeps the group's threads alive beyond the group.
    importlib.import_module("torch._dynamo")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=TIMEOUT)


def _peer(store: str, orders: Connection) -> None:
    """Rank 1: runs what it is told, a (size, way, number of steps) at a time, until None comes."""
    _start(1, store)
    for size, way, num_steps in iter(orders.recv, None):
        step = Step(size, way)
        for _ in range(num_steps):
            step.prepare()
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", MODELS)
def test_backward(benchmark, peer: Connection, size: str, way: str) -> None:
    benchmark.group = f"DDP backward, {size} float32 parameters, 2 Gloo ranks"
    benchmark.extra_info.update(what=way, is_limit=way == "no_sync")
    peer.send((size, way, 1 if benchmark.disabled else WARMUP + ROUNDS[size]))
    step = Step(size, way)
    benchmark.pedantic(step.run, setup=step.prepare, rounds=ROUNDS[size], warmup_rounds=WARMUP)
    step.check(synchronised=way != "no_sync")
