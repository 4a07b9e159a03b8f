"""Where a run stands after an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fastsync.ppo.metrics import EpisodeWindow, RankReport, mean, mean_metrics


@dataclass(frozen=True)
class Status:
    """What is shown and logged."""

    step: int
    """Environment steps done, over all ranks."""
    seconds: float
    """Wall time of the learning loop so far, with what came before where the run was resumed."""
    update: int
    """Updates done."""
    window: EpisodeWindow
    """The last episodes of all ranks."""
    reports: Sequence[RankReport]
    """What each rank has told about this update."""

    @cached_property
    def learning(self) -> dict[str, float]:
        """The figures of the update: the means of the ranks'."""
        return mean_metrics(self.reports)

    @cached_property
    def returns(self) -> tuple[float, float, float] | None:
        """Mean, 10th and 90th percentile of the last returns; None if no episode has ended."""
        returns = self.window.returns
        if not returns:
            return None
        low, high = np.percentile(returns, [10, 90])
        return mean(returns), float(low), float(high)
