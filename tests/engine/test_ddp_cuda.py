"""The DDP hook on GPUs: the bits it gives on a CPU, in stream order, and a host that never waits."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import reference
from tests.models import (
    SMALL_BUCKETS,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    random_grads,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
on_one_and_two_ranks = pytest.mark.parametrize("world_size", [1, 2])

WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(7, 33), (300,), (), (2, 3, 4), (513, 257)]
STEPS = 5
# Clock cycles for which a device is kept busy: about 10 ms and one second on GPUs of today.
SHORT, LONG = 20_000_000, 2_000_000_000


def _grads(rank: int, step: int) -> list[Tensor]:
    # None is so small that fp16 has only a subnormal for it. Then the bucket's scale, a power of two, cannot be seen in
    # the result, and the reference, to which all gradients are one bucket, stays exact for several.
    return [grad + grad.sign() / 64 for grad in random_grads(rank, step, SHAPES, torch.float32)]


def _small_bucket_ddp(device: str) -> DistributedDataParallel:
    return given_ddp([grad.to(device) for grad in _grads(0, 0)], bucket_cap_mb=SMALL_BUCKETS)


def _assert_averages(ddp: DistributedDataParallel, wire: str, rank: int, world_size: int) -> None:
    """Takes steps, and compares each with the reference and with the other ranks."""
    device = next(ddp.parameters()).device
    for step in range(STEPS):
        everyone = [_grads(other, step) for other in range(world_size)]
        mine = [grad.to(device) for grad in everyone[rank]]
        with torch.cuda.device(device):
            torch.cuda._sleep(SHORT)  # the gradients come late: who does not wait for their stream reads something else
        actual = backward_of(ddp, [grad.clone() for grad in mine])
        mean = reference.all_reduce_mean(everyone, WIRE_DTYPES[wire])
        assert_all_bitwise_equal(actual, mean, f"{wire}: step {step}, gradient")
        assert_same_on_all_ranks(actual)


def _like_ddp(rank: int, device: str) -> None:
    plain, hooked = _small_bucket_ddp(device), _small_bucket_ddp(device)
    fastsync.register_comm_hook(hooked)
    for step in range(STEPS):
        mine = [grad.to(device) for grad in _grads(rank, step)]
        assert_all_bitwise_equal(backward_of(hooked, mine), backward_of(plain, mine), f"step {step}, gradient")


def _averages(rank: int, world_size: int, device: str) -> None:
    for wire in WIRE_DTYPES:
        ddp = _small_bucket_ddp(device)
        hook = fastsync.register_comm_hook(ddp, wire)
        _assert_averages(ddp, wire, rank, world_size)
        assert len(hook.stats().buckets) >= 3, "DDP did not rebuild its buckets: the test shows less than it says"
    drop_in = _small_bucket_ddp(device)
    drop_in.register_comm_hook(None, fastsync.fp16_compress_hook)
    _assert_averages(drop_in, "fp16", rank, world_size)
    _like_ddp(rank, device)


@on_one_and_two_ranks
def test_gradients_are_bitwise_the_reference_and_ddps_without_a_hook(world_size: int) -> None:
    run_ranks(_averages, world_size, "cuda", backend="nccl")


def _measures_and_clips(rank: int, world_size: int, device: str) -> None:
    for wire in WIRE_DTYPES:
        ddp = _small_bucket_ddp(device)
        hook = fastsync.register_comm_hook(ddp, wire)
        for step, max_norm in enumerate((0.5, 1e4, 0.5)):
            averaged = backward_of(ddp, [grad.to(device) for grad in _grads(rank, step)])
            in_float64 = [nn.Parameter(grad.double()) for grad in averaged]
            for parameter in in_float64:
                parameter.grad = parameter.detach().clone()
            expected_norm = nn.utils.clip_grad_norm_(in_float64, max_norm)
            stats = hook.grad_stats()
            torch.testing.assert_close(stats.grad_norm.double(), expected_norm, rtol=1e-7, atol=0.0)
            assert (stats.num_nonfinite.item(), stats.num_saturated.item()) == (0, 0)

            norm = fastsync.clip_grad_norm_(hook, max_norm)
            assert norm.item() == stats.grad_norm.item()
            for actual, parameter in zip(grads_of(ddp), in_float64, strict=True):
                # The norm, its sum with 1e-6, the reciprocal and two products are rounded to float32: 5 · 2^-24.
                torch.testing.assert_close(actual.double(), parameter.grad, rtol=3e-7, atol=0.0)
            if max_norm > expected_norm.item():
                assert_all_bitwise_equal(grads_of(ddp), averaged, "gradient below the maximum")
            assert_same_on_all_ranks([norm, *grads_of(ddp)])

        broken = _grads(rank, 0)
        if rank == world_size - 1:
            broken[0][3, 4], broken[4][512, 256] = float("inf"), float("nan")
        averaged = backward_of(ddp, [grad.to(device) for grad in broken])
        assert (averaged[0][3, 4].isinf().item(), averaged[4][512, 256].isnan().item()) == (True, True)
        assert (hook.grad_stats().num_nonfinite.item(), hook.grad_stats().num_saturated.item()) == (2, 0)


@on_one_and_two_ranks
def test_grad_stats_and_clipping_are_torchs(world_size: int) -> None:
    run_ranks(_measures_and_clips, world_size, "cuda", backend="nccl")


def _host_never_waits(rank: int, world_size: int, device: str) -> None:
    for wire in WIRE_DTYPES:
        ddp = DistributedDataParallel(Mlp().to(device), bucket_cap_mb=SMALL_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, wire)
        optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
        batches = [batch(rank, step).to(device) for step in range(STEPS)]
        for step, inputs in enumerate(batches, start=1):
            if step == 3:  # DDP has rebuilt its buckets by now, and the ranks have agreed on them
                torch.cuda.set_sync_debug_mode("error")
            if step == STEPS:  # that mode does not see every wait, so the host is to be done while the device is not
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG)
                slept = torch.cuda.current_stream().record_event()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            fastsync.clip_grad_norm_(hook, 0.01)
            optimizer.step()
        assert not slept.query(), "the host waited for the device"
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            hook.grad_stats().grad_norm.item()
        torch.cuda.set_sync_debug_mode("default")
        assert_same_on_all_ranks(list(ddp.parameters()))


@on_one_and_two_ranks
def test_the_host_never_waits_for_the_device(world_size: int) -> None:
    run_ranks(_host_never_waits, world_size, "cuda", backend="nccl")


def _times(rank: int, world_size: int, device: str) -> None:
    ddp = _small_bucket_ddp(device)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    start = time.perf_counter()
    for step in range(STEPS):
        backward_of(ddp, [grad.to(device) for grad in _grads(rank, step)])
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    stats = hook.stats()
    assert 0 < stats.exposed_time < elapsed
    for bucket in stats.buckets:
        assert bucket.num_syncs == STEPS - 1  # in the first step DDP had other buckets
        assert min(bucket.pack_time, bucket.collective_time, bucket.unpack_time) > 0
        assert bucket.pack_time + bucket.collective_time + bucket.unpack_time < elapsed


def test_times_are_the_devices_once_it_is_done() -> None:
    run_ranks(_times, 2, "cuda", backend="nccl")


def _side_stream(rank: int, world_size: int, device: str) -> None:
    side = torch.cuda.Stream()
    for wire in WIRE_DTYPES:
        with torch.cuda.stream(side):
            ddp = _small_bucket_ddp(device)
            fastsync.register_comm_hook(ddp, wire)
        torch.cuda._sleep(LONG)  # keeps the default stream busy: what ran there by mistake would come too late
        with torch.cuda.stream(side):
            _assert_averages(ddp, wire, rank, world_size)
        torch.cuda.synchronize()


def test_backward_on_a_side_stream() -> None:
    run_ranks(_side_stream, 2, "cuda", backend="nccl")


def _other_device(rank: int, world_size: int) -> None:
    _averages(rank, world_size, f"cuda:{1 - torch.cuda.current_device()}")


@on_one_and_two_ranks
def test_gradients_on_another_device_than_the_current(world_size: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: gradients on one while the other is current")
    run_ranks(_other_device, world_size, backend="nccl")


def _gloo(rank: int, world_size: int) -> None:
    averages = []
    for device in ("cpu", "cuda"):
        ddp = _small_bucket_ddp(device)
        fastsync.register_comm_hook(ddp)
        backward_of(ddp, [grad.to(device) for grad in _grads(rank, 0)])
        averages.append([p.grad.cpu() for p in ddp.parameters() if p.grad is not None])
    assert_all_bitwise_equal(*averages, what="gradient")


def test_gradients_on_a_gpu_over_gloo() -> None:
    run_ranks(_gloo, 2, backend="gloo")
