"""``LocalSGD``: ``DiLoCo`` whose common weights are the mean of the sites' weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from ..sync.compression import AnyCompression
from .diloco import DiLoCo, OnMerge


class LocalSGD(DiLoCo):
    """Lets sites train by themselves, and every ``sync_every`` steps of the optimizer takes the mean of their weights.

    It is ``DiLoCo`` with an outer SGD of lr 1: S. U. Stich, Local SGD Converges Fast, arXiv 1805.09767, 2018.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int = 100,
        compression: AnyCompression = "none",
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: float = 600.0,
        on_merge: OnMerge | None = None,
    ) -> None:
        super().__init__(
            model, optimizer, sync_every=sync_every, outer_optimizer=partial(SGD, lr=1.0), compression=compression,
            process_group=process_group, timeout=timeout, on_merge=on_merge,
        )  # fmt: skip
