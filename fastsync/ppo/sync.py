"""What ranks do together: they average gradients, and exchange small things beside."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fastsync
from fastsync import _C
from fastsync.distributed import dist_mean, dist_sum
from fastsync.ppo.settings import RunSettings
from fastsync.stopwatch import Stopwatch

Value = TypeVar("Value")


@dataclass(frozen=True)
class SyncReport:
    """The cost of synchronisation on this rank since the start. None stands for what is not known."""

    seconds: float | None
    """Packing, collective and unpacking, whether or not the step waited for it."""
    exposed_seconds: float | None
    """The part of it that the step waited for, because the backward pass did not hide it: time in communication."""
    wire_bytes: float | None
    """Bytes handed to collectives."""


class GradientSync(ABC):
    """One way to average gradients. Between the forward pass and the optimizer: ``backward``, then ``clip``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """To be called in the forward pass of the loss."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, forward and backward passes only add to this rank's gradients."""

    @abstractmethod
    def backward(self, loss: Tensor, rider: Tensor | None = None) -> Tensor | None:
        """Backward, then the gradients are means over ranks.

        Args:
            loss: 0-dim.
            rider: a float32 tensor of this rank; None, on all ranks alike, for nothing.

        Returns:
            The mean of ``rider`` over ranks, the same on each.
        """

    def clip(self, max_norm: float, optimizer: Optimizer, scaler: GradScaler) -> Tensor:
        """Scales the averaged gradients down to ``max_norm``, or leaves it to the optimizer's next step.

        Returns:
            Their norm before, without the scaler's scale, 0-dim; nothing waits for it.
        """
        scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def report(self) -> SyncReport:
        """Tells what it cost so far."""
        return SyncReport(seconds=None, exposed_seconds=None, wire_bytes=None)

    def state_dict(self) -> dict[str, Any]:
        """Returns what it keeps from step to step, for a checkpoint: the same on every rank."""
        return {}

    def residuals(self) -> dict[str, Any]:
        """Returns what error feedback on this rank has not sent yet, by parameter, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any], residuals: dict[str, Any]) -> None:  # noqa: B027 nothing is kept
        """Goes on from ``state_dict()`` and ``residuals()``, or without the latter from an empty dict."""


def make_gradient_sync(settings: RunSettings, policy: nn.Module) -> GradientSync:
    """Makes the way of averaging that ``settings.sync`` names. Afterwards all ranks hold the weights of rank 0."""
    if settings.sync == "fastsync":
        return Attached(policy, settings.compression)
    if settings.sync == "ddp":
        return PlainDDP(policy)
    return ConcatenatedAllReduce(policy)


class Attached(GradientSync):
    """fastsync.attach. What else ranks have to agree on travels with the gradients."""

    def __init__(self, policy: nn.Module, compression: str) -> None:
        super().__init__(policy)
        self._sync = fastsync.attach(policy, compression)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._sync.no_sync()

    def backward(self, loss: Tensor, rider: Tensor | None = None) -> Tensor | None:
        if rider is not None:
            self._sync.ride("rider", rider)
        loss.backward()
        return None if rider is None else self._sync.riders["rider"]

    def clip(self, max_norm: float, optimizer: Optimizer, scaler: GradScaler) -> Tensor:
        return fastsync.clip_grad_norm_(self._sync, max_norm, optimizer=optimizer, scaler=scaler)

    def report(self) -> SyncReport:
        stats = self._sync.stats()
        seconds = stats.pack_time + stats.collective_time + stats.unpack_time
        return SyncReport(seconds, exposed_seconds=stats.exposed_time, wire_bytes=stats.wire_bytes)

    def state_dict(self) -> dict[str, Any]:
        return self._sync.state_dict() | {"residuals": {}}

    def residuals(self) -> dict[str, Any]:
        residuals: dict[str, Any] = self._sync.state_dict()["residuals"]
        return residuals

    def load_state_dict(self, state: dict[str, Any], residuals: dict[str, Any]) -> None:
        self._sync.load_state_dict(state | {"residuals": residuals})


class PlainDDP(GradientSync):
    """DDP as it comes. It does not tell what its synchronisation cost."""

    model: DistributedDataParallel

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(DistributedDataParallel(policy))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def backward(self, loss: Tensor, rider: Tensor | None = None) -> Tensor | None:
        loss.backward()
        return None if rider is None else dist_mean(rider)


class ConcatenatedAllReduce(GradientSync):
    """No DDP: after backward the gradients are concatenated, summed over ranks, divided and copied back."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self._parameters = list(policy.parameters())
        for parameter in self._parameters:
            dist.broadcast(parameter.data, src=0)
        self._stopwatch = Stopwatch(self._parameters[0].device)
        self._wire_bytes = 0

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, rider: Tensor | None = None) -> Tensor | None:
        loss.backward()
        with self._stopwatch:
            self._wire_bytes += all_reduce_concatenated(self._parameters)
        return None if rider is None else dist_mean(rider)

    def report(self) -> SyncReport:
        seconds = self._stopwatch.seconds()
        # Backward is over when it starts, so nothing hides it.
        return SyncReport(seconds, exposed_seconds=seconds, wire_bytes=self._wire_bytes)


def all_reduce_concatenated(parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Averages gradients as trainers without DDP write it. Returns the bytes that were all-reduced."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return flat.nbytes


class Exchange:
    """Collectives of all ranks of the default group. Every rank makes one at the same place between its collectives.

    Args:
        device: of the ranks. On a GPU the process group does all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._world_size = dist.get_world_size()
        is_alone = self._world_size == 1
        group = dist.group.WORLD
        assert group is not None
        self._gather = None if is_alone or device.type != "cpu" else _C.shared_gather(group)

    def all_gather(self, value: Value) -> list[Value]:
        """Gives every rank the values of all, in rank order, pickled on the way.

        Raises:
            RuntimeError: a rank is lost, or does not come within the group's time-out.
        """
        if self._world_size == 1:
            return [value]
        if self._gather is not None:
            return [pickle.loads(text) for text in self._gather.all_gather(pickle.dumps(value))]
        of_rank: list[Value] = [value] * self._world_size
        dist.all_gather_object(of_rank, value)
        return of_rank

    def sum(self, values: Tensor) -> Tensor:
        """Adds a small tensor over the ranks, into a new one, in rank order where they share memory."""
        if self._gather is None:
            return dist_sum(values)
        total, *others = (torch.from_numpy(each) for each in self.all_gather(values.detach().numpy()))
        for other in others:
            total = total + other
        return total
