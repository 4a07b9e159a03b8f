"""What ranks exchange beside gradients."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..distributed import dist_sum

Value = TypeVar("Value")


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
