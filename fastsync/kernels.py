"""Which kernels go over the gradients of a device: fused ones, or torch's own operations, with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist

from . import _C
from .installation import cuda_left_out

_seen: set[str] = set()


def look_at_kernels(group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
    """Warns, once for a type of device, where torch's own operations go over its gradients and nobody has chosen that.

    Gradients that the group sums on the host are a CPU's.

    Raises:
        ValueError: FASTSYNC_KERNELS is neither "auto" nor "aten".
    """
    for kind in {_C.device_of_sums(group, device).type for device in set(devices)} - _seen:
        is_chosen = os.environ.get("FASTSYNC_KERNELS") == "aten"
        if _C.kernels(kind) == "generic" and not is_chosen:
            warnings.warn(
                f"fastsync: gradients on {kind} are packed by torch's own operations, which take more launches and "
                f"more memory than fused kernels do: {_why_none(kind)}",
                stacklevel=5,  # where attach was called
            )
        _seen.add(kind)


def _why_none(kind: str) -> str:
    is_nvidia = kind == "cuda" and torch.version.hip is None
    reason = cuda_left_out() if is_nvidia else "fastsync has some for CPUs and for NVIDIA GPUs"
    return f"none were built for it ({reason})" if reason else "none were built for it"
