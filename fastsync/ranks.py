"""Starting ranks on this machine, with torchrun's launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch_ranks(fn: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Calls ``fn(*args)`` on ``nproc`` ranks, each a process of its own, and returns their results in rank order.

    ``fn`` is a function at the top level of a module; ``args`` and results travel by pickle. The ranks find each other
    through the environment variables that torchrun sets, as ``fastsync.distributed.process_group`` reads them.

    Raises:
        ChildFailedError: a rank raised or died. Its traceback has been logged.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: any that is free
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
    )
    results = elastic_launch(config, _on_one_thread)(fn, args)
    return [results[rank] for rank in range(nproc)]


def _on_one_thread(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    return fn(*args)
