"""Who averages the gradients over ranks: fastsync's hook, plain DDP, or concatenate, all-reduce and copy back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.ppo.config import Settings
from fastsync.stopwatch import Stopwatch


@dataclass(frozen=True)
class SyncReport:
    """What synchronisation cost this rank since the start. None stands for what this way of syncing cannot tell."""

    seconds: float | None
    """Time in synchronisation: packing, collective and unpacking."""
    exposed_seconds: float | None
    """The part of it that the step waited for, because the backward pass did not hide it."""
    wire_bytes: float | None
    """Bytes handed to collectives."""


class GradientSync(Protocol):
    """One way to average gradients. Between backward and the optimizer: ``reduce``, then ``clip_grad_norm_``."""

    @property
    def model(self) -> nn.Module:
        """The module to call in the forward pass of the loss."""

    def reduce(self) -> None:
        """Averages the gradients over ranks, unless backward has done so already."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the averaged gradients down to ``max_norm`` and returns their norm before, without a host sync."""

    def report(self) -> SyncReport:
        """What it cost so far."""

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from step to step, for a checkpoint."""


def make_gradient_sync(settings: Settings, policy: nn.Module) -> GradientSync:
    """The way of averaging that ``settings.sync`` names. Afterwards all ranks hold the weights of rank 0."""
    if settings.sync == "fastsync":
        return FastsyncHook(policy, settings.compression)
    if settings.sync == "ddp":
        return PlainDDP(policy)
    return ConcatenatedAllReduce(policy)


class FastsyncHook:
    """DDP with fastsync's hook."""

    def __init__(self, policy: nn.Module, compression: str) -> None:
        self.model = DistributedDataParallel(policy)
        self._hook = fastsync.register_comm_hook(self.model, compression=compression)

    def reduce(self) -> None:
        pass

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return fastsync.clip_grad_norm_(self._hook, max_norm)

    def report(self) -> SyncReport:
        stats = self._hook.stats()
        return SyncReport(
            seconds=stats.pack_time + stats.collective_time + stats.unpack_time,
            exposed_seconds=stats.exposed_time,
            wire_bytes=stats.wire_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        return self._hook.state_dict()


class PlainDDP:
    """DDP as it comes. It does not tell what its synchronisation cost."""

    def __init__(self, policy: nn.Module) -> None:
        self.model = DistributedDataParallel(policy)

    def reduce(self) -> None:
        pass

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def report(self) -> SyncReport:
        return SyncReport(seconds=None, exposed_seconds=None, wire_bytes=None)

    def state_dict(self) -> dict[str, Any]:
        return {}


class ConcatenatedAllReduce:
    """No DDP: after backward the gradients are concatenated, summed over ranks, divided and copied back."""

    def __init__(self, policy: nn.Module) -> None:
        self.model = policy
        self._parameters = list(policy.parameters())
        for parameter in self._parameters:
            dist.broadcast(parameter.data, src=0)
        self._stopwatch = Stopwatch(self._parameters[0].device)
        self._wire_bytes = 0

    def reduce(self) -> None:
        with self._stopwatch:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        self._wire_bytes += flat.nbytes

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def report(self) -> SyncReport:
        seconds = self._stopwatch.seconds()
        # Backward is over when it starts, so nothing hides it.
        return SyncReport(seconds=seconds, exposed_seconds=seconds, wire_bytes=self._wire_bytes)

    def state_dict(self) -> dict[str, Any]:
        return {}
