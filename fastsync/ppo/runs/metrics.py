"""Figures about the whole job: each rank brings its own, every rank gets those of all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from statistics import quantiles

import numpy as np
import torch

from fastsync.distributed import dist_mean
from fastsync.ppo.envs.interface import Step
from fastsync.ppo.sync import Exchange, SyncReport

WINDOW = 100


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    row: int
    """The row of the rollout in which it ended."""
    episode_return: float
    """Sum of its rewards."""
    length: int
    """Number of its steps."""
    environment: int = 0
    """Number of the environment it was in, among those of all ranks."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that a rank spent in each part of an update, or of a run. They do not overlap."""

    environment: float = 0.0
    """Stepping the environments."""
    policy: float = 0.0
    """Choosing actions, and the rest of the rollout."""
    learning: float = 0.0
    """Losses, backward and optimizer, without what they waited for communication."""
    communication: float = 0.0
    """Waiting for collectives, those of gradients as far as backward does not hide them: for the network, and for ranks
    that came later."""
    reporting: float = 0.0
    """Display, logs and checkpoints, since the update before."""

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All phases."""
        return sum(astuple(self), start=0.0)


PHASES = tuple(phase.name for phase in fields(PhaseTimes))
"""The names of the phases, in their order."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The load of a rank's GPU. NaN where there is none, or where it does not tell."""

    memory: float = math.nan
    """Bytes that this rank's process has taken from the device."""
    utilisation: float = math.nan
    """Share of the time in which a kernel ran, from 0 to 1, of all processes on the device."""


def gpu_use(device: torch.device) -> GpuUse:
    """Asks what the device does at the moment, without waiting for it. Utilisation comes from NVML (nvidia-ml-py)."""
    if device.type != "cuda":
        return GpuUse()
    try:
        utilisation = torch.cuda.utilization(device) / 100
    except Exception:  # NVML is missing, or does not tell on this device, such as a part of one: no reason to stop
        utilisation = math.nan
    return GpuUse(torch.cuda.memory_reserved(device), utilisation)


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to the others after an update."""

    times: PhaseTimes
    """Of this update."""
    wire_bytes: float = 0.0
    """Bytes that it handed to collectives in this update."""
    gpu: GpuUse = field(default_factory=GpuUse)
    episodes: Sequence[Episode] = ()
    """Those that ended in this update's rollout. Of each rank the last 100 are sent."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the update. Every rank must bring the same names in the same order."""
    stop_requested: bool = False
    """Whether this rank was told to stop."""
    checkpoint_due: bool = False
    """Whether this rank says that it is time for a checkpoint."""


class InfoMeans:
    """Means over the steps of a rollout of numbers that environments put into ``info``; NaN where there were none."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0)

    def add(self, step: Step) -> None:
        """Takes in a step of all environments."""
        # Where an episode restarts in the step that ended the last one, ``infos`` are those of the restart.
        finals = step.infos.get("final_info", {})
        ended = step.terminated | step.truncated if finals else np.zeros_like(step.valid)
        for name in self._sums:
            for infos, rows in ((step.infos, step.valid & ~ended), (finals, ended)):
                if name in infos:
                    known = rows & infos.get(f"_{name}", rows)
                    self._sums[name] += float(np.asarray(infos[name])[known].sum())
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
    """The end of a run. All figures but ``seconds`` are the same on every rank."""

    step: int
    """Environment steps done, over all ranks."""
    seconds: float
    """Wall time of the learning loop, with what came before where the run was resumed."""
    returns: list[float]
    """Returns of the last 100 episodes of all ranks, oldest first."""
    sync: SyncReport
    """What synchronisation cost since the start or the resumption: the mean over ranks."""
    stopped_by: str | None = None
    """The signal that ended the run before its time, such as "SIGTERM"; None for a run that went to its end."""

    @property
    def mean_return(self) -> float:
        """NaN if no episode has ended."""
        return mean(self.returns)


def mean(values: Sequence[float]) -> float:
    """Takes the mean; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def mean_sync_report(report: SyncReport, device: torch.device) -> SyncReport:
    """Takes the mean of the ranks' reports."""
    return SyncReport(*dist_mean(torch.tensor(report, dtype=torch.float64, device=device)).tolist())


class EpisodeWindow:
    """The last 100 episodes that ended, over all ranks."""

    def __init__(self) -> None:
        self._last: deque[Episode] = deque(maxlen=WINDOW)

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

    def to_list(self) -> list[list[float]]:
        """Plain data for a checkpoint."""
        return [list(astuple(episode)) for episode in self._last]

    @classmethod
    def from_list(cls, episodes: Iterable[Sequence[float]]) -> EpisodeWindow:
        """The window that ``to_list`` described."""
        window = cls()
        window._last.extend(Episode(int(row), value, int(n), int(env)) for row, value, n, env in episodes)
        return window


@dataclass(frozen=True)
class Status:
    """The status of a run after an update, as it is shown and logged."""

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
    def metrics(self) -> dict[str, float]:
        """The figures of the update: the means of those ranks that know them."""
        of_ranks = {name: [report.metrics[name] for report in self.reports] for name in self.reports[0].metrics}
        return {name: mean([value for value in values if not math.isnan(value)]) for name, values in of_ranks.items()}

    @cached_property
    def returns(self) -> tuple[float, float, float] | None:
        """Mean, 10th and 90th percentile of the last returns; None if no episode has ended."""
        returns = self.window.returns
        if not returns:
            return None
        # Of a single one all are the same.
        low, *_, high = quantiles(returns if len(returns) > 1 else 2 * returns, n=10, method="inclusive")
        return mean(returns), low, high
