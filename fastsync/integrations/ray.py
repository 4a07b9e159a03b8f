"""Starting ranks with Ray Train: Ray chooses the machines of its cluster, and starts ranks again when one is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def launch_on_ray(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    use_gpu: bool | None = None,
    max_restarts: int = 0,
    timeout: float = 900.0,
) -> Any:
    """Calls ``fn(*args)`` on ``nproc`` workers of Ray, by its TorchTrainer, and returns the result of rank 0.

    The cluster is the one that Ray is connected to, or that RAY_ADDRESS names; without one, Ray starts on this machine.
    Each worker has one GPU or one core. Ray opens the default process group, NCCL or Gloo, before it calls ``fn``, and
    ``fastsync.distributed.process_group`` uses it. After the loss of a worker Ray calls ``fn`` again. It has to resume
    from a folder that all machines can read.

    Args:
        fn: what each rank does. It and ``args`` travel by pickle.
        nproc: number of ranks.
        *args: the arguments of ``fn``.
        use_gpu: whether each worker takes a GPU. By default it does if the cluster has as many.
        max_restarts: how often Ray starts all ranks again when one has failed.
        timeout: how long a rank waits for the others in a collective, in seconds.

    Raises:
        ValueError: workers are to take GPUs, and the cluster has too few.
        ray.train.TrainingFailedError: a rank raised or died, once more than ``max_restarts``.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths then mean the same as in this process
    if not ray.is_initialized():
        ray.init()
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if use_gpu and num_gpus < nproc:
        raise ValueError(
            f"use_gpu=True: Ray's cluster has {num_gpus:g} GPUs, for {nproc} ranks; start fewer, or leave it out "
            "(fastsync train: --device auto)"
        )
    use_gpu = num_gpus >= nproc if use_gpu is None else use_gpu
    trainer = TorchTrainer(
        lambda: fn(*args),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo", timeout_s=max(1, round(timeout))),
        scaling_config=ScalingConfig(num_workers=nproc, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=max_restarts)),
    )
    return trainer.fit().return_value
