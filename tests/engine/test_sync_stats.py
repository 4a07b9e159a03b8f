"""What a sync tells: statistics of the gradients, and of what the syncs cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

import fastsync
from fastsync.sync.stats import BucketStats
from tests.engine.entry_points import ALL, average
from tests.models import (
    SMALL_BUCKETS,
    STAMP,
    Given,
    Mlp,
    backward_of,
    batch,
    given_ddp,
)
from tests.ranks import on_ranks
from tests.refused import refused

ITEMSIZES = {"none": 4, "bf16": 2, "fp16": 2}
SHAPES = [(7, 33), (), (300,), (250,)]
TIMES = ("pack_time", "collective_time", "unpack_time")
PARTS = ("fastsync::pack", "fastsync::wait", "fastsync::unpack")


def _num_on_wire(buckets: Sequence[BucketStats]) -> int:
    """Each bucket has at most one gradient whose size is no multiple of 8, and it is not the last."""
    return sum(-(-bucket.numel // 8) * 8 for bucket in buckets)


@on_ranks(2, cases={"entry_point": ["hook", "drop-in hook", "attach"]}, shared_memory=False)
def test_stats_add_up(rank: int, world_size: int, entry_point: str) -> None:
    is_hook = "hook" in entry_point
    for wire, itemsize in ITEMSIZES.items():
        model = Mlp()
        given = average(entry_point, model, wire)
        empty = given.handle.stats()
        assert (empty.num_steps, empty.num_syncs, empty.numel, empty.wire_bytes, empty.buckets) == (0, 0, 0, 0, ())
        assert (empty.pack_time, empty.collective_time, empty.unpack_time, empty.exposed_time) == (0.0, 0.0, 0.0, 0.0)
        num_syncs = 0
        for step in range(1, 4):
            given.model.zero_grad()
            given.backward(given.model(batch(rank, step)).square().mean())
            stats = given.handle.stats()
            num_syncs += len(stats.buckets)
            assert (stats.num_steps, stats.num_syncs, stats.numel) == (step, num_syncs, 8082)
            # What travels beside the gradients is float32. attach sends flags, how late ranks are, and a stamp in every
            # step. Where a 16-bit all_reduce has no room for a hook's stamp, the first two syncs of the last bucket
            # send one. DDP makes other buckets after its first step.
            num_stamps = min(step, 3) if is_hook and wire != "none" else step
            flags = 0 if is_hook else len(list(model.parameters())) + world_size
            values = 8082 if is_hook else _num_on_wire(stats.buckets)
            beside = step * flags + num_stamps * STAMP * world_size
            assert stats.wire_bytes == step * values * itemsize + beside * 4
        assert len(stats.buckets) >= 3
        assert sum(bucket.numel for bucket in stats.buckets) == 8082
        for bucket in stats.buckets:
            assert bucket.num_syncs == (2 if is_hook else 3)  # DDP made other buckets after the first step
            assert min(bucket.pack_time, bucket.collective_time, bucket.unpack_time) > 0
        for part in TIMES:
            of_buckets = sum(getattr(bucket, part) for bucket in stats.buckets)
            assert getattr(stats, part) > of_buckets if is_hook else getattr(stats, part) == pytest.approx(of_buckets)
        assert 0 < stats.exposed_time < stats.pack_time + stats.collective_time + stats.unpack_time


@on_ranks(2)
def test_times_are_of_what_takes_them(rank: int, world_size: int) -> None:
    """The first bucket is on its way, or another rank is late, for so long that all else counts for nothing."""
    seconds = 0.4
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


@pytest.mark.usefixtures("one_rank")
def test_complex_gradients_are_measured_by_their_parts() -> None:
    ddp = given_ddp([torch.zeros(3, dtype=torch.complex64)])
    hook = fastsync.register_comm_hook(ddp)
    backward_of(ddp, [torch.tensor([3.0 + 4.0j, 0.0, complex(float("nan"), float("nan"))])])
    assert hook.grad_stats().num_nonfinite.item() == 2
    backward_of(ddp, [torch.tensor([3.0 + 4.0j, 0.0, 5.0j])])
    assert hook.grad_stats().grad_norm.item() == pytest.approx(50**0.5)
    assert hook.stats().numel == 2 * 3


@pytest.mark.usefixtures("one_rank")
def test_before_the_first_sync_there_are_no_statistics() -> None:
    for entry_point in {*ALL} - {"all_reduce"}:
        given = average(entry_point, Given([torch.ones(2)]))
        refused(given.handle.grad_stats, "no gradients have been synchronised yet", kind=RuntimeError)
        if entry_point not in ("drop-in hook", "sharded"):  # neither is clipped by fastsync
            clip = partial(fastsync.clip_grad_norm_, given.handle, 1.0)
            refused(clip, "no gradients have been synchronised yet", kind=RuntimeError)
        assert given.handle.stats().num_steps == 0


@on_ranks(2, cases={"wire": ["none", "bf16", "int8", "int8+ef"], "shared_memory": [True, False]})
def test_a_bucket_of_empty_parameters_has_times(rank: int, world_size: int, wire: str) -> None:
    """DDP has a bucket for each dtype, of which each may be the last."""
    for dtypes in ([torch.float32, torch.float64], [torch.float64, torch.float32]):
        grads = [torch.full((numel,), 1.0 + rank, dtype=each) for numel, each in zip((0, 300), dtypes, strict=True)]
        given = average("hook", Given(grads), wire)
        for _ in range(3):
            averages = given.step(grads)
            assert [grad.unique().tolist() for grad in averages if grad is not None] == [[], [1.5]]
        stats = given.handle.stats()
        assert sorted(bucket.numel for bucket in stats.buckets) == [0, 300]
        assert all(0 <= getattr(bucket, part) < 60 for bucket in stats.buckets for part in TIMES), stats
