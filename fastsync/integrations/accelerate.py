"""One line for trainers that wrap models in DDP or by ``fully_shard`` themselves, as Accelerate does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch_compat import COMPILED, is_flat, is_fully_sharded
from ..distributed import group_of_this_rank
from ..sync.attach import attach
from ..sync.compression import AnyCompression
from ..sync.ddp import register_comm_hook
from ..sync.fsdp import register_fsdp
from ..sync.handle import Handle


def register_prepared(model: nn.Module, compression: AnyCompression = "none") -> Handle:
    """Averages the gradients of a model by the engine, however the model is wrapped.

    Call it on every rank, on what ``accelerator.prepare`` returned, before the first backward. It calls
    ``register_comm_hook`` for a model in DistributedDataParallel, and ``attach`` for a plain one on a single rank. For
    one under ``fully_shard`` it calls ``register_fsdp``, with the compression for gradients. For Hugging Face's
    Trainer use ``fastsync.integrations.transformers.FastsyncCallback``.

    Args:
        model: the wrapped model, compiled or not.
        compression: as these functions take it.

    Returns:
        The handle.

    Raises:
        ValueError: there are several ranks and the model is not wrapped, or as these functions do.
    """
    model = getattr(model, COMPILED, model)
    if isinstance(model, DistributedDataParallel):
        return register_comm_hook(model, compression)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    is_wrapped = any(map(is_fully_sharded, model.modules())) or any(map(is_flat, model.parameters()))
    if not is_alone and not is_wrapped:
        raise ValueError(
            f"model: this {type(model).__name__} is neither in DistributedDataParallel nor under fully_shard, on "
            f"{dist.get_world_size()} ranks; pass what accelerator.prepare() returned, or use fastsync.attach for a "
            "model that nobody wraps"
        )
    if not is_wrapped:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return attach(model, compression, process_group=group_of_this_rank(device))
    return register_fsdp(model, gradients=compression)
