"""Counts what a piece of work starts: kernels, and calls of the process group, as torch.profiler sees them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LAUNCHES = {
    "cpu": "launches: operators that one call dispatches, nested ones included.",
    "cuda": "launches: kernels and copies that one call starts on the GPU, by torch.profiler.",
}
"""What is counted, by the device's type."""
GROUP_CALL = "c10d::"
"""What the operators begin with that calls of a process group go through."""


@dataclass(frozen=True)
class Counts:
    """Of one run."""

    launches: int
    """On a GPU the kernels and copies that it starts, on a CPU the operators it dispatches, nested ones too."""
    group_calls: int
    """Of a process group, from the threads that the profiler follows: those of the caller and of its backward."""


def count(run: Callable[[], object], device: torch.device) -> Counts:
    """Runs it once under the profiler, and waits for the device."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = list(profiler.events() or [])
    on_host = [event.name for event in events if event.device_type == DeviceType.CPU]
    # Collectives are annotated on the device as well, which starts nothing.
    on_device = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    return Counts(
        launches=len(on_device) if on_gpu else sum("::" in name for name in on_host),
        group_calls=sum(name.startswith(GROUP_CALL) for name in on_host),
    )
