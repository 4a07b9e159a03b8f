"""Small values that ranks exchange besides gradients."""

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
    """Collectives over all ranks of the default group. Each call is a collective: every rank must make it in turn.

    Args:
        device: the ranks' device. CPU ranks of one host use shared memory, others the process group.
    """

    def __init__(self, device: torch.device) -> None:
        self._world_size = dist.get_world_size()
        is_alone = self._world_size == 1
        group = dist.group.WORLD
        assert group is not None
        self._gather = None if is_alone or device.type != "cpu" else _C.shared_gather(group)

    def all_gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in rank order. They are pickled on the way.

        Raises:
            RuntimeError: a rank is lost, or does not answer within the group's time-out.
        """
        if self._world_size == 1:
            return [value]
        if self._gather is not None:
            return [pickle.loads(text) for text in self._gather.all_gather(pickle.dumps(value))]
        of_rank: list[Value] = [value] * self._world_size
        dist.all_gather_object(of_rank, value)
        return of_rank

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of a small tensor over all ranks. Ranks that share memory add in rank order."""
        if self._gather is None:
            return dist_sum(values)
        total, *others = (torch.from_numpy(each) for each in self.all_gather(values.detach().numpy()))
        for other in others:
            total = total + other
        return total
