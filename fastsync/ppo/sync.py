"""What ranks exchange: gradients or weights, and small values beside them."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _C, DiLoCo, GradientSynchronizer, LocalSGD, attach
from ..compression import parse_compression
from ..distributed import dist_sum
from .settings import RunSettings

Value = TypeVar("Value")


def attach_by(settings: RunSettings, policy: nn.Module) -> GradientSynchronizer:
    """Averages gradients over all ranks; where weights are averaged, over this rank alone."""
    if settings.sync == "gradients":
        return attach(policy, parse_compression(settings.compression))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return attach(policy, process_group=alone)


def outer_steps(settings: RunSettings, policy: nn.Module, optimizer: Optimizer) -> DiLoCo | None:
    """What averages weights, if they are: its ``step()`` is called after each rollout."""
    if settings.sync == "gradients":
        return None
    kind = DiLoCo if settings.sync == "diloco" else LocalSGD
    compression = parse_compression(settings.compression)
    return kind(policy, optimizer, sync_every=settings.sync_every, compression=compression)


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
