"""What of a sync runs beside backward on a device, and what does not run at all, on the fake device."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastsync
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.engine.attached import Fallible, assert_flags_pair_up_after_failures
from tests.engine.stderr import NO_TIMES, expected_on_stderr
from tests.fake_device import DEVICE, backend_of, watched
from tests.models import Given, random_grads

SHAPES = [(7, 33), (300,), (513, 7)]
SMALL_BUCKETS = 1e-3
OF_ONE_GRADIENT = 1e-6  # so that the bucket of a layer's bias is unpacked beside the rest of backward, where that fails
PACK, UNPACK = "fastsync::pack", "fastsync::unpack"
NUM_STEPS = 3


def grads_on(device: str, rank: int) -> list[Tensor]:
    return [grad.to(device) for grad in random_grads(rank, 1, SHAPES, torch.float32)]


def new_model() -> Given:
    return Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)


def passes_of_a_step(model: nn.Module, grads: list[Tensor]) -> list[str]:
    """In the order in which they began, after steps that make the ranks agree."""
    for _ in range(NUM_STEPS):
        model.zero_grad()
        model(grads).backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(grads).backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name in (PACK, UNPACK)]


@fake_device.on_ranks(2)
def test_a_bucket_is_unpacked_before_the_last_one_is_packed(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in ("none", "fp16", "int8"):
        with watched():
            model = new_model()
            fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS, process_group=group)
            passes = passes_of_a_step(model, grads_on(DEVICE, rank))
            assert passes.count(PACK) == passes.count(UNPACK) == len(SHAPES)
            assert passes.index(UNPACK) < len(passes) - 1 - passes[::-1].index(PACK), passes


@pytest.mark.parametrize("world_size", [1, 2])
@fake_device.on_ranks()
def test_a_hook_at_full_width_packs_and_unpacks_nothing(rank: int, world_size: int) -> None:
    """NCCL multiplies by 1/n as it adds, so only the statistics are left to do, which nobody has asked for."""
    group = fake_device.new_group()
    with expected_on_stderr(NO_TIMES), watched():
        ddp = DistributedDataParallel(new_model(), process_group=group, bucket_cap_mb=SMALL_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, process_group=group)
        passes = passes_of_a_step(ddp, grads_on(DEVICE, rank))
        assert passes == []
        means = [torch.stack(grads).div(world_size).sum(0) for grads in zip(*all_grads(world_size), strict=True)]
        for parameter, mean in zip(ddp.parameters(), means, strict=True):
            assert parameter.grad is not None
            assert_bitwise_equal(parameter.grad, mean)
        hook.compression = "bf16"  # whose saturated values are counted
        ddp([grad * 3e38 for grad in grads_on(DEVICE, rank)]).backward()
        assert hook.grad_stats().num_saturated.item() > 0
        hook.compression = "none"
        ddp.zero_grad()
        ddp(grads_on(DEVICE, rank)).backward()
        assert hook.grad_stats().num_saturated.item() == 0


def all_grads(world_size: int) -> list[list[Tensor]]:
    return [grads_on("cpu", rank) for rank in range(world_size)]


class SharesMemory(nn.Module):
    """Autograd makes the gradients of ``bias``, ``one`` and ``other`` of memory that others read or have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.one = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.bias.unsqueeze(0) + (self.one.view(2, 2) + self.other.view(2, 2)).view(1, 4)


@fake_device.on_ranks(2)
def test_gradients_that_share_memory_with_what_backward_reads(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    torch.manual_seed(0)
    model = SharesMemory()
    expected = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for each in range(world_size):
        grads = torch.autograd.grad(model(torch.ones(1, 4) * (each + 1)).square().sum(), list(model.parameters()))
        expected = [total + grad / world_size for total, grad in zip(expected, grads, strict=True)]
    model.to(DEVICE)
    with watched():
        fastsync.attach(model, bucket_cap_mb=OF_ONE_GRADIENT, process_group=group)
        for _ in range(NUM_STEPS):
            model.zero_grad()
            model(torch.ones(1, 4, device=DEVICE) * (rank + 1)).square().sum().backward()
            for parameter, mean in zip(model.parameters(), expected, strict=True):
                assert parameter.grad is not None
                assert_bitwise_equal(parameter.grad, mean)


@fake_device.on_ranks(2)
def test_gradients_may_be_zeroed_after_a_failed_backward(rank: int, world_size: int) -> None:
    """What ran beside the backward that failed does not write to gradients later."""
    group = fake_device.new_group()
    with watched():
        model = Fallible().to(DEVICE)
        sync = fastsync.attach(model, bucket_cap_mb=OF_ONE_GRADIENT, process_group=group)
        inputs = torch.ones(16, 32, device=DEVICE)
        for step in range(NUM_STEPS * 2):
            model.fails = rank == 0 and step % 2 == 1
            with suppress(ArithmeticError):
                model(inputs).square().mean().backward()
            time.sleep(0.05 if model.fails else 0)  # by then the device's thread has let go of the backward
            model.zero_grad(set_to_none=False)
        sync.abandon_step()


@fake_device.on_ranks(2)
def test_an_engine_may_go_when_its_device_is_broken(rank: int, world_size: int) -> None:
    """Whatever the device throws, the engine and what runs beside its backward can be let go."""
    group = fake_device.new_group()
    model = Fallible().to(DEVICE)
    sync = fastsync.attach(model, bucket_cap_mb=OF_ONE_GRADIENT, process_group=group)
    inputs = torch.ones(16, 32, device=DEVICE)
    for step in range(NUM_STEPS + 1):
        model.zero_grad()
        model.fails = step == NUM_STEPS
        with suppress(ArithmeticError):
            model(inputs).square().mean().backward()
    fake_device.load().set_broken(True)
    gone = weakref.ref(sync)
    del sync, model
    gc.collect()
    assert gone() is None
    fake_device.load().set_broken(False)


@fake_device.on_ranks(2)
def test_wires_lie_in_memory_that_the_group_lends(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    for compression in ("none", "fp16", "int8"):
        model = new_model()
        fastsync.attach(model, compression, process_group=group)
        before = backend_of(group).num_lent()
        passes_of_a_step(model, grads_on(DEVICE, rank))
        assert backend_of(group).num_lent() > before


class OnTwoDevices(nn.Module):
    """Two branches, of which one is on a CPU. The one that is used last gets its gradients first."""

    def __init__(self, is_cpu_first: bool) -> None:
        super().__init__()
        self.on_cpu = nn.Linear(3, 3)
        self.on_device = nn.Linear(3, 3).to(DEVICE)
        self._is_cpu_first = is_cpu_first

    def forward(self, inputs: Tensor) -> Tensor:
        if self._is_cpu_first:
            there = self.on_device(inputs.to(DEVICE)).cpu()
            return self.on_cpu(there + 1)
        here = self.on_cpu(inputs).to(DEVICE)
        return self.on_device(here + 1).cpu()


@fake_device.on_ranks(2)
def test_ranks_whose_gradients_get_ready_on_different_devices_first(rank: int, world_size: int) -> None:
    fake_device.load()
    group = dist.new_group(backend=f"cpu:gloo,{DEVICE}:{DEVICE}")
    torch.manual_seed(0)
    model = OnTwoDevices(is_cpu_first=rank == 0)
    with watched():
        fastsync.attach(model, process_group=group)
        for _ in range(NUM_STEPS):
            model.zero_grad()
            model(torch.ones(2, 3) * rank).square().sum().backward()
        averages = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([average.flatten() for average in averages])
    others = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(others, flat)
    for other in others:
        assert_bitwise_equal(other, flat)


@fake_device.on_ranks(2)
def test_collectives_of_ones_own_after_a_failed_backward(rank: int, world_size: int) -> None:
    assert_flags_pair_up_after_failures(rank, NUM_STEPS * 2, fake_device.new_group(), DEVICE)
