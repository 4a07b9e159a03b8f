"""What decides how weights are rounded here: the same program gives other last bits on another CPU or GPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_OF_CPU = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo, on x86 and on ARM."""
_SETTINGS = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that choose the instructions of libraries."""


def describe_machine(tensors: Iterable[Tensor]) -> str:
    """Returns a text that ranks have in common if the same program gives these tensors the same bits on them."""
    devices = {tensor.device for tensor in tensors}
    on_cuda = [each for each in devices if each.type == "cuda"]
    parts = [f"torch {torch.__version__}", *sorted({torch.cuda.get_device_name(each) for each in on_cuda})]
    if len(on_cuda) < len(devices):
        parts += [platform.machine(), *_of_cpu(), torch.backends.cpu.get_cpu_capability()]
        parts += [f"{name}={value}" for name in _SETTINGS if (value := os.environ.get(name))]
        parts.append(f"threads {torch.get_num_threads()}")
    return ", ".join(parts)


def _of_cpu() -> list[str]:
    """Returns the kind of this host's first CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return [f"{name} {fields[name]}" for name in _OF_CPU if name in fields]
