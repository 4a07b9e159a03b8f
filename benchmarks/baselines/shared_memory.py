"""Memory that the ranks of one machine share: for a barrier, and to add gradients in with nothing else around it."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.baselines.gradients import Gradients, Step

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STRIDE = 16
"""Numbers from one rank's flag to the next one's, so that each has cache lines of its own."""


def memory(num_bytes: int, group: ProcessGroup | None = None) -> mmap.mmap:
    """Zeros, the same for all ranks of the group, which share a machine. A collective call."""
    rank = dist.get_rank(group)
    made = os.memfd_create("benchmark") if rank == 0 else -1
    if rank == 0:
        os.ftruncate(made, num_bytes)
    where = [f"/proc/{os.getpid()}/fd/{made}"]
    dist.broadcast_object_list(where, group=group, group_src=0)
    descriptor = os.open(where[0], os.O_RDWR)
    mapped = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    dist.barrier(group)
    if rank == 0:
        os.close(made)
    return mapped


class Barrier:
    """A number for each rank, which it raises and the others wait for."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._all: NDArray[np.int64] = np.frombuffer(memory(8 * STRIDE * size, group), np.int64)[::STRIDE]
        self._count = 0

    def wait(self) -> None:
        """Returns when all ranks have come here as often as this one."""
        self._count += 1
        self._all[self._rank] = self._count
        while self._all.min() < self._count:
            os.sched_yield()


def barrier() -> Callable[[], object]:
    """Makes a barrier of the default group that lets ranks go within microseconds where they share a machine.

    The group's own lets one rank go hundreds of microseconds before the other. A collective call.
    """
    machines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, BOOT_ID.read_text(encoding="ascii") if BOOT_ID.exists() else None)
    if len(set(machines)) == 1 and machines[0] is not None:
        return Barrier().wait
    return dist.barrier


class BareSum(Step):
    """The limit of what ranks of one host can do: copy in, wait for all, and add, in rank order, with the copy out."""

    def __init__(self, workload: Gradients, group: ProcessGroup) -> None:
        self._source = workload.flat_grads / workload.world_size
        self._result = torch.empty_like(self._source)
        size = dist.get_world_size(group)
        mapped = memory(size * self._source.nbytes, group)
        rows = torch.frombuffer(mapped, dtype=self._source.dtype).view(size, -1)
        self._first, *self._others = rows.unbind()
        self._own = rows[dist.get_rank(group)]
        self._barrier = Barrier(group)

    def run(self) -> None:
        self._own.copy_(self._source)
        self._barrier.wait()
        total = self._first
        for other in self._others:
            total = torch.add(total, other, out=self._result)

    def result(self) -> Tensor:
        return self._result
