"""Figures about the whole job: each rank brings its own, every rank gets the same answer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fastsync.distributed import dist_mean
from fastsync.ppo.gradient_sync import SyncReport
from fastsync.ppo.rollout import Episode

WINDOW = 100


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. All figures but ``seconds`` are the same on every rank."""

    step: int
    """Environment steps done, over all ranks."""
    seconds: float
    """Wall time of the learning loop."""
    returns: list[float]
    """Returns of the last 100 episodes of all ranks, oldest first."""
    sync: SyncReport
    """What synchronisation cost: the mean over ranks."""

    @property
    def mean_return(self) -> float:
        """NaN if no episode has ended."""
        return mean(self.returns)


def mean(values: Sequence[float]) -> float:
    """NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def mean_over_ranks(metrics: dict[str, float], device: torch.device) -> dict[str, float]:
    """The mean of each metric over ranks, in one collective. Every rank must bring the same names in the same order."""
    means = dist_mean(torch.tensor(list(metrics.values()), dtype=torch.float64, device=device))
    return dict(zip(metrics, means.tolist(), strict=True))


def mean_sync_report(report: SyncReport, device: torch.device) -> SyncReport:
    """The mean of the ranks' reports. All ranks must sync in the same way, so that they bring the same figures."""
    measured = {name: float(value) for name, value in vars(report).items() if value is not None}
    return replace(report, **mean_over_ranks(measured, device))


class EpisodeWindow:
    """The last 100 episodes that ended, over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: deque[Episode] = deque(maxlen=WINDOW)

    def extend(self, episodes: Sequence[Episode]) -> None:
        """Adds the episodes that ended on each rank during one rollout. Every rank must call it.

        Episodes count as ended in the order of their rows, and within a row in the order of ranks.
        """
        # Of each rank at most the last 100 can be among the last 100 of all, so that much is sent, whatever there was.
        mine = torch.full((WINDOW, 3), math.nan, dtype=torch.float64)
        for slot, episode in enumerate(episodes[-WINDOW:]):
            mine[slot] = torch.tensor([episode.row, episode.episode_return, episode.length], dtype=torch.float64)
        of_rank = [torch.empty_like(mine, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(of_rank, mine.to(self._device))
        ended = [
            Episode(int(row), episode_return, int(length))
            for row, episode_return, length in torch.cat(of_rank).tolist()
            if not math.isnan(row)
        ]
        self._last.extend(sorted(ended, key=lambda episode: episode.row))

    @property
    def returns(self) -> list[float]:
        """Their returns, oldest first."""
        return [episode.episode_return for episode in self._last]

    @property
    def lengths(self) -> list[int]:
        """Their numbers of steps, oldest first."""
        return [episode.length for episode in self._last]
