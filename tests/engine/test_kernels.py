"""Which kernels run: those made for a device, or torch's own operations where there are none, which is said."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fastsync
from fastsync import _C, _handle
from tests import fake_device, reference
from tests.fake_device import DEVICE
from tests.models import Given, random_grads
from tests.ranks import run_ranks

SHAPES = [(7, 33), (300,)]


def _events_of_pack() -> set[str]:
    grads, stats = [torch.ones(5), torch.ones(3)], torch.zeros(4, dtype=torch.float64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ops.fastsync.pack(grads, torch.empty(8, dtype=torch.float16), stats)
    return {event.key for event in recorded.key_averages()}


def test_torchs_own_operations_run_where_they_are_asked_for() -> None:
    assert _C.kernels("cpu") == "fused"
    assert "aten::cat" not in _events_of_pack()
    _C.use_kernels("aten")
    assert _C.kernels("cpu") == "generic"
    assert "aten::cat" in _events_of_pack()
    _C.use_kernels("auto")
    assert _C.kernels("cpu") == "fused"


class _DividesAsCuda(TorchDispatchMode):
    """A number on the host divides by its inverse there, which may lose one bit."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.div.Tensor and args[1].dim() == 0:
            return args[0] * (1 / args[1])
        return func(*args, **(kwargs or {}))


def test_the_scales_of_blocks_do_not_depend_on_how_a_device_divides() -> None:
    grad, stats = (
        torch.randn(400 * 128, generator=torch.Generator().manual_seed(0)),
        torch.zeros(4, dtype=torch.float64),
    )
    wire, expected = (torch.zeros(400 * 132, dtype=torch.uint8) for _ in range(2))
    reference.pack([grad], expected, stats)
    _C.use_kernels("aten")
    with _DividesAsCuda():
        torch.ops.fastsync.pack([grad], wire, stats)
    _C.use_kernels("auto")
    assert torch.equal(wire, expected)


def test_only_a_device_that_has_no_kernels_takes_torchs_operations() -> None:
    assert _C.kernels("cuda") == ("fused" if _C.built_with_cuda() else "generic")
    assert _C.kernels("mps") == "generic"
    with pytest.raises(ValueError, match="no passes were built for mps"):
        _C.passes("mps")


def test_another_choice_of_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FASTSYNC_KERNELS: expected auto.*got fast"):
        _C.use_kernels("fast")


def _refuses_the_environment(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"FASTSYNC_KERNELS: expected auto.*got fused"):
        fastsync.attach(torch.nn.Linear(2, 2))


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


def _given() -> Given:
    return Given(random_grads(0, 0, SHAPES, torch.float32)).to(DEVICE)


def _warns_once(rank: int, world_size: int, entry_point: str) -> None:
    group = fake_device.new_group(with_passes=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = _given()
            if entry_point == "attach":
                handle = fastsync.attach(model, process_group=group)
            else:
                ddp = DistributedDataParallel(model, process_group=group)
                if entry_point == "hook":
                    handle = fastsync.register_comm_hook(ddp)
                else:
                    handle = fastsync.HookState(group)
                    ddp.register_comm_hook(handle, fastsync.fp16_compress_hook)
                model = ddp
            grads = [grad.to(DEVICE) for grad in random_grads(rank, 0, SHAPES, torch.float32)]
            model(grads).backward()
            model(grads).backward()
            assert handle.stats().kernels == "generic"
    said = [str(each.message) for each in caught if "fastsync" in str(each.message)]
    assert len(said) == 1
    assert said[0].startswith(f"fastsync: gradients on {DEVICE} are packed by torch's own operations")
    assert said[0].endswith("none were built for it (fastsync has some for CPUs and for NVIDIA GPUs)")


@pytest.mark.parametrize("entry_point", ["attach", "hook", "hook of torch's signature"])
def test_a_device_without_kernels_trains_with_one_warning(entry_point: str) -> None:
    """Also the second backward, which used to die in DDP after the first had failed."""
    fake_device.run_ranks(_warns_once, 2, entry_point)


class _OfCuda:
    @staticmethod
    def kernels(kind: str) -> str:
        return "generic"

    @staticmethod
    def device_of_sums(group: dist.ProcessGroup, device: torch.device) -> torch.device:
        return device


def test_of_cuda_the_warning_says_what_the_build_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_handle, "_seen", set())
    monkeypatch.setattr(_handle, "cuda_left_out", lambda: "no nvcc; to build again: `pip install .`")
    monkeypatch.setattr(_handle, "_C", _OfCuda)
    monkeypatch.delenv("FASTSYNC_KERNELS", raising=False)
    group = dist.ProcessGroup(0, 1)
    with pytest.warns(UserWarning, match=r"on cuda are packed.*\(no nvcc; to build again: `pip install \.`\)$"):
        _handle.warn_of_generic_kernels(group, [torch.device("cuda", 0)])
