"""Figures about the whole job: each rank brings its own, every rank gets those of all."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace

import torch
import torch.distributed as dist

from fastsync.distributed import dist_mean
from fastsync.ppo.gradient_sync import SyncReport

WINDOW = 100
MAX_METRICS = 32
"""How many metrics a report has room for: every report has the same size, so that ranks that disagree cannot hang."""


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
    """Waiting for collectives: for the network, and for ranks that came later. NaN where it is not measured."""
    reporting: float = 0.0
    """Display, logs and checkpoints, since the update before."""

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All phases that were measured."""
        return sum((seconds for seconds in astuple(self) if not math.isnan(seconds)), start=0.0)


PHASES = tuple(phase.name for phase in fields(PhaseTimes))
"""The names of the phases, in their order."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a rank's GPU does. NaN where there is none, or where it does not tell."""

    memory: float = math.nan
    """Bytes that this rank's process has taken from the device."""
    utilisation: float = math.nan
    """Share of the time in which a kernel ran, from 0 to 1, of all processes on the device."""


def gpu_use(device: torch.device) -> GpuUse:
    """What the device does at the moment, without waiting for it. Utilisation comes from NVML (nvidia-ml-py)."""
    if device.type != "cuda":
        return GpuUse()
    try:
        utilisation = torch.cuda.utilization(device) / 100
    except Exception:  # NVML is missing, or does not tell on this device, such as a part of one: no reason to stop
        utilisation = math.nan
    return GpuUse(torch.cuda.memory_reserved(device), utilisation)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank tells the others after an update."""

    times: PhaseTimes
    """Of this update."""
    wire_bytes: float = 0.0
    """Bytes that it handed to collectives in this update; NaN where the way of syncing does not tell."""
    gpu: GpuUse = field(default_factory=GpuUse)
    episodes: Sequence[Episode] = ()
    """Those that ended in this update's rollout. Of each rank the last 100 are sent."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the update. Every rank must bring the same names in the same order."""
    stop_requested: bool = False
    """Whether this rank was told to stop."""
    checkpoint_due: bool = False
    """Whether this rank says that it is time for a checkpoint."""


# Where things stand in a report on its way: single figures, metrics, episodes.
_TIMES = slice(0, 5)
_WIRE_BYTES, _MEMORY, _UTILISATION, _STOP, _CHECKPOINT, _NAMES, _NUM_EPISODES = range(5, 12)
_METRICS = slice(12, 12 + MAX_METRICS)
_EPISODE_SIZE = 4
_EPISODES = slice(_METRICS.stop, _METRICS.stop + _EPISODE_SIZE * WINDOW)


def gather_reports(mine: RankReport, device: torch.device) -> list[RankReport]:
    """The reports of all ranks in rank order, the same on every rank, by one all-gather. Every rank must call it.

    Raises:
        ValueError: more than 32 metrics.
        RuntimeError: on every rank, if ranks brought metrics of different names.
    """
    packed = _pack(mine).to(device)
    of_rank = [packed]
    if dist.get_world_size() > 1:
        of_rank = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
        dist.all_gather(of_rank, packed)
    rows = torch.stack(of_rank).tolist()
    others = [rank for rank, row in enumerate(rows) if row[_NAMES] != rows[0][_NAMES]]
    if others:
        raise RuntimeError(f"ranks {others} report other metrics than rank 0; this rank reports {list(mine.metrics)}")
    return [_unpack(row, list(mine.metrics)) for row in rows]


def _pack(report: RankReport) -> torch.Tensor:
    if len(report.metrics) > MAX_METRICS:
        raise ValueError(f"{len(report.metrics)} metrics, but a report has room for {MAX_METRICS}")
    packed = torch.zeros(_EPISODES.stop, dtype=torch.float64)
    packed[_TIMES] = torch.tensor(astuple(report.times), dtype=torch.float64)
    packed[_WIRE_BYTES] = report.wire_bytes
    packed[_MEMORY], packed[_UTILISATION] = report.gpu.memory, report.gpu.utilisation
    packed[_STOP], packed[_CHECKPOINT] = report.stop_requested, report.checkpoint_due
    packed[_NAMES] = zlib.crc32("\n".join(report.metrics).encode())
    metrics = torch.tensor(list(report.metrics.values()), dtype=torch.float64)
    packed[_METRICS][: len(metrics)] = metrics
    episodes = [astuple(episode) for episode in report.episodes[-WINDOW:]]
    packed[_NUM_EPISODES] = len(episodes)
    if episodes:
        packed[_EPISODES][: _EPISODE_SIZE * len(episodes)] = torch.tensor(episodes, dtype=torch.float64).reshape(-1)
    return packed


def _unpack(row: list[float], names: list[str]) -> RankReport:
    episodes = torch.tensor(row[_EPISODES], dtype=torch.float64).reshape(-1, _EPISODE_SIZE)[: int(row[_NUM_EPISODES])]
    return RankReport(
        times=PhaseTimes(*row[_TIMES]),
        wire_bytes=row[_WIRE_BYTES],
        gpu=GpuUse(row[_MEMORY], row[_UTILISATION]),
        episodes=[_episode(values) for values in episodes.tolist()],
        metrics=dict(zip(names, row[_METRICS], strict=False)),
        stop_requested=bool(row[_STOP]),
        checkpoint_due=bool(row[_CHECKPOINT]),
    )


def _episode(values: Sequence[float]) -> Episode:
    row, episode_return, length, environment = values
    return Episode(int(row), episode_return, int(length), int(environment))


def mean_metrics(reports: Sequence[RankReport]) -> dict[str, float]:
    """The mean of each metric over ranks."""
    return {name: mean([report.metrics[name] for report in reports]) for name in reports[0].metrics}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. All figures but ``seconds`` are the same on every rank."""

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
    """NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def mean_sync_report(report: SyncReport, device: torch.device) -> SyncReport:
    """The mean of the ranks' reports. All ranks must sync in the same way, so that they bring the same figures."""
    measured = {name: float(value) for name, value in vars(report).items() if value is not None}
    means = dist_mean(torch.tensor(list(measured.values()), dtype=torch.float64, device=device))
    return replace(report, **dict(zip(measured, means.tolist(), strict=True)))


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
        window._last.extend(_episode(episode) for episode in episodes)
        return window
