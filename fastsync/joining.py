"""Ranks that run out of batches at different times, by our own context and by PyTorch's ``Join``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

if TYPE_CHECKING:
    from .synchronizer import GradientSynchronizer


class UnevenInputs(JoinHook):
    """Has a rank without batches take part in the syncs of the others, with gradients that count for nothing."""

    def __init__(self, sync: GradientSynchronizer) -> None:
        if sync._uneven is not None:
            sync._uneven.end()  # of a loop that was left by an error
        sync._uneven = self
        self._sync = sync
        self._has_run_out = False

    def notify_before_syncs(self) -> None:
        """Has PyTorch's ``Join`` told before each sync that this rank still has batches."""
        before_sync = weakref.WeakMethod(self._before_sync)  # else the engine would keep its own owner alive
        self._sync._engine.set_before_sync(lambda: (call := before_sync()) is not None and call())

    def _before_sync(self) -> bool:
        if not self._sync._join_config.enable:
            return False
        if not self._has_run_out:
            Join.notify_join_context(self._sync)
        return True

    def end(self) -> None:
        """From the next sync on no rank has run out."""
        self._sync._engine.set_before_sync(None)
        self._sync._engine.set_joining(False)
        self._sync._uneven = None

    def main_hook(self) -> None:
        """Takes part in one sync."""
        self._has_run_out = True
        self._sync._engine.run_out()
        for parameter in self._sync.parameters():
            parameter.grad = None
        self._sync.synchronize()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the parameters and buffers of the first of those that ran out last."""
        self.end()
        size, rank = self._sync._group.size(), self._sync._group.rank()
        first = torch.tensor(size - rank if is_last_joiner else 0, device=self._sync.join_device)
        dist.all_reduce(first, dist.ReduceOp.MAX, group=self._sync._group)
        self._sync._broadcast(root=size - int(first))


class _Thread(threading.local):
    sync: GradientSynchronizer | None = None
    """Whose ``join()`` it is inside of."""


_thread = _Thread()


def check_outside_join(sync: GradientSynchronizer, call: str) -> None:
    """Raises RuntimeError inside of ``sync.join()``, whose end is for the engine that began it."""
    if _thread.sync is sync:
        raise RuntimeError(f"fastsync: {call} was called inside join(); call it after, on every rank")


@contextmanager
def joining(sync: GradientSynchronizer) -> Iterator[None]:
    """As ``GradientSynchronizer.join``: what ``Join`` does, but that who has run out travels beside the gradients."""
    if _thread.sync is not None:
        raise RuntimeError(
            "fastsync: join() was called inside another join(), so that ranks that have run out of batches would wait "
            "for each other; let several engines join together: torch.distributed.algorithms.join.Join([first, second])"
        )
    uneven = UnevenInputs(sync)
    sync._engine.set_joining(True)
    _thread.sync = sync
    try:
        yield
        uneven.main_hook()
        is_last_joiner = sync._engine.num_active() == 0
        while sync._engine.num_active() != 0:  # nan where a rank has failed, which may go on
            uneven.main_hook()
    except BaseException:
        uneven.end()
        raise
    finally:
        _thread.sync = None
    uneven.post_hook(is_last_joiner)
