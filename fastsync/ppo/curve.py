"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
