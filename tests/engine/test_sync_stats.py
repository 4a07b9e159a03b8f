"""What a sync tells: statistics of the gradients, and of what the syncs cost."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    STAMP,
    Mlp,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    group_of_one,
    random_grads,
)
from tests.ranks import run_ranks

ITEMSIZES = {"none": 4, "bf16": 2, "fp16": 2}


def _sync_stats_add_up(rank: int, world_size: int) -> None:
    for wire, itemsize in ITEMSIZES.items():
        ddp = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
        hook = fastsync.register_comm_hook(ddp, wire)
        empty = hook.stats()
        assert (empty.num_steps, empty.num_syncs, empty.numel, empty.wire_bytes, empty.buckets) == (0, 0, 0, 0, ())
        assert (empty.pack_time, empty.collective_time, empty.unpack_time, empty.exposed_time) == (0.0, 0.0, 0.0, 0.0)

        num_syncs = 0
        for step in range(1, 4):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            stats = hook.stats()
            num_syncs += len(stats.buckets)
            assert stats.num_steps == step
            assert stats.num_syncs == num_syncs
            assert stats.numel == 8082
            # Messages and other dtypes than the gradients' have room for a stamp in every step.
            assert stats.wire_bytes == step * (8082 + STAMP * world_size) * itemsize

        # DDP made other buckets after the first step.
        assert len(stats.buckets) >= 3
        for bucket in stats.buckets:
            assert bucket.num_syncs == 2
            stamp = STAMP * world_size if bucket is stats.buckets[-1] else 0
            assert bucket.wire_bytes == 2 * (bucket.numel + stamp) * itemsize
            assert min(bucket.pack_time, bucket.collective_time, bucket.unpack_time) > 0
        for part in ("pack_time", "collective_time", "unpack_time"):
            assert getattr(stats, part) > sum(getattr(bucket, part) for bucket in stats.buckets)
        longest = max(bucket.collective_time for bucket in stats.buckets)
        assert 0 < stats.exposed_time < stats.pack_time + stats.collective_time + stats.unpack_time
        assert longest < stats.collective_time


def _grad_stats_are_those_of_the_gradients(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for wire in ITEMSIZES:
            shapes = [(7, 33), (), (300,), (250,)]
            like = random_grads(rank, 0, shapes, dtype)
            ddp = given_ddp(like, bucket_cap_mb=SMALL_BUCKETS)
            hook = fastsync.register_comm_hook(ddp, wire)
            for step in range(3):
                grads = random_grads(rank, step, shapes, dtype)
                if step == 2 and rank == 1:
                    grads[0][3, 4], grads[2][17], grads[2][18] = float("inf"), float("nan"), float("-inf")
                averaged = backward_of(ddp, grads)
                expected = nn.utils.get_total_norm([grad.double() for grad in averaged])
                stats = hook.grad_stats()
                assert (stats.grad_norm.dtype, stats.grad_norm.shape) == (torch.float32, ())
                assert (stats.num_nonfinite.dtype, stats.num_saturated.dtype) == (torch.int64, torch.int64)
                torch.testing.assert_close(
                    stats.grad_norm.double(), expected, rtol=1e-6, atol=0.0, equal_nan=True, msg=f"{dtype} over {wire}"
                )
                assert stats.num_nonfinite.item() == (3 if step == 2 else 0)
                assert stats.num_saturated.item() == 0
                assert_same_on_all_ranks([stats.grad_norm])


def _grad_stats_are_of_the_newest_step(rank: int, world_size: int) -> None:
    ddp = given_ddp([torch.ones(4), torch.ones(2)], find_unused_parameters=True, bucket_cap_mb=2.0**-20)
    hook = fastsync.register_comm_hook(ddp)
    backward_of(ddp, [torch.full((4,), 3.0), torch.full((2,), 100.0)])
    assert hook.grad_stats().grad_norm.item() == pytest.approx((4 * 9 + 2 * 1e4) ** 0.5)
    backward_of(ddp, [torch.full((4,), 1.0 + 2 * rank), None])
    assert hook.grad_stats().grad_norm.item() == 4.0
    before = hook.grad_stats()
    with ddp.no_sync():
        ddp([torch.ones(4), torch.ones(2)]).backward()
    assert hook.grad_stats().grad_norm.item() == before.grad_norm.item()
    assert hook.stats().num_steps == 2


def _all_stats(rank: int, world_size: int) -> None:
    _sync_stats_add_up(rank, world_size)
    _grad_stats_are_those_of_the_gradients(rank, world_size)
    _grad_stats_are_of_the_newest_step(rank, world_size)


def test_stats_are_exact_and_those_of_the_averaged_gradients() -> None:
    run_ranks(_all_stats, 2, shared_memory=False)


def _every_step_is_timed(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Mlp())  # which makes another bucket after the first step, while nobody reads
    hook = fastsync.register_comm_hook(ddp)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
    totals = hook._engine.totals().all
    assert totals.num_timed == totals.num_syncs == 4


def test_the_times_of_buckets_that_are_no_more_count() -> None:
    run_ranks(_every_step_is_timed, 2)


def _what_takes_long(rank: int, world_size: int) -> None:
    """The first bucket is on its way, or another rank is late, for so long that all else counts for nothing."""
    seconds = 1.0
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)

    def step(is_late: bool = False) -> dict[str, float]:
        before = sync.stats()
        model.zero_grad()
        loss = model(batch(rank, 0)).square().mean()
        if is_late:
            time.sleep(seconds)
        loss.backward()
        after = sync.stats()
        times = ("exposed_time", "collective_time", "unpack_time")
        return {name: getattr(after, name) - getattr(before, name) for name in times}

    step()  # the ranks agree; from now on buckets are sent during backward
    late = step(is_late=rank == 1)
    if rank == 0:
        assert late["unpack_time"] < seconds / 2 < late["collective_time"]
        assert late["exposed_time"] > seconds / 2
    hook = model[0].weight.register_hook(lambda grad: time.sleep(seconds))
    hidden = step()
    hook.remove()
    assert hidden["exposed_time"] < seconds < hidden["collective_time"]


def test_times_are_of_what_takes_them() -> None:
    run_ranks(_what_takes_long, 2)


def test_complex_gradients_are_measured_by_their_parts() -> None:
    with group_of_one():
        ddp = given_ddp([torch.zeros(3, dtype=torch.complex64)])
        hook = fastsync.register_comm_hook(ddp)
        backward_of(ddp, [torch.tensor([3.0 + 4.0j, 0.0, complex(float("nan"), float("nan"))])])
        assert hook.grad_stats().num_nonfinite.item() == 2
        backward_of(ddp, [torch.tensor([3.0 + 4.0j, 0.0, 5.0j])])
        assert hook.grad_stats().grad_norm.item() == pytest.approx(50**0.5)
        assert hook.stats().wire_bytes == 2 * 3 * 8


def test_there_are_no_grad_stats_before_the_first_backward() -> None:
    with group_of_one():
        hook = fastsync.register_comm_hook(given_ddp([torch.ones(2)]))
        for state in (hook, fastsync.HookState()):
            with pytest.raises(RuntimeError, match="no gradients have been synchronised yet"):
                _ = state.grad_stats()


def _both_passes_are_profiled(rank: int, world_size: int) -> None:
    ddp = given_ddp([torch.ones(300), torch.ones(300)], bucket_cap_mb=SMALL_BUCKETS)
    fastsync.register_comm_hook(ddp, "fp16")
    grads = [torch.ones(300), torch.ones(300)]
    backward_of(ddp, grads)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward_of(ddp, grads)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert {name: counts.get(name) for name in ("fastsync::pack", "fastsync::unpack")} == {
        "fastsync::pack": 2,
        "fastsync::unpack": 2,
    }


def test_the_profiler_shows_pack_and_unpack_of_every_bucket() -> None:
    run_ranks(_both_passes_are_profiled, 2)


def test_handles_and_statistics_can_be_read() -> None:
    with group_of_one():
        model = nn.Linear(3, 2)
        sync = fastsync.attach(model, "fp16")
        assert repr(sync) == "GradientSynchronizer(2 parameters with 8 values, compression: fp16, all_reduce, 1 ranks)"
        model(torch.ones(1, 3)).sum().backward()
        assert repr(sync.grad_stats()) == "GradStats(grad_norm=2.82843, num_nonfinite=0, num_saturated=0)"
        assert repr(sync.stats()).startswith("SyncStats(1 steps through process group; in each 1 buckets of 8 values, ")
