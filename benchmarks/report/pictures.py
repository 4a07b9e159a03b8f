"""Pictures as SVG. Colours are those of M. Okabe and K. Ito (Color Universal Design, 2008), which the colour-blind can
tell apart; markers, dashes and hatches tell the same without any colour."""

import io
import math
from collections.abc import Sequence
from itertools import cycle

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from benchmarks.report.efficiency import PARTS, Point
from benchmarks.report.page import Picture
from benchmarks.report.table import OVERSUBSCRIBED, grouped_by

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<")
OF_PARTS = dict(zip(PARTS, (("#0072B2", ""), ("#56B4E9", "//"), ("#E69F00", ".."), ("#D55E00", "xx")), strict=True))
"""Colour and hatch."""
STYLE = {
    "svg.hashsalt": "fastsync",  # the same rows give the same file
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "figure.figsize": (9, 4.8),
    "font.size": 11,
    "legend.frameon": False,
}
SOFT = "#59636e"


def efficiency_picture(points: Sequence[Point], scaling: str) -> Picture:
    """Efficiency over world size with intervals, a line for each method, and the ideal."""
    with mpl.rc_context(STYLE):
        figure = Figure()
        axes = figure.subplots()
        axes.axhline(1, color=SOFT, linestyle="--", label="ideal")
        methods = grouped_by(points, lambda point: point.method)
        for index, (of_method, colour, marker) in enumerate(zip(methods, cycle(COLOURS), cycle(MARKERS), strict=False)):
            # Moved apart, so that no interval hides another.
            places = [point.world_size * 2 ** (0.05 * (index - (len(methods) - 1) / 2)) for point in of_method]
            values = [point.efficiency.value for point in of_method]
            errors = [_error(point) for point in of_method]
            axes.errorbar(
                places, values, list(zip(*errors, strict=True)), color=colour, marker=marker, label=of_method[0].method
            )
            hollow = [place for place, point in zip(places, of_method, strict=True) if point.oversubscribed]
            of_hollow = [point.efficiency.value for point in of_method if point.oversubscribed]
            axes.plot(hollow, of_hollow, marker, color=colour, markerfacecolor="white", zorder=3)
        ticks = {point.world_size: _tick(point) for point in points}
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks")
        axes.set_ylabel(f"{scaling} efficiency")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0)
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=4)
        shown = "; ".join(f"{point.method} on {point.ranks}: {point.efficiency.value:.0%}" for point in points)
        return Picture("efficiency", f"{scaling.capitalize()} efficiency over world size. {shown}", _svg(figure))


def _error(point: Point) -> tuple[float, float]:
    """How far the interval goes below and above; nowhere where it is not known."""
    value, low, high = point.efficiency
    return (value - low, high - value) if point.efficiency.is_known else (0.0, 0.0)


def breakdown_picture(points: Sequence[Point]) -> Picture:
    """Draws where a step's time goes: a panel for each method, a stack for each world size."""
    with mpl.rc_context(STYLE):
        methods = grouped_by(points, lambda point: point.method)
        columns = min(3, len(methods))
        num_rows = math.ceil(len(methods) / columns)
        figure = Figure((9, 0.7 + 3.4 * num_rows))
        panels = figure.subplots(num_rows, columns, sharey=True, squeeze=False).flat
        for axes, of_method in zip(panels, methods, strict=False):
            for place, point in enumerate(of_method):
                _stack(axes, place, point)
            axes.set_title(of_method[0].method, loc="left")
            axes.set_xticks(range(len(of_method)), [_tick(point) for point in of_method], fontsize=9)
            axes.set_xlabel("ranks")
            axes.set_ylabel("step, ms")
            axes.label_outer()
            axes.tick_params(labelbottom=True)
            axes.grid(axis="y")
            axes.axhline(0, color=SOFT, linewidth=0.8)
        for axes in panels:  # those that no method has taken
            axes.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(list(unique.values()), list(unique), loc="outside upper left", ncols=len(PARTS))
        shown = "; ".join(
            f"{point.method} on {point.ranks}: "
            + ", ".join(f"{part} {seconds * 1e3:.2f}" for part, seconds in point.parts.items())
            for point in points
        )
        return Picture("breakdown", f"Where a step's time goes, in milliseconds. {shown}", _svg(figure))


def _stack(axes: Axes, place: int, point: Point) -> None:
    """Draws a stack; what is negative goes down from zero."""
    above = below = 0.0
    for part, seconds in point.parts.items():
        value, (colour, hatch) = seconds * 1e3, OF_PARTS[part]
        bottom = above if value >= 0 else below
        axes.bar(place, value, 0.7, bottom, color=colour, hatch=hatch, edgecolor="white", label=part)
        above, below = above + max(value, 0.0), below + min(value, 0.0)
    axes.annotate(f"{point.step.value * 1e3:.4g}", (place, above), ha="center", va="bottom", fontsize=9)


def _tick(point: Point) -> str:
    return f"{point.world_size}\n{OVERSUBSCRIBED}" if point.oversubscribed else str(point.world_size)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()
