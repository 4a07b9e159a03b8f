"""Which kernels run: those made for a device, or torch's own operations where there are none, which is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fastsync
from fastsync import _C
from tests import fake_device, passes
from tests.engine.entry_points import average
from tests.engine.stderr import NO_TIMES, expected_on_stderr
from tests.fake_device import DEVICE
from tests.models import Given, random_grads
from tests.ranks import run_ranks
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


def _refuses_the_environment(rank: int, world_size: int) -> None:
    refused(lambda: fastsync.attach(torch.nn.Linear(2, 2)), "FASTSYNC_KERNELS:")


def test_the_environment_is_looked_at_when_a_model_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(_with_kernels, 1, "fused", _refuses_the_environment)


def _with_kernels(rank: int, world_size: int, name: str, then: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSYNC_KERNELS", name)
        then(rank, world_size)  # type: ignore[operator]


def _stats_say_which(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync = fastsync.attach(model)
    assert sync.stats().kernels == ""
    model(torch.ones(2)).sum().backward()
    assert sync.stats().kernels == "generic"


def test_who_chooses_torchs_operations_is_not_warned() -> None:
    run_ranks(_with_kernels, 1, "aten", _stats_say_which)


def _warns_once(rank: int, world_size: int) -> None:
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


def test_a_device_without_kernels_trains_with_one_warning() -> None:
    fake_device.run_ranks(_warns_once, 2)
