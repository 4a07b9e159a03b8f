"""Which kernels run: those made for a device, or torch's own operations where there are none, which is said."""

from __future__ import annotations

import os
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

import fastsync
from fastsync import _C
from tests import fake_device, passes
from tests.engine.entry_points import average
from tests.engine.stderr import NO_TIMES, expected_on_stderr
from tests.fake_device import DEVICE
from tests.models import Given, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

SHAPES = [(7, 33), (300,)]


def _events_of_pack() -> set[str]:
    grads, stats = [torch.ones(5), torch.ones(3)], torch.zeros(4, dtype=torch.float64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ops.fastsync.pack(grads, torch.empty(8, dtype=torch.float16), stats)
    return {event.key for event in recorded.key_averages()}


def test_torchs_own_operations_run_where_they_are_asked_for() -> None:
    assert _C.kernels("cpu") == "fused"
    assert "aten::cat" not in _events_of_pack()
    passes.use_kernels("aten")
    assert _C.kernels("cpu") == "generic"
    assert "aten::cat" in _events_of_pack()
    passes.use_kernels("auto")
    assert _C.kernels("cpu") == "fused"


@on_ranks(1)
def test_the_environment_is_looked_at_when_a_model_is_registered(rank: int, world_size: int) -> None:
    """Who chooses torch's own operations is not warned."""
    model = torch.nn.Linear(2, 2)
    os.environ["FASTSYNC_KERNELS"] = "fused"
    refused(lambda: fastsync.attach(model), "FASTSYNC_KERNELS:")
    os.environ["FASTSYNC_KERNELS"] = "aten"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync = fastsync.attach(model)
    assert sync.stats().kernels == ""
    model(torch.ones(2)).sum().backward()
    assert sync.stats().kernels == "generic"


@fake_device.on_ranks(2)
def test_a_device_without_kernels_trains_with_one_warning(rank: int, world_size: int) -> None:
    group = fake_device.new_group(with_passes=False)
    with expected_on_stderr(NO_TIMES), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entry_point in ("attach", "hook"):
            like = [grad.to(DEVICE) for grad in random_grads(rank, 0, SHAPES, torch.float32)]
            given = average(entry_point, Given(like).to(DEVICE), group=group)
            for _ in range(2):
                given.step(like)
            assert given.handle.stats().kernels == "generic"
    said = [str(each.message) for each in caught if "fastsync" in str(each.message)]
    assert len(said) == 1
    assert said[0].startswith(f"fastsync: gradients on {DEVICE} are packed by torch's own operations")
    assert "fastsync doctor" in said[0]
