"""The engine's way over streams, on the fake device: the bits it gives on a CPU, in order, and a host that never
waits. What the device proves and what not is in docs/reference/gpu.md."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import compress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastsync
from fastsync import Compression
from fastsync.sync.synchronizer import GradientSynchronizer
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import Averaged, average
from tests.engine.stderr import NO_TIMES, NOTHING_UNUSED, expected_on_stderr
from tests.fake_device import DEVICE, unwaited, watched
from tests.models import Given, random_grads

SHAPES = [(7, 33), (300,), (), (2, 3, 4), (513, 7)]
STEPS = 6
# By now the buckets have been agreed on, and DDP has rebuilt its own.
FIRST_QUIET_STEP = 2
WITH_MISSING = 4

ONE_LEVEL = [
    Compression(),
    Compression("bf16"),
    Compression("fp16"),
    Compression("fp16", reduce="fp32", algorithm="two_shot", error_feedback=True),
    Compression("bf16", reduce="fp32", algorithm="one_shot", error_feedback=True),
    Compression("int8", algorithm="one_shot"),
    Compression("int8", algorithm="two_shot", error_feedback=True),
]
TWO_LEVELS = [
    Compression("bf16", ranks_per_node=2),
    Compression("int8", ranks_per_node=2, error_feedback=True),
]


def gradients_of(rank: int, step: int, device: str) -> list[Tensor | None]:
    """Step WITH_MISSING lacks one on rank 0 alone, and another everywhere."""
    grads: list[Tensor | None] = [grad.to(device) for grad in random_grads(rank, step, SHAPES, torch.float32)]
    if step == WITH_MISSING:
        grads[3] = None
        grads[1] = None if rank == 0 else grads[1]
    return grads


ENTRY_POINTS = ("attach", "hook", "all_reduce")
OF_USED = "attach with op=mean_of_used"


def begin(entry_point: str, compression: Compression, device: str, group: dist.ProcessGroup) -> Averaged:
    model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(device)
    if entry_point == OF_USED:
        return average("attach", model, compression, group=group, op="mean_of_used")
    options = {"find_unused_parameters": True} if entry_point == "hook" else {}
    return average(entry_point, model, compression, group=group, **options)


def _step(given: Averaged, grads: list[Tensor | None], value: Tensor) -> list[Tensor]:
    """What it gives beside the gradients. Where something rides, gradients of two backwards travel."""
    if not isinstance(given.handle, GradientSynchronizer):
        given.backward(given.model(grads))
        return [given.grad_norm()]
    given.handle.piggyback("kl", value)
    with given.no_sync():
        given.model(grads).backward()
    given.backward(given.model(grads))
    return [given.handle.piggybacked()["kl"], given.grad_norm()]


def train(entry_point: str, compression: Compression, device: str, group: dist.ProcessGroup) -> list[Tensor]:
    """What some steps gave, as copies on the host, to which nothing is copied before the last step is over."""
    rank = dist.get_rank()
    steps = [gradients_of(rank, step, device) for step in range(STEPS)]
    values = [torch.full((3,), rank + step / 8, device=device) for step in range(STEPS)]
    given = begin(entry_point, compression, device, group)
    kept: list[Tensor] = []
    for step in range(STEPS):
        given.model.zero_grad()
        # DDP itself waits where it looks for unused parameters.
        may_wait = device != DEVICE or entry_point == "hook"
        quiet = FIRST_QUIET_STEP <= step < WITH_MISSING and not may_wait
        with unwaited() if quiet else nullcontext():
            kept += _step(given, steps[step], values[step])
            for parameter in given.model.parameters():
                kept.append(torch.tensor(False) if parameter.grad is None else parameter.grad.clone())
    return [tensor.cpu() for tensor in kept]


NORM_AT = {"attach": 1, OF_USED: 1, "hook": 0, "all_reduce": 0}  # among what a step gives


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def warnings_of_ddp(entry_point: str) -> AbstractContextManager[None]:
    return expected_on_stderr(NOTHING_UNUSED, NO_TIMES) if entry_point == "hook" else nullcontext()


def gives_the_cpus_bits(
    rank: int, world_size: int, entry_point: str, compressions: list[Compression], kernels: str, runs_at_once: bool
) -> None:
    group = fake_device.new_group(with_passes=kernels == "fused")
    if runs_at_once:
        fake_device.backend_of(group).run_at_once()
    if kernels == "generic":  # test_kernels.py has the warning
        warnings.filterwarnings("ignore", f"fastsync: gradients on {DEVICE} are packed by torch's own operations")
    with warnings_of_ddp(entry_point):
        for compression in compressions:
            expected = train(entry_point, compression, "cpu", world())
            with watched():
                actual = train(entry_point, compression, DEVICE, group)
            for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
                what = f"{entry_point}, {compression}: tensor {index}"
                takes_norm_anew = kernels == "generic" or entry_point == OF_USED
                if takes_norm_anew and index % (NORM_AT[entry_point] + 1 + len(SHAPES)) == NORM_AT[entry_point]:
                    # Another order of additions: sixteen roundings to float32, see test_ops.py.
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
                else:
                    assert_bitwise_equal(one, other, what)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(
    ("world_size", "kernels", "runs_at_once"),
    [(2, "fused", False), (2, "generic", False), (4, "fused", False), (2, "fused", True), (4, "fused", True)],
)
@fake_device.on_ranks()
def test_the_bits_are_the_cpus(rank: int, world_size: int, entry_point: str, kernels: str, runs_at_once: bool) -> None:
    """Of kernels of its own, and of torch's operations where none were built for the device. With a process group
    that groups calls, and with one whose calls run at once."""
    compressions = ONE_LEVEL + (TWO_LEVELS if world_size == 4 else [])
    if world_size == 4:
        # A CPU's messages carry a stamp in every step, those of a device in one of several, and attach tells on a CPU
        # how late ranks are. By the length of a message goes the order in which Gloo adds on four ranks.
        is_alike = [each.reduce == "fp32" or (entry_point == "hook" and each.wire == "none") for each in compressions]
        compressions = [*compress(compressions, is_alike)]
    gives_the_cpus_bits(rank, world_size, entry_point, compressions, kernels, runs_at_once)


@fake_device.on_ranks(2, cases={"kernels": ["fused", "generic"]})
def test_means_of_used_parameters_are_the_cpus(rank: int, world_size: int, kernels: str) -> None:
    """Nor does the host wait to find out which ranks have used a parameter."""
    gives_the_cpus_bits(rank, world_size, OF_USED, ONE_LEVEL, kernels, False)


def _train_sparse(entry_point: str, compression: str, device: str, group: dist.ProcessGroup) -> list[Tensor]:
    """In the last step rank 1 has no rows."""
    rank = dist.get_rank()
    embedding = torch.nn.Embedding(11, 3, sparse=True).to(device)
    given = average(entry_point, embedding, compression, group=group)
    kept: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        num_rows = 0 if (rank, step) == (1, 2) else 6 + rank
        rows = torch.randint(11, (num_rows,), generator=generator).to(device)
        factors = torch.randn(num_rows, 3, generator=generator).to(device)
        given.model.zero_grad()
        given.backward((given.model(rows) * factors).sum())
        grad = embedding.weight.grad
        assert grad is not None
        kept += [grad._indices().clone(), grad._values().clone(), given.grad_norm()]
    return [tensor.cpu() for tensor in kept]


@fake_device.on_ranks(2, cases={"entry_point": ENTRY_POINTS})
def test_sparse_means_are_the_cpus(rank: int, world_size: int, entry_point: str) -> None:
    group = fake_device.new_group()
    with expected_on_stderr(NO_TIMES) if entry_point == "hook" else nullcontext():
        for compression in ("none", "fp16"):
            expected = _train_sparse(entry_point, compression, "cpu", world())
            with watched():
                actual = _train_sparse(entry_point, compression, DEVICE, group)
            for one, other in zip(actual, expected, strict=True):
                assert_bitwise_equal(one, other, f"{entry_point}, {compression}")


@fake_device.on_ranks(2, cases={"entry_point": ENTRY_POINTS})
def test_after_a_step_the_group_keeps_no_buffer(rank: int, world_size: int, entry_point: str) -> None:
    group = fake_device.new_group()
    fake_device.backend_of(group).run_at_once()
    with warnings_of_ddp(entry_point):
        for compression in ONE_LEVEL:
            given = begin(entry_point, compression, DEVICE, group)
            for step in range(FIRST_QUIET_STEP):
                _step(given, gradients_of(rank, step, DEVICE), torch.zeros(3, device=DEVICE))
                kept = fake_device.backend_of(group).kept_bytes()
                assert kept == 0, f"{entry_point}, {compression}: the group keeps tensors"


@fake_device.on_ranks(2)
def test_an_error_in_a_group_leaves_none_open_and_names_the_bucket(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    backend = fake_device.backend_of(group)
    for compression, num_calls in (
        (Compression(), 1),
        (Compression("bf16"), 2),  # in one group, for side values stay float32
        (Compression("int8", algorithm="two_shot"), 2),
    ):
        for failing in range(num_calls):
            model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)
            sync = fastsync.attach(model, compression, process_group=group)
            for step in range(3):
                if step == 2:
                    backend.fail_after(failing)
                sync.piggyback("kl", torch.ones(1, device=DEVICE))
                loss = model([grad.to(DEVICE) for grad in random_grads(rank, step, SHAPES, torch.float32)])
                message = rf"told to .*averaging bucket 0 failed on rank {rank} of 2.*Where the ranks are"
                with pytest.raises(dist.DistBackendError, match=message) if step == 2 else nullcontext():
                    loss.backward()
            assert not backend.is_open(), f"{compression}: the group is still open after call {failing} failed"
            sync.detach()


@fake_device.on_ranks(2)
def test_out_of_memory_stays_the_error_that_it_is_and_nobody_is_asked(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)
    sync = fastsync.attach(model, process_group=group)
    for step in range(3):
        grads = [grad.to(DEVICE) for grad in random_grads(rank, step, SHAPES, torch.float32)]
        loss = model(grads)
        if step == 1:  # for the bucket, that is, which is larger than any gradient
            fake_device.load().set_most_bytes(4 * sum(grad.numel() for grad in grads) - 4)
        message = rf"out of memory: no \d+ bytes \(fastsync: averaging bucket 0 failed on rank {rank} of 2\)$"
        with pytest.raises(torch.OutOfMemoryError, match=message) if step == 1 else nullcontext():
            loss.backward()
        fake_device.load().set_most_bytes(2**40)
        sync.abandon_step()
        model.zero_grad()
