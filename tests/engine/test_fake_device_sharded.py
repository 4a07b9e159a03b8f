"""Reduce-scatters and all-gathers of fully_shard, by the engine itself on the fake device: the CPU's bits, no races,
and what a captured one goes on using."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.fake_device import DEVICE, watched

NUMELS = [7 * 33, 300, 5]  # of a shard's parameters
STEPS = 4
WIRES = [
    Compression(reduce="fp32", algorithm="two_shot"),
    Compression("bf16", reduce="fp32", algorithm="two_shot"),
    Compression("fp16", reduce="fp32", algorithm="two_shot", error_feedback=True),
    Compression("int8", algorithm="two_shot", error_feedback=True),
]


def values_of(rank: int, step: int, world_size: int) -> Tensor:
    return torch.randn(world_size * sum(NUMELS), generator=torch.Generator().manual_seed(100 * step + rank))


class Scatter:
    """Reduce-scatters of one module, on one device."""

    def __init__(self, group: dist.ProcessGroup, compression: Compression, device: str) -> None:
        self.engine = _C.ShardedState(group)
        self.engine.set_compressions(in_engine([Candidate(compression)]))
        self.device = device
        self.identity: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        given = values.to(self.device)
        if self.identity is None:
            self.identity = torch.empty(given.numel(), device="meta")
        shard = torch.empty(len(given) // dist.get_world_size(), device=self.device)
        self.engine.reduce_scatter(self.identity, "module", shard, given, dist.ReduceOp.AVG)
        return shard


@fake_device.on_ranks(2)
def test_a_reduce_scatter_has_the_bits_of_a_cpu(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in WIRES:
        on_cpu, on_device = (
            Scatter(each, compression, name) for each, name in ((_cpu_group(), "cpu"), (group, DEVICE))
        )
        with watched():
            for step in range(STEPS):
                values = values_of(rank, step, world_size)
                shard = on_device(values)
                assert_bitwise_equal(shard.cpu(), on_cpu(values), f"{compression}: step {step}")
                del shard


def _cpu_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@fake_device.on_ranks(2)
def test_a_reduce_scatter_keeps_no_wire_between_calls(rank: int, world_size: int) -> None:
    """The allocator has the wire between two calls, so that all modules share it."""
    scatter = Scatter(fake_device.new_group(), WIRES[0], DEVICE)
    allocated_bytes = fake_device.load().allocated_bytes
    kept = []
    for num_values in (10, 100_000):
        scatter.identity = None
        for _ in range(STEPS):
            scatter(torch.ones(world_size * num_values))
        kept.append(allocated_bytes())
    assert kept[1] - kept[0] < 200_000, kept  # tables of chunks take some 100,000, and the wire would take 800,000


class Gather:
    """All-gathers of one module, on one device."""

    def __init__(self, group: dist.ProcessGroup, compression: Compression, device: str) -> None:
        self.engine = _C.ParameterGather(group, ["module"])
        self.engine.set_compressions(in_engine([Candidate(compression)]))
        self.output = torch.zeros(group.size() * sum(NUMELS), device=device)
        self.mine = self.output.view(group.size(), -1)[group.rank()]

    def __call__(self, values: Tensor) -> Tensor:
        self.mine.copy_(values)
        self.engine.all_gather(0, self.output, NUMELS).wait()
        return self.output


@fake_device.on_ranks(2)
def test_an_all_gather_has_the_bits_of_a_cpu(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in (Compression(), Compression("bf16"), Compression("int8")):
        on_cpu, on_device = Gather(_cpu_group(), compression, "cpu"), Gather(group, compression, DEVICE)
        with watched():
            for step in range(STEPS):
                values = values_of(rank, step, 1)
                gathered = on_device(values.to(DEVICE))
                assert_bitwise_equal(gathered.cpu(), on_cpu(values), f"{compression}: step {step}")


@pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="this torch asks no device for it")
@fake_device.on_ranks(2)
def test_what_a_captured_gather_touches_outlives_the_handle(rank: int, world_size: int) -> None:
    group, extension = fake_device.new_group(), fake_device.load()
    for compression in (Compression("bf16"), Compression("int8")):
        with watched():
            gather, values = Gather(group, compression, DEVICE), values_of(rank, 0, 1).to(DEVICE)
            for _ in range(2):
                gather(values)
            extension.begin_capture()
            try:
                gather(values)
            finally:
                graph = extension.end_capture()
            extension.replay(graph)
            gather.engine = None  # type: ignore[assignment]
            extension.replay(graph)
