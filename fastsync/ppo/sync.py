"""What ranks do together: they average gradients, and exchange small things beside."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import fastsync
from fastsync import _C
from fastsync.compression import parse_compression
from fastsync.distributed import dist_sum

Value = TypeVar("Value")


class SyncReport(NamedTuple):
    """The cost of synchronisation on this rank since the start."""

    seconds: float
    """Packing, collective and unpacking, whether or not the step waited for it."""
    exposed_seconds: float
    """The part of it that the step waited for, because the backward pass did not hide it: time in communication."""
    wire_bytes: float
    """Bytes handed to collectives."""


class GradientSync:
    """Averages gradients by ``fastsync.attach``. Between the forward pass and the optimizer: ``backward``, ``clip``."""

    def __init__(self, policy: nn.Module, compression: str) -> None:
        self.model = policy
        """To be called in the forward pass of the loss."""
        self._sync = fastsync.attach(policy, parse_compression(compression))

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, forward and backward passes only add to this rank's gradients."""
        return self._sync.no_sync()

    def backward(self, loss: Tensor, rider: Tensor | None = None) -> Tensor | None:
        """Backward, then the gradients are means over ranks.

        Args:
            loss: 0-dim.
            rider: a float32 tensor that travels with them; None, on all ranks alike, for nothing.

        Returns:
            The mean of ``rider`` over ranks, the same on each.
        """
        if rider is not None:
            self._sync.piggyback("rider", rider)
        loss.backward()
        return None if rider is None else self._sync.piggybacked()["rider"]

    def clip(self, max_norm: float, optimizer: Optimizer, scaler: GradScaler) -> Tensor:
        """Scales the gradients down to ``max_norm``, or leaves it to the optimizer's next step.

        Returns:
            Their norm before, without the scaler's scale, 0-dim; nothing waits for it.
        """
        return fastsync.clip_grad_norm_(self._sync, max_norm, optimizer=optimizer, scaler=scaler)

    def report(self) -> SyncReport:
        """Tells what it cost so far."""
        stats = self._sync.stats()
        return SyncReport(
            stats.pack_time + stats.collective_time + stats.unpack_time, stats.exposed_time, stats.wire_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what it keeps from step to step, for a checkpoint: the same on every rank."""
        return self._sync.state_dict() | {"residuals": {}}

    def residuals(self) -> dict[str, Any]:
        """Returns what error feedback on this rank has not sent yet, by parameter, for a checkpoint."""
        residuals: dict[str, Any] = self._sync.state_dict()["residuals"]
        return residuals

    def load_state_dict(self, state: dict[str, Any], residuals: dict[str, Any]) -> None:
        """Goes on from ``state_dict()`` and ``residuals()``, or without the latter from an empty dict."""
        self._sync.load_state_dict(state | {"residuals": residuals})


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
