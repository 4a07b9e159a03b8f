"""``join()``: ranks that have run out of batches go on taking part in the others' syncs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .. import _C
from .training_state import TrainingState

_thread = threading.local()
"""``joins`` is true inside a ``join()`` of this thread."""


def is_in_join() -> bool:
    """Whether this thread is inside a ``join()``."""
    return bool(getattr(_thread, "joins", False))


@contextmanager
def until_all_run_out(
    engine: _C.Synchronizer,
    group: dist.ProcessGroup,
    states: TrainingState,
    device: torch.device,
    *,
    sync_without_batches: Callable[[], None],
    share_model: Callable[[int], None],
) -> Iterator[None]:
    """Goes on with ``sync_without_batches`` behind the block, until the loops of all ranks have ended.

    Then all ranks take over the model, by ``share_model``, and the states of a rank that took the most steps.

    Raises:
        RuntimeError: it is inside another ``join``.
    """
    if is_in_join():
        raise RuntimeError(
            "fastsync: join() was called inside another join(), so that ranks that have run out of batches would "
            "wait for each other; attach one nn.ModuleList of all models in place of several engines"
        )
    engine.set_joining(True, states.description())
    _thread.joins = True
    try:
        yield
        sync_without_batches()
        is_last = engine.num_active() == 0
        while engine.num_active() != 0:  # nan if a rank has failed, which may still go on
            sync_without_batches()
    finally:
        _thread.joins = False  # first, because an error of the next line must not refuse later ones
        engine.set_joining(False)
    # All ranks take the parameters of the first rank whose loop ended last.
    size, rank = group.size(), group.rank()
    maxima = torch.tensor([size - rank if is_last else 0, not is_last], device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    first, took_fewer_steps = maxima.tolist()
    share_model(size - first)
    if took_fewer_steps:
        states.share(group, size - first, device)
