"""One line for trainers that wrap models themselves, in DDP or by ``fully_shard``, as Accelerate does."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .compression import AnyCompression
from .ddp import register_comm_hook
from .distributed import group_of_this_rank
from .handle import GradientHandle
from .sharded import register_reduce_scatter
from .synchronizer import attach


def register_prepared(model: nn.Module, compression: AnyCompression = "none") -> GradientHandle:
    """Has the gradients of a model that is wrapped already go through the engine, whichever way it is wrapped.

    Call it on every rank, on what ``accelerator.prepare`` returned, before the first backward. Of a model in
    DistributedDataParallel it is ``register_comm_hook``, of one that went through ``fully_shard``
    ``register_reduce_scatter``, and of one that a single rank left as it was ``attach``. For Hugging Face's Trainer
    there is ``fastsync.hf_trainer.FastsyncCallback``.

    Args:
        model: the wrapped model, also where it was compiled.
        compression: what travels, as these functions take it.

    Returns:
        The handle.

    Raises:
        ValueError: there are several ranks and the model is not wrapped, or as these functions do.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return register_comm_hook(model, compression)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if is_alone and not any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return attach(model, compression, process_group=group_of_this_rank())
    return register_reduce_scatter(model, compression)
