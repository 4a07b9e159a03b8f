"""Starting ranks with Ray Train: workers that Ray places on its cluster, and starts again when one is lost."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any


def launch_on_ray(fn: Callable[..., Any], nproc: int, *args: Any, max_restarts: int = 0, timeout: float = 900.0) -> Any:
    """Calls ``fn(*args)`` on ``nproc`` workers of Ray, by its TorchTrainer, and returns what rank 0 returns.

    The workers belong to the cluster that Ray is connected to, or that RAY_ADDRESS names; where there is none, Ray
    starts one on this machine. Each has one GPU if the cluster has as many, else one core. Ray opens the default
    process group, NCCL or Gloo, before it calls ``fn``; ``fastsync.distributed.process_group`` then yields that one.

    A function that is called again, after a worker was lost, goes on by itself from what it has saved where all
    machines of the cluster can read it.

    Args:
        fn: what each rank does. It and ``args`` travel by pickle.
        nproc: number of ranks.
        *args: what ``fn`` is called with.
        max_restarts: how often Ray starts all ranks again, and calls ``fn`` again, when one has failed.
        timeout: how long a rank waits for the others in a collective, in seconds.

    Raises:
        ray.train.TrainingFailedError: a rank raised or died, once more than ``max_restarts``.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths mean what they mean here
    if not ray.is_initialized():
        ray.init()
    resources = ray.cluster_resources()
    use_gpu = resources.get("GPU", 0) >= nproc
    if not use_gpu and resources.get("CPU", 0) < nproc:
        warnings.warn(
            f"Ray has {resources.get('CPU', 0):.0f} cores, and waits until there are more: nproc={nproc} ranks take "
            "one each",
            stacklevel=2,
        )
    trainer = TorchTrainer(
        lambda: fn(*args),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo", timeout_s=max(1, round(timeout))),
        scaling_config=ScalingConfig(num_workers=nproc, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=max_restarts)),
    )
    return trainer.fit().return_value
