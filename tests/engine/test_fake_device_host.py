"""A device on which the process group does not work: its gradients are summed on the host, with the bits of a CPU's."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from tests import fake_device, ranks
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import Averaged
from tests.engine.test_fake_device_sync import ENTRY_POINTS, ONE_LEVEL, SHAPES, begin, gradients_of, train, world
from tests.fake_device import DEVICE, watched
from tests.models import SMALL_BUCKETS, Given, random_grads


def _begin_over_the_host(entry_point: str, compression: Compression, device: str, group: dist.ProcessGroup) -> Averaged:
    """DDP's own messages go through the device's group, and what the hook sends through Gloo."""
    if entry_point != "hook":
        return begin(entry_point, compression, device, group)
    ddp = DistributedDataParallel(
        Given(random_grads(0, 0, SHAPES, torch.float32)).to(device),
        process_group=fake_device.new_group() if device == DEVICE else group,
        bucket_cap_mb=SMALL_BUCKETS,
        find_unused_parameters=True,
    )
    return Averaged(ddp, fastsync.register_comm_hook(ddp, compression, process_group=group))


def _gives_the_cpus_bits(rank: int, world_size: int, entry_point: str) -> None:
    fake_device.load()
    for compression in ONE_LEVEL:
        expected = train(entry_point, compression, "cpu", world(), _begin_over_the_host)
        with watched():
            actual = train(entry_point, compression, DEVICE, world(), _begin_over_the_host)
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise_equal(one, other, f"{entry_point}, {compression}: tensor {index}")


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "memory"])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_the_bits_are_the_cpus(entry_point: str, shared_memory: bool) -> None:
    fake_device.build()
    ranks.run_ranks(_gives_the_cpus_bits, 2, entry_point, shared_memory=shared_memory)


def _counts_copies(rank: int, world_size: int) -> None:
    extension = fake_device.load()
    model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the CPU's kernels run
        sync = fastsync.attach(model, process_group=world())
    steps = [gradients_of(rank, 0, DEVICE) for _ in range(3)]
    for grads in steps:
        extension.take_host_waits()
        model.zero_grad()
        model(grads).backward()
    assert extension.take_host_waits() == ["copy_ to the host"]  # there; the host does not wait for the way back
    stats = sync.stats()
    assert (len(stats.buckets), stats.kernels) == (1, "fused")
    assert stats.transport == "shared_memory"
    assert all(p.grad is not None and p.grad.device.type == DEVICE for p in model.parameters())
    assert sync.grad_stats().grad_norm.device.type == "cpu"


def test_a_bucket_goes_to_the_host_in_one_copy() -> None:
    fake_device.build()
    ranks.run_ranks(_counts_copies, 2)
