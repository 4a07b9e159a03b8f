"""Statistics of means over micro-batches, in an order that depends on the parameters alone, and not on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .. import _C
from .._torch_compat import version_of

NUM_STATS = 4


class StatsInOrder:
    """Those of the newest means. Nobody takes them before somebody has asked, because it is another pass."""

    def __init__(self) -> None:
        self._newest: Tensor | None = None
        self._are_wanted = False
        self._versions: list[tuple[int, int]] | None = None  # of the newest means; None if they do not change

    @property
    def are_known(self) -> bool:
        """Whether they have been taken of the newest means."""
        return self._newest is not None

    def begin(self, means: Sequence[Tensor] | None) -> None:
        """Takes new means, in the order of the parameters; None if all ranks have to read them, and nobody writes."""
        self._newest = self._versions = None
        if means is not None and self._are_wanted:
            self._newest = stats_in_order(means)
        elif means is not None:
            self._versions = _versions_of(means)

    def read(self, means: Callable[[], Sequence[Tensor]]) -> Tensor:
        """Returns the statistics of the newest means, which ``means`` returns, float64.

        Raises:
            RuntimeError: it is the first call, and the means have changed since ``begin``.
        """
        if self._newest is None:
            self._are_wanted = True
            now = means()
            if self._versions is not None and self._versions != _versions_of(now):
                raise RuntimeError(
                    "fastsync: nobody had asked for grad_stats() before the newest loop over micro_batches(), and its "
                    "gradients have changed since: call grad_stats() before they are clipped, unscaled or set to zero"
                )
            self._newest = stats_in_order(now)
        return self._newest


def _versions_of(means: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(mean), version_of(mean)) for mean in means]


def stats_in_order(means: Iterable[Tensor]) -> Tensor:
    """Returns the statistics of the parameters' means, float64, in an order that depends on the parameters alone."""
    listed = list(means)
    return _C.stats_in_order(listed) if listed else torch.zeros(NUM_STATS, dtype=torch.float64)
