"""The backend "fastsync" of ``torch.distributed``: collectives of CPU ranks in the memory of their host."""

from __future__ import annotations

import torch.distributed as dist

from . import _C

NAME = "fastsync"


def register() -> None:
    """Makes ``init_process_group("fastsync")`` and ``new_group(backend="fastsync")`` possible.

    ``import fastsync`` calls it. From torch 2.14 on torch calls it by itself, by its entry point.
    """
    if dist.is_available() and dist.is_gloo_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _C.HostBackend, devices=["cpu"])
