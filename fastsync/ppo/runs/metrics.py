"""Figures about the whole job: each rank brings its own, every rank gets those of all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...stats import SyncStats
from ..envs.interface import Episode, Step
from ..sync import Exchange

WINDOW = 100


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that a rank spent in each part of an update, or of a run. They do not overlap."""

    environment: float = 0.0  # Stepping the environments.
    policy: float = 0.0  # Choosing actions, and the rest of the rollout.
    learning: float = 0.0  # Losses, backward and optimizer, without what they waited for communication.
    communication: float = 0.0
    """Waiting for collectives, those of gradients as far as backward does not hide them: for the network, and for ranks
    that came later."""
    reporting: float = 0.0  # Display, logs and checkpoints, since the update before.

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


PHASES = tuple(phase.name for phase in fields(PhaseTimes))
"""The names of the phases, in their order."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to the others after an update."""

    times: PhaseTimes  # Of this update.
    wire_bytes: float = 0.0  # Bytes that it handed to collectives in this update.
    episodes: Sequence[Episode] = ()  # Those that ended in this update's rollout. Of each rank the last 100 are sent.
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the update. Every rank must bring the same names in the same order."""
    stop_requested: bool = False  # Whether this rank was told to stop.
    checkpoint_due: bool = False  # Whether this rank says that it is time for a checkpoint.


class InfoMeans:
    """Means over the steps of a rollout of numbers that environments put into ``info``; NaN where there were none."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0)

    def add(self, step: Step) -> None:
        """Takes in a step of all environments."""
        for name in self._sums:
            if name in step.infos:
                known = step.valid & step.infos.get(f"_{name}", step.valid)
                self._sums[name] += float(np.asarray(step.infos[name])[known].sum())
                self._counts[name] += int(known.sum())

    def means(self) -> dict[str, float]:
        """By name."""
        return {
            name: total / self._counts[name] if self._counts[name] else math.nan for name, total in self._sums.items()
        }


def gather_reports(mine: RankReport, exchange: Exchange) -> list[RankReport]:
    """Gives every rank the reports of all, in rank order. Every rank must call it.

    Raises:
        RuntimeError: on every rank, if ranks brought metrics of different names.
    """
    reports = exchange.all_gather(replace(mine, episodes=list(mine.episodes[-WINDOW:])))
    others = [rank for rank, report in enumerate(reports) if list(report.metrics) != list(reports[0].metrics)]
    if others:
        raise RuntimeError(f"ranks {others} report other metrics than rank 0; this rank reports {list(mine.metrics)}")
    return reports


@dataclass(frozen=True)
class TrainResult:
    """The end of a run. All figures but ``seconds`` and ``sync`` are the same on every rank."""

    step: int  # Environment steps done, over all ranks.
    seconds: float  # Wall time of the learning loop, with what came before where the run was resumed.
    returns: list[float]  # Of the last 100 episodes, oldest first.
    sync: SyncStats  # Cost of gradient synchronisation on this rank since the start or resumption.
    stopped_by: str | None = None  # What ended it early, or None.

    @property
    def mean_return(self) -> float:
        """NaN if no episode has ended."""
        return mean(self.returns)


def mean(values: Sequence[float]) -> float:
    """Takes the mean; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


class EpisodeWindow:
    """The last 100 episodes that ended, over all ranks."""

    def __init__(self, episodes: Iterable[Sequence[Any]] = ()) -> None:
        """Begins as the window that ``to_list`` described."""
        self._last = deque((Episode(*episode) for episode in episodes), maxlen=WINDOW)

    def extend(self, reports: Sequence[RankReport]) -> None:
        """Adds the episodes that ended on each rank during one rollout.

        They count as ended in the order of their rows, and within a row in that of their environments: it matters
        neither which rank an environment lives on, nor what the return was.
        """
        ended = (episode for report in reports for episode in report.episodes)
        self._last.extend(sorted(ended, key=lambda episode: (episode.row, episode.environment)))

    @property
    def returns(self) -> list[float]:
        """Their returns, oldest first."""
        return [episode.episode_return for episode in self._last]

    @property
    def lengths(self) -> list[int]:
        """Their numbers of steps, oldest first."""
        return [episode.length for episode in self._last]

    def to_list(self) -> list[list[Any]]:
        """Plain data for a checkpoint."""
        return [list(episode) for episode in self._last]


@dataclass(frozen=True)
class Status:
    """The status of a run after an update, as it is shown and logged."""

    step: int  # Environment steps done, over all ranks.
    seconds: float  # Wall time of the learning loop so far, with what came before where the run was resumed.
    update: int  # Updates done.
    window: EpisodeWindow  # The last episodes of all ranks.
    reports: Sequence[RankReport]  # What each rank has told about this update.
    speed: float  # Environment steps per second since the start or resumption, over all ranks.

    @cached_property
    def scalars(self) -> dict[str, float]:
        """All figures of the update, by the names that they have in the logs. NaN: not known.

        Those that each rank brings are the means of those ranks that know them. All ranks leave a collective at about
        the same moment, so the rank that spends least time in it came last; what others spent more, they have waited.
        """
        scalars = {
            "seconds": self.seconds,
            "update": self.update,
            "episodes/return": mean(self.window.returns),
            "episodes/length": mean(self.window.lengths),
            "speed/steps_per_second": self.speed,
            "speed/wire_bytes": mean([report.wire_bytes for report in self.reports]),
        }
        for name in self.reports[0].metrics:
            of_ranks = [report.metrics[name] for report in self.reports]
            scalars[name] = mean([value for value in of_ranks if not math.isnan(value)])
        for rank, (report, waited) in enumerate(zip(self.reports, waiting(self.reports), strict=True)):
            scalars |= {f"rank{rank}/{phase}_seconds": getattr(report.times, phase) for phase in PHASES}
            scalars[f"rank{rank}/waiting_seconds"] = waited
        return scalars


def waiting(reports: Sequence[RankReport]) -> list[float]:
    """The seconds that each rank has waited for the one that came last to the collectives of an update."""
    communication = [report.times.communication for report in reports]
    return [seconds - min(communication) for seconds in communication]
