"""Metrics of the whole job: each rank reports its own, and every rank gets all reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from operator import attrgetter
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ...errors import SyncError
from ...sync.stats import SyncStats
from ..envs.interface import Episode, Step
from ..envs.tensors import on_host
from ..exchange import Exchange
from .usage import NO_USAGE, Usage

WINDOW = 100
"""Number of last episodes that statistics of returns and lengths are of."""
PERCENTILES = (10, 50, 90)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that a rank spent in each phase of an update, or of a run. Phases do not overlap."""

    environment: float = 0.0  # Stepping the environments.
    policy: float = 0.0  # Choosing actions, and the rest of the rollout.
    learning: float = 0.0  # Losses, backward and optimizer, without waiting for communication.
    communication: float = 0.0
    """Waiting for collectives: for the network, and for slower ranks. Collectives of gradients count only as far as
    backward does not hide them. It is 0 on one rank."""
    reporting: float = 0.0  # Console, logs and checkpoints, since the previous update.
    evaluation: float = 0.0  # Episodes for --eval-interval, since the previous update.


PHASES = tuple(phase.name for phase in fields(PhaseTimes))
"""Names of the phases, in order."""
USAGES = tuple(usage.name for usage in fields(Usage))
_numbers_of_times, _numbers_of_usage = attrgetter(*PHASES), attrgetter(*USAGES)  # faster than dataclasses.astuple


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to the others after an update."""

    times: PhaseTimes
    gradients_seconds: float = 0.0  # Seconds of times.communication that waited for gradients, or for weights.
    wire_bytes: float = 0.0  # Bytes that the rank sent in collectives.
    episodes: Sequence[Episode] = ()  # Episodes that ended in the rollout. The last 100 of each rank are sent.
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the update. All ranks must report the same names in the same order."""
    stop_requested: bool = False  # Whether this rank was asked to stop.
    checkpoint_due: bool = False  # Whether it is time for a checkpoint.
    usage: Usage = NO_USAGE  # What this rank uses of its machine.

    def numbers(self) -> list[float]:
        """Returns the report as numbers, for ``from_numbers``. The first one is a hash of the metrics' names."""
        own = [self.gradients_seconds, self.wire_bytes, self.stop_requested, self.checkpoint_due]
        fixed = [_hash_of(self.metrics), *_numbers_of_times(self.times), *own, *_numbers_of_usage(self.usage)]
        return [*fixed, *self.metrics.values(), *chain(*self.episodes)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], names: Collection[str]) -> RankReport:
        """Returns the report whose ``numbers()`` these are. ``names`` are the names of its metrics."""
        rest = iter(numbers[1:])
        times = PhaseTimes(*islice(rest, len(PHASES)))
        gradients_seconds, wire_bytes, stop_requested, checkpoint_due = islice(rest, 4)
        usage = Usage(*islice(rest, len(USAGES)))
        metrics = dict(zip(names, islice(rest, len(names)), strict=True))
        columns = list(rest)
        environments, lengths, rows = (map(int, columns[index :: len(Episode._fields)]) for index in (0, 2, 3))
        episodes = list(map(Episode, environments, columns[1 :: len(Episode._fields)], lengths, rows))
        return cls(
            times, gradients_seconds, wire_bytes, episodes, metrics, bool(stop_requested), bool(checkpoint_due), usage
        )  # fmt: skip


def _hash_of(names: Iterable[str]) -> int:
    """Returns a hash of the names and their order."""
    return crc32("\n".join(names).encode())


def add_infos(values: Mapping[str, list[float]], step: Step) -> None:
    """Adds the numbers of these names in the environments' ``info`` to the lists. Restarts do not count.

    Raises:
        ValueError: a name stands for something else than a number of each environment.
    """
    for name, numbers_of_name in values.items():
        if name in step.infos:
            known = on_host(step.valid & step.infos.get(f"_{name}", step.valid))
            try:
                # An array of objects has None where an environment has no such number.
                numbers = np.asarray(on_host(step.infos[name]))[known].astype(np.float64)
            except (TypeError, ValueError):
                numbers = np.empty(())
            if numbers.ndim != 1:
                raise ValueError(
                    f"info[{name!r}] is {step.infos[name]!r}; log_info is for a number of each environment"
                )
            numbers_of_name += numbers.tolist()


@torch.no_grad()
def table_of_steps(steps: Sequence[Sequence[Tensor]], names: Sequence[str], device: torch.device) -> Tensor:
    """Returns the values of optimizer steps as a table on the device, float32, a row for each step.

    Args:
        steps: the values of each step, 0-dim.
        names: of the values.
        device: where values go that are numbers.

    Raises:
        ValueError: a value is not 0-dim.
    """
    logged = [torch.as_tensor(value, device=device) for values in steps for value in values]
    for name, value in zip(names, logged, strict=False):
        if value.dim():
            raise ValueError(f"the loss must return 0-dim metrics; {name} has shape {tuple(value.shape)}")
    none = torch.empty(0, len(names), device=device)
    return torch.stack(logged).float().view(len(steps), -1) if steps else none


def mean_of_steps(table: Tensor, names: Sequence[str], *, only_finite: bool) -> dict[str, float]:
    """Returns the means of a table's columns, NaN without steps; and the number of steps.

    ``only_finite`` leaves out steps whose last value, the norm of the gradient, is not finite.
    """
    if only_finite:
        table = table[table[:, -1].isfinite()]
    return dict(zip(names, table.mean(0).tolist(), strict=True)) | {"optimizer_steps": len(table)}


def gather_reports(mine: RankReport, exchange: Exchange) -> list[RankReport]:
    """Returns the reports of all ranks, in rank order. Every rank must call it.

    Raises:
        RuntimeError: on every rank, if ranks report metrics of different names.
    """
    gathered = exchange.all_gather(replace(mine, episodes=mine.episodes[-WINDOW:]).numbers())
    others = [rank for rank, numbers in enumerate(gathered) if numbers[0] != gathered[0][0]]
    if others:
        reason = f"ranks {others} report other metrics than rank 0"
        raise SyncError(f"{reason}; this rank reports {list(mine.metrics)}", ranks=others, reason=reason)
    return [RankReport.from_numbers(numbers, mine.metrics) for numbers in gathered]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Except for ``seconds`` and ``sync`` it is the same on every rank."""

    step: int  # Environment steps, over all ranks.
    seconds: float  # Wall time of the learning loop, including what came before a resumption.
    returns: list[float]  # Returns of the last 100 episodes, oldest first.
    sync: SyncStats  # Cost of gradient synchronisation on this rank, since the start, resumption or loss of a rank.
    stopped_by: str | None = None  # The signal that ended the run early, or None.

    @property
    def mean_return(self) -> float:
        """The mean of ``returns``; NaN if no episode has ended."""
        return mean(self.returns)


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN of no values. That of equal values is each of them."""
    if values and all(value == values[0] for value in values):
        return float(values[0])
    return sum(values) / len(values) if values else math.nan


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, standard deviation, extremes and percentiles of values; NaN of no values.

    The names are ``name`` for the mean, then ``name_std``, ``name_min``, ``name_p10``, ``name_p50``, ``name_p90`` and
    ``name_max``. A percentile is one of the values, the one nearest in rank.
    """
    names = ("_std", "_min", *(f"_p{percent}" for percent in PERCENTILES), "_max")
    figures = [math.nan] * len(names)
    if values:
        ordered, differences = sorted(values), np.array(values) - mean(values)
        ranks = [0, *(round(percent / 100 * (len(values) - 1)) for percent in PERCENTILES), -1]
        figures = [math.sqrt(differences @ differences / len(values)), *(ordered[rank] for rank in ranks)]
    return {name: mean(values)} | {f"{name}{each}": figure for each, figure in zip(names, figures, strict=True)}


def ended_episodes(reports: Sequence[RankReport]) -> list[Episode]:
    """Returns the episodes that ended in a rollout of all ranks, in the order of rows, then of environments.

    The order depends neither on the ranks that environments live on nor on the returns.
    """
    return in_order(episode for report in reports for episode in report.episodes)


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Returns episodes in the order of rows, then of environments."""
    return sorted(episodes, key=lambda episode: (episode.row, episode.environment))


def returns_of(episodes: Iterable[Episode]) -> list[float]:
    """Returns the episodes' returns, in the same order."""
    return [episode.episode_return for episode in episodes]


def scalars_of(
    update: int, seconds: float, speed: float, episodes: Collection[Episode], reports: Sequence[RankReport]
) -> dict[str, float]:
    """Returns all metrics of an update for console and logs, by name; NaN if not known.

    A metric that each rank reports is the mean of the ranks that know it. All ranks leave a collective at about the
    same moment. So the rank that spends the least time in it came last, and the others have waited for it.

    Args:
        update: updates so far.
        seconds: wall time of the learning loop so far, including what came before a resumption.
        speed: environment steps per second since the start or resumption, over all ranks.
        episodes: the last episodes of all ranks.
        reports: each rank's report of this update.
    """
    scalars = {
        "seconds": seconds,
        "update": update,
        **spread("episodes/return", returns_of(episodes)),
        **spread("episodes/length", [episode.length for episode in episodes]),
        "speed/steps_per_second": speed,
        "speed/wire_bytes": mean([report.wire_bytes for report in reports]),
    }
    for name in reports[0].metrics:
        values = [report.metrics[name] for report in reports]
        scalars[name] = mean([value for value in values if not math.isnan(value)])
    shortest_wait = min(report.times.communication for report in reports)
    for rank, report in enumerate(reports):
        scalars |= {f"rank{rank}/{phase}_seconds": getattr(report.times, phase) for phase in PHASES}
        scalars[f"rank{rank}/gradients_seconds"] = report.gradients_seconds
        scalars[f"rank{rank}/waiting_seconds"] = report.times.communication - shortest_wait
        usage = zip(USAGES, _numbers_of_usage(report.usage), strict=True)
        scalars |= {f"rank{rank}/{name}": value for name, value in usage if not math.isnan(value)}
    return scalars
