"""Counts what a piece of work starts, as torch.profiler sees it."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LAUNCHES = {
    "cpu": "launches: operators that one call dispatches, nested ones included.",
    "cuda": "launches: kernels and copies that one call starts on the GPU, by torch.profiler.",
}
"""What is counted, by the device's type."""


def num_launches(run: Callable[[], object], device: torch.device) -> int:
    """Runs it once under the profiler, and waits for the device."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    if on_gpu:  # collectives are annotated on the device as well, which starts nothing
        return sum(event.device_type == DeviceType.CUDA and not event.is_user_annotation for event in events)
    return sum(event.device_type == DeviceType.CPU and "::" in event.name for event in events)
