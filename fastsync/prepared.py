"""One line for trainers that wrap models themselves, in DDP or by ``fully_shard``, as Accelerate does."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .autotune.request import AnyCompression
from .ddp import CommHook, register_comm_hook
from .sharded import ShardedGradients, register_reduce_scatter


def register_prepared(model: nn.Module, compression: AnyCompression = "bf16") -> CommHook | ShardedGradients | None:
    """Has the gradients of a model that is wrapped already go through the engine, whichever way it is wrapped.

    Call it on every rank, on what ``accelerator.prepare`` returned, before the first backward. Of a model in
    DistributedDataParallel it is ``register_comm_hook``, of one that went through ``fully_shard``
    ``register_reduce_scatter``. For Hugging Face's Trainer there is ``fastsync.hf_trainer.FastsyncCallback``.

    Args:
        model: the wrapped model, also where it was compiled.
        compression: what travels, as these functions take it.

    Returns:
        The handle; None where there is one rank only, and nothing to do.

    Raises:
        ValueError: the model is not wrapped, or as these functions do.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return register_comm_hook(model, compression)
    return register_reduce_scatter(model, compression)
