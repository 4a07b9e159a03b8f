"""Numbers that ranks exchange besides gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Heartbeats, dist_sum, resolve_group
from ..errors import SyncError
from ..sync.micro_batches import block_of
from ..sync.sync_weights import broadcast_named
from .stopwatch import Stopwatch

ROW = 512
"""How many numbers the first collective of ``all_gather`` takes from each rank."""


class MissingRankError(SyncError):
    """A collective has failed, because a rank is lost or late. ``ranks`` are those that do not answer, if asked."""


class Exchange:
    """Collectives over all ranks of a group. Every rank must make the same calls in the same order.

    Args:
        device: the device of tensors in the group's collectives.
        micro_batches: into how many parts the environments of all ranks are dealt; None for one part a rank.
        names_missing: an error says which ranks do not answer. That takes seconds.

    Attributes:
        waiting: measures the time in ``sum``.
    """

    def __init__(self, device: torch.device, micro_batches: int | None = None, *, names_missing: bool = True) -> None:
        self._device, self._micro_batches, self._names_missing = device, micro_batches, names_missing
        self.waiting = Stopwatch(device)
        self.use_group(resolve_group(None))

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Goes over to another group."""
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self._heartbeats = Heartbeats(group, "fastsync train") if self._names_missing else None

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of all ranks, in rank order. Ranks may have different numbers of them.

        It takes one collective for up to 511 numbers, and two for more.

        Raises:
            MissingRankError: a rank is lost, or does not answer within the group's time-out.
        """
        rows = self._gather_rows([len(numbers), *numbers[: ROW - 1]], ROW)
        counts, gathered = [int(row[0]) for row in rows], [row[1:] for row in rows]
        if (most := max(counts)) > ROW - 1:
            rest = self._gather_rows(numbers[ROW - 1 :], most - (ROW - 1))
            gathered = [first + others for first, others in zip(gathered, rest, strict=True)]
        return [row[:count] for row, count in zip(gathered, counts, strict=True)]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of a small tensor over all ranks, of one shape and dtype. CPU ranks add in rank order."""
        with self.waiting:
            if self.world_size == 1 or self._device.type != "cpu":
                return dist_sum(values, process_group=self.group)
            return reduce(torch.add, self._gather(values.detach().contiguous()))

    def sum_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum over the parts of all ranks, of one shape and dtype.

        With micro-batches all bits are the same on any number of ranks.
        """
        if self._micro_batches is None:
            return self.sum(parts[0])
        return self._by_index(parts).sum(0)

    def mean_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the mean over the parts of all ranks, if there are micro-batches; else this rank's own one."""
        if self._micro_batches is None:
            return parts[0]
        return self._by_index(parts).mean(0)

    def _by_index(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the tensors of all micro-batches, one row for each, in their order."""
        assert self._micro_batches is not None
        rows = torch.zeros(self._micro_batches, *parts[0].shape, dtype=parts[0].dtype, device=parts[0].device)
        block = block_of(self.rank, self.world_size, self._micro_batches)
        rows[block.start : block.stop] = torch.stack([*parts])
        return (
            self.sum(rows) + 0.0
        )  # a row comes from one rank, so nothing is rounded; and -0 becomes 0 on one rank, too

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Gives tensors of all ranks the values of the first rank."""
        broadcast_named(named, self.group)

    def gather_objects(self, mine: object) -> list[Any] | None:
        """Returns the objects of all ranks, in rank order, on the first rank; None on the others."""
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(mine, gathered, group=self.group, group_dst=0)
        return gathered

    def _gather_rows(self, numbers: Sequence[float], size: int) -> list[list[float]]:
        """Returns the numbers of each rank, padded with zeros to the size."""
        row = np.zeros(size)
        row[: len(numbers)] = numbers
        return [each.tolist() for each in self._gather(torch.from_numpy(row).to(self._device))]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape and dtype."""
        if self.world_size == 1:
            return [mine]
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            self.group.allgather(gathered, mine).wait()
        except RuntimeError as error:
            silent: list[int] = []
            reason = f"rank {self.rank} of {self.world_size} waited for the others in vain"
            if self._heartbeats is not None:
                with suppress(RuntimeError):  # the store does not answer
                    silent = self._heartbeats.silent_ranks()
                reason += f", and ranks {silent} do not answer" if silent else ", and no rank is known to be lost"
            raise MissingRankError(f"fastsync train: {reason} ({error})", ranks=silent, reason=reason) from error
        return gathered
