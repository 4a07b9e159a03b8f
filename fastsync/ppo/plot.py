"""``fastsync plot``: learning curves of runs as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any, Literal

import numpy as np
import tyro
import yaml
from numpy.typing import NDArray

from ..doctor import install_command
from .evaluate import newest_runs, runs_here
from .runs.folder import SETTINGS
from .runs.loggers import PROGRESS

POINTS = 300
"""Points of a curve that is the mean of several runs."""
SAME = (
    "seed", "run_name", "runs_dir", "resume", "quiet", "checkpoint_interval", "keep_checkpoints", "wandb_project",
    "eval_interval", "eval_episodes", "eval_env",
)  # fmt: skip
"""Settings in which runs of one curve may differ, because they do not change what is learnt."""
LABELS = {"step": "environment steps", "seconds": "seconds", "episodes/return": "return, mean of 100 episodes"}

Rows = NDArray[np.float64]
"""x and y of a run's rows, [rows, 2]."""


@dataclass(frozen=True)
class Plot:
    """Draw learning curves. Runs that differ in their seeds only are one curve: mean, least and largest."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ()
    """Folders of runs. Without any it is the newest run in the folder runs."""
    metric: str = "episodes/return"  # Column of progress.csv to draw.
    x: Literal["step", "seconds"] = "step"  # Environment steps, or seconds.
    output: str | None = None
    """File to write: PNG, PDF or SVG. By default it is returns.png in the run's folder, or for several runs here."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and prints the name of the picture.

    Raises:
        ValueError: a folder is not that of a run, a run lacks the metric, or matplotlib is missing.
    """
    options = tyro.cli(Plot, prog="fastsync plot", args=arguments)
    folders = [Path(run).expanduser() for run in options.runs] or newest_runs()[:1]
    if not folders:
        raise ValueError(f"say which runs to draw; {runs_here('plot')}")
    curves = grouped(folders, options.x, options.metric)
    output = Path(options.output or (folders[0] if len(folders) == 1 else Path()) / "returns.png").expanduser()
    try:
        draw(curves, output, options.x, options.metric)
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {install_command('plot')}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # such as a format that matplotlib lacks
        raise ValueError(f"output={str(output)!r} cannot be written: {reason}") from error
    print(f"picture: {output}")
    return 0


def grouped(folders: Sequence[Path], x: str, metric: str) -> dict[str, list[Rows]]:
    """Reads runs. Returns those of each curve by its label, which names the settings that differ between curves."""
    runs = list[tuple[Mapping[str, Any], Rows]]()
    for folder in folders:
        settings = _settings(folder)
        rows, num_ranks = _rows_and_ranks(folder, x, metric)
        runs.append(({**settings, "ranks": num_ranks}, rows))
    varying = [
        name for name in dict.fromkeys(name for settings, _ in runs for name in settings)
        if len({str(settings.get(name)) for settings, _ in runs}) > 1 and name not in SAME
    ]  # fmt: skip
    curves: dict[str, list[Rows]] = {}
    for settings, rows in runs:
        # The environment comes first, for it is what differs most often.
        own = [f"{name} {settings.get(name)}" for name in varying if name != "env"]
        curves.setdefault(", ".join([str(settings.get("env")), *own]), []).append(rows)
    return curves


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        return dict(yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")))
    except OSError:
        raise ValueError(f"run={str(folder)!r} is not the folder of a run; {runs_here('plot')}") from None


def _rows_and_ranks(folder: Path, x: str, metric: str) -> tuple[Rows, int]:
    """Reads the rows of a run that have the metric. Returns them, and how many ranks it had at most."""
    try:
        with (folder / PROGRESS).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(line for line in file if line.endswith("\n"))
            rows = [(float(row[x]), float(row[metric])) for row in reader if row.get(metric)]
            names = reader.fieldnames or []
    except OSError:
        raise ValueError(f"run={str(folder)!r} has no {PROGRESS} yet: it has not ended its first update") from None
    if metric not in names:
        raise ValueError(f"metric={metric!r} is not in {folder / PROGRESS}; it has {', '.join(names)}")
    if not rows:
        raise ValueError(f"{folder / PROGRESS} has no values of {metric}: no episode may have ended yet")
    return np.array(rows), sum(fullmatch(r"rank\d+/environment_seconds", name) is not None for name in names)


def mean_curve(runs: Sequence[Rows]) -> tuple[Rows, Rows, Rows, Rows]:
    """Returns x, and mean, least and largest of the runs at x [points], where all of them have values."""
    begin, end = max(rows[0, 0] for rows in runs), min(rows[-1, 0] for rows in runs)
    grid = np.linspace(begin, max(begin, end), POINTS)
    values = np.stack([np.interp(grid, rows[:, 0], rows[:, 1]) for rows in runs])
    return grid, values.mean(0), values.min(0), values.max(0)


def draw(curves: Mapping[str, Sequence[Rows]], output: Path, x: str, metric: str) -> None:
    """Writes a picture of curves, each of one or more runs.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, runs) in enumerate(curves.items()):
        color = f"C{number % 10}"
        if len(runs) == 1:
            axes.plot(*runs[0].T, color=color, label=label)
            continue
        grid, mean, least, most = mean_curve(runs)
        axes.fill_between(grid, least, most, color=color, alpha=0.2, linewidth=0)
        axes.plot(grid, mean, color=color, label=f"{label} ({len(runs)} runs)")
    axes.set_xlabel(LABELS[x])
    axes.set_ylabel(LABELS.get(metric, metric))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if len(curves) == 1:
        axes.set_title(next(iter(axes.get_legend_handles_labels()[1])), fontsize=10)
    else:
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=150)
