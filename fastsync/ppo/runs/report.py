"""The report of a run, by rank 0: the console, the logs, and the learning curve in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fastsync.ppo.runs.console import Dashboard, Lines, result_table
from fastsync.ppo.runs.loggers import CsvLog, Logger, TensorBoardLog, WandbLog
from fastsync.ppo.runs.metrics import PHASES, Status, TrainResult, mean
from fastsync.ppo.runs.straggler import WaitingTimes
from fastsync.ppo.settings import RunSettings


@dataclass(frozen=True)
class CurvePoint:
    """The last 100 episodes at some moment of a run."""

    step: int
    """Environment steps so far, over all ranks."""
    low: float
    """10th percentile of their returns."""
    mean: float
    high: float
    """90th percentile of their returns."""


class RunReport:
    """Tells about one run. Use it in a ``with`` block, on one rank only.

    Args:
        folder: the run's folder. It gets progress.csv, TensorBoard's event files and learning_curve.png.
        settings: the run's settings.
        world_size: the number of ranks that train.
        reward_threshold: the mean return at which the environment counts as solved, if that is defined.
        resumed_step: where the run goes on; what the logs hold about later steps is dropped.
        resumed_seconds: wall time that had passed by then.
        notes: sentences to print before it starts.

    Raises:
        ValueError: W&B is wanted, but not installed.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        world_size: int,
        reward_threshold: float | None,
        *,
        resumed_step: int = 0,
        resumed_seconds: float = 0.0,
        notes: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        self._title = f"{settings.env} on {ranks}, compression {settings.compression}"
        self._threshold = reward_threshold
        self._resumed_step = resumed_step
        self._resumed_seconds = resumed_seconds
        self._notes = notes
        self._waiting = WaitingTimes(world_size)
        self._console = Console()
        total = settings.total_steps
        if self._console.is_terminal:
            self._display: Lines = Dashboard(self._console, title=self._title, total_steps=total)
        else:
            self._display = Lines(self._console, total_steps=total, first_step=resumed_step)
        csv_log = CsvLog(folder / "progress.csv", resumed_step)
        self._points = [point for row in csv_log.rows if (point := _curve_point(row)) is not None]
        self._loggers: list[Logger] = [csv_log, TensorBoardLog(folder, settings.as_dict(), resumed_step)]
        if settings.wandb_project is not None:
            self._loggers.append(WandbLog(folder, settings.wandb_project, settings.as_dict()))

    def __enter__(self) -> RunReport:
        for note in self._notes:
            self._console.print(note, soft_wrap=True, highlight=False, markup=False)
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)
            stack.callback(self._display.stop)

    def update(self, status: Status) -> None:
        """Shows and logs where the run stands."""
        waited = self._waiting.add([report.times for report in status.reports])
        speed = (status.step - self._resumed_step) / (status.seconds - self._resumed_seconds)
        self._display.update(status, speed, self._waiting)
        scalars = _scalars(status, speed, waited)
        for logger in self._loggers:
            logger.log(status.step, scalars)
        if status.returns:
            average, low, high = status.returns
            self._points.append(CurvePoint(status.step, low, average, high))

    def finish(self, result: TrainResult) -> None:
        """Draws the learning curve and prints the table of results."""
        self._display.stop()
        draw_learning_curve(
            self._folder / "learning_curve.png", self._points, title=self._title, threshold=self._threshold
        )
        table = result_table(
            result,
            self._waiting,
            title=self._title,
            new_steps=result.step - self._resumed_step,
            new_seconds=result.seconds - self._resumed_seconds,
        )
        self._console.print(table)
        # Not in the table, which would cut or fold it.
        self._console.print(f"written to {self._folder}", soft_wrap=True, highlight=False, markup=False)


def _scalars(status: Status, speed: float, waited: Sequence[float]) -> dict[str, float]:
    """All figures of an update, by the names that they have in the logs. NaN: not known."""
    average, low, high = status.returns or (math.nan, math.nan, math.nan)
    scalars = {
        "seconds": status.seconds,
        "update": status.update,
        "episodes/return": average,
        "episodes/return_p10": low,
        "episodes/return_p90": high,
        "episodes/length": mean(status.window.lengths),
        "speed/steps_per_second": speed,
        "speed/wire_bytes": mean([report.wire_bytes for report in status.reports]),
    }
    scalars |= status.metrics
    for rank, (report, waiting) in enumerate(zip(status.reports, waited, strict=True)):
        figures = {f"{phase}_seconds": getattr(report.times, phase) for phase in PHASES}
        figures |= {"waiting_seconds": waiting, "gpu_memory": report.gpu.memory, "gpu_use": report.gpu.utilisation}
        scalars |= {f"rank{rank}/{name}": value for name, value in figures.items()}
    return scalars


def _curve_point(row: Mapping[str, str]) -> CurvePoint | None:
    """Reads a point of the learning curve from a row of progress.csv, if an episode had ended."""
    if not row["episodes/return"]:
        return None
    low, average, high = (float(row[f"episodes/{name}"]) for name in ("return_p10", "return", "return_p90"))
    return CurvePoint(int(row["step"]), low, average, high)


def draw_learning_curve(path: Path, points: Sequence[CurvePoint], *, title: str, threshold: float | None) -> None:
    """Draws return against environment steps into a PNG file, and a dashed line at the return that counts as solved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    steps = [point.step for point in points]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    band = ([point.low for point in points], [point.high for point in points])
    axes.fill_between(steps, *band, color="tab:blue", alpha=0.18, linewidth=0, label="10th to 90th percentile")
    axes.plot(
        steps, [point.mean for point in points], color="tab:blue", linewidth=2, label="mean of the last 100 episodes"
    )
    if threshold is not None:
        axes.axhline(threshold, color="0.35", linestyle="--", linewidth=1, label=f"solved at {threshold:g}")
    axes.set_title(title, loc="left")
    axes.set_xlabel("environment steps, all ranks")
    axes.set_ylabel("episode return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlim(left=0, right=steps[-1] if steps else None)
    axes.margins(y=0.05)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)
