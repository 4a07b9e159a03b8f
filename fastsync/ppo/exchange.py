"""Numbers that ranks exchange besides gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._checks import resolve_group
from ..distributed import dist_sum

ROW = 512
"""How many numbers the first collective of ``all_gather`` takes from each rank."""


class Exchange:
    """Collectives over all ranks of the default group. Every rank must make the same calls in the same order.

    Args:
        device: the device of tensors in the group's collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._liveness = _C.Liveness(resolve_group(None), "fastsync train")

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of all ranks, in rank order. Ranks may have different numbers of them.

        It takes one collective for up to 511 numbers, and two for more.

        Raises:
            RuntimeError: a rank is lost, or does not answer within the group's time-out.
        """
        rows = self._gather_rows([len(numbers), *numbers[: ROW - 1]], ROW)
        counts, gathered = [int(row[0]) for row in rows], [row[1:] for row in rows]
        if (most := max(counts)) > ROW - 1:
            rest = self._gather_rows(numbers[ROW - 1 :], most - (ROW - 1))
            gathered = [first + others for first, others in zip(gathered, rest, strict=True)]
        return [row[:count] for row, count in zip(gathered, counts, strict=True)]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of a small tensor over all ranks, of one shape and dtype. CPU ranks add in rank order."""
        if self._world_size == 1 or self._device.type != "cpu":
            return dist_sum(values)
        return reduce(torch.add, self._gather(values.detach().contiguous()))

    def _gather_rows(self, numbers: Sequence[float], size: int) -> list[list[float]]:
        """Returns the numbers of each rank, padded with zeros to the size."""
        row = np.zeros(size)
        row[: len(numbers)] = numbers
        return [each.tolist() for each in self._gather(torch.from_numpy(row).to(self._device))]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape and dtype."""
        if self._world_size == 1:
            return [mine]
        gathered = [torch.empty_like(mine) for _ in range(self._world_size)]
        try:
            dist.all_gather(gathered, mine)
        except RuntimeError as error:
            raise RuntimeError(
                f"fastsync train: rank {self._rank} of {self._world_size} waited for the others in vain, "
                f"{self._who_is_missing()} ({error})"
            ) from error
        return gathered

    def _who_is_missing(self) -> str:
        silent: list[int] = []
        with suppress(RuntimeError):  # the store does not answer
            silent = self._liveness.silent_ranks()
        return f"and ranks {silent} do not answer" if silent else "and no rank is known to be lost"
