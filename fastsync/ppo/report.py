"""What rank 0 tells about a run: progress on the console, TensorBoard, and the learning curve in the run's folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from rich.console import Console

from fastsync.ppo.config import Settings
from fastsync.ppo.console import ProgressDisplay, result_table
from fastsync.ppo.curve import CurvePoint, draw_learning_curve
from fastsync.ppo.metrics import EpisodeWindow, TrainResult, mean


@dataclass(frozen=True)
class Status:
    """Where a run stands after an update."""

    step: int
    """Environment steps done, over all ranks."""
    seconds: float
    """Wall time of the learning loop so far."""
    window: EpisodeWindow
    """The last episodes of all ranks."""
    metrics: dict[str, float]
    """Figures of the update, averaged over ranks."""


class RunReport:
    """Tells about one run. Use it in a ``with`` block, on one rank only.

    Args:
        settings: the run's settings.
        world_size: the number of ranks that train.
        reward_threshold: the mean return at which the environment counts as solved, if that is defined.

    Raises:
        ValueError: the run's folder exists already.
    """

    def __init__(self, settings: Settings, world_size: int, reward_threshold: float | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = make_run_folder(settings)
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        self._title = f"{settings.env} on {ranks}, sync {sync_name(settings)}"
        self._threshold = reward_threshold
        self._points: list[CurvePoint] = []
        self._console = Console()
        self._display = ProgressDisplay(self._console, title=self._title, total_steps=settings.total_steps)
        self._tensorboard = SummaryWriter(str(self.folder))
        self._tensorboard.add_text("settings", _markdown_table(settings))

    def __enter__(self) -> RunReport:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)
        self._tensorboard.close()

    def update(self, status: Status) -> None:
        """Shows and logs where the run stands."""
        returns = status.window.returns
        self._display.update(status.step, status.seconds, mean(returns))
        scalars = {f"learning/{name}": value for name, value in status.metrics.items()}
        scalars["speed/steps_per_second"] = status.step / status.seconds
        if returns:
            scalars["episodes/return"] = mean(returns)
            scalars["episodes/length"] = mean(status.window.lengths)
            low, high = np.percentile(returns, [10, 90])
            self._points.append(CurvePoint(status.step, float(low), mean(returns), float(high)))
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, status.step)

    def finish(self, result: TrainResult) -> None:
        """Draws the learning curve and prints the table of results."""
        self._display.__exit__(None, None, None)
        draw_learning_curve(
            self.folder / "learning_curve.png", self._points, title=self._title, threshold=self._threshold
        )
        self._console.print(result_table(result, title=self._title, folder=str(self.folder)))


def sync_name(settings: Settings) -> str:
    """How a run's gradients travel, such as "ddp" or "fastsync fp16"."""
    return settings.sync if settings.compression == "none" else f"{settings.sync} {settings.compression}"


def make_run_folder(settings: Settings) -> Path:
    """Creates the folder of a run.

    Raises:
        ValueError: it exists already.
    """
    started = time.strftime("%Y%m%d-%H%M%S")
    env = settings.env.replace("/", "-").replace(":", "-")
    name = f"{env}-{sync_name(settings).replace(' ', '-')}-{settings.seed}-{started}"
    folder = Path(settings.runs_dir) / (settings.run_name or name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"the run folder {folder} exists already; choose another run_name or remove it") from None
    return folder


def _markdown_table(settings: Settings) -> str:
    rows = "\n".join(f"|{name}|{value}|" for name, value in vars(settings).items())
    return f"|setting|value|\n|-|-|\n{rows}"
