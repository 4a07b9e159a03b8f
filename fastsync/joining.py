"""Ranks that run out of batches at different times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .synchronizer import GradientSynchronizer


@contextmanager
def joining(sync: GradientSynchronizer) -> Iterator[None]:
    """As ``GradientSynchronizer.join``."""
    engine = sync._engine
    engine.set_joining(True)
    try:
        before = engine.num_steps()
        yield
        num_steps = engine.num_steps() - before
        engine.run_out()
        while True:
            for parameter in sync.parameters():
                parameter.grad = None
            sync.synchronize()
            if engine.num_active() == 0:
                break
    finally:
        engine.set_joining(False)
    sync._broadcast(root=_rank_of_most(sync, num_steps))


def _rank_of_most(sync: GradientSynchronizer, number: int) -> int:
    """The first of the ranks whose number is the largest."""
    size = sync._group.size()
    device = next(iter(sync._named.values())).device
    newest = torch.tensor(number * size + size - 1 - sync._group.rank(), device=device)
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=sync._group)
    return size - 1 - int(newest) % size
