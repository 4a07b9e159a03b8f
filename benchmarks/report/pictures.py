"""Pictures as SVG, narrow enough that a phone shows them whole with text that can be read."""

import io
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator, PercentFormatter

from benchmarks.report.efficiency import PARTS, Point
from benchmarks.report.looks import Look, looks
from benchmarks.report.page import Picture
from benchmarks.report.table import OVERSUBSCRIBED, grouped_by

SOFT = "#59636e"
*_, EXPOSED = PARTS
OF_PARTS = {
    part: {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
    for part, colour, hatch in zip(PARTS[:-1], ("#dedede", "#c0c0c0", "#a0a0a0"), ("", "//", ".."), strict=True)
}
"""How bars show what is not a method's own doing; what is exposed looks as the method does."""
WIDTH = 5.0
"""Inches. Text of 11 points is as large on a phone, whose page is about as wide."""
DPI = 130
"""Of PNGs, so that they are 650 pixels wide: no wider than a page on a desk."""
STYLE = {
    "svg.hashsalt": "fastsync",  # the same rows give the same file
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "figure.figsize": (WIDTH, 4.2),
    "font.size": 11,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


def efficiency_picture(points: Sequence[Point], scaling: str) -> Picture:
    """Efficiency over world size with intervals, a line for each method, and the ideal."""
    with mpl.rc_context(STYLE):
        methods = grouped_by(points, lambda point: point.method)
        figure = Figure((WIDTH, 3.4 + 0.22 * len(methods)))
        axes = figure.subplots()
        axes.axhline(1, color=SOFT, linestyle="--", label="ideal")
        look_of = looks(point.method for point in points)
        for index, of_method in enumerate(methods):
            name, look = of_method[0].method, look_of[of_method[0].method]
            # Moved apart, so that no interval hides another.
            places = [point.world_size * 2 ** (0.05 * (index - (len(methods) - 1) / 2)) for point in of_method]
            values = [point.efficiency.value for point in of_method]
            errors = [_error(point) for point in of_method]
            axes.errorbar(places, values, list(zip(*errors, strict=True)), label=name, **look.line)
            hollow = [place for place, point in zip(places, of_method, strict=True) if point.oversubscribed]
            of_hollow = [point.efficiency.value for point in of_method if point.oversubscribed]
            axes.plot(hollow, of_hollow, look.marker, color=look.colour, markerfacecolor="white", zorder=3)
        ticks = {point.world_size: _tick(point) for point in points}
        rank_axis(axes, ticks.keys(), ticks.values(), _ranks(points))
        efficiency_axis(axes, f"{scaling} efficiency")
        figure.legend(loc="outside upper left")
        shown = "; ".join(f"{point.method} on {point.ranks}: {point.efficiency.value:.0%}" for point in points)
        return Picture("efficiency", f"{scaling.capitalize()} efficiency over world size. {shown}", _svg(figure))


def rank_axis(axes: Axes, ranks: Iterable[int], labels: Iterable[str], name: str = "ranks") -> None:
    """Numbers of ranks, each twice the one before at the same distance."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ranks), list(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)


def efficiency_axis(axes: Axes, name: str) -> None:
    axes.set_ylabel(name)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0)
    axes.grid(axis="y")


def _error(point: Point) -> tuple[float, float]:
    """How far the interval goes below and above; nowhere where it is not known."""
    value, low, high = point.efficiency
    return (value - low, high - value) if point.efficiency.is_known else (0.0, 0.0)


def breakdown_picture(points: Sequence[Point]) -> Picture:
    """Draws where a step's time goes: a panel for each method, below each other, and a bar for each world size."""
    with mpl.rc_context(STYLE):
        methods = grouped_by(points, lambda point: point.method)
        figure = Figure((WIDTH, 1.3 + sum(0.55 + 0.3 * len(of_method) for of_method in methods)))
        heights = [1 + len(of_method) for of_method in methods]
        panels = figure.subplots(len(methods), 1, sharex=True, squeeze=False, height_ratios=heights).flat
        look_of = looks(point.method for point in points)
        for axes, of_method in zip(panels, methods, strict=True):
            for place, point in enumerate(of_method):
                _stack(axes, place, point, look_of[point.method])
            axes.set_title(of_method[0].method, loc="left", fontsize=11)
            axes.set_yticks(range(len(of_method)), [_tick(point) for point in of_method])
            axes.set_ylim(len(of_method) - 0.5, -0.5)  # from the top down
            axes.set_ylabel(_ranks(of_method, separator="\n"))
            axes.grid(axis="x")
            axes.axvline(0, color=SOFT, linewidth=0.8)
        figure.axes[-1].set_xlabel("step, ms")
        figure.axes[-1].set_xlim(
            right=1.18e3 * max(point.step.value for point in points)
        )  # for the figures behind bars
        figure.legend(handles=_legend(points), loc="outside upper left", ncols=2)
        shown = "; ".join(
            f"{point.method} on {point.ranks}: "
            + ", ".join(f"{part} {seconds * 1e3:.2f}" for part, seconds in point.parts.items())
            for point in points
        )
        return Picture("breakdown", f"Where a step's time goes, in milliseconds. {shown}", _svg(figure))


def _stack(axes: Axes, place: int, point: Point, look: Look) -> None:
    """Draws a stack; what is negative goes left from zero."""
    above = below = 0.0
    for part, seconds in point.parts.items():
        value = seconds * 1e3
        drawn = look.bar if part == EXPOSED else OF_PARTS[part]
        axes.barh(place, value, 0.7, above if value >= 0 else below, **drawn)
        above, below = above + max(value, 0.0), below + min(value, 0.0)
    axes.annotate(f" {point.step.value * 1e3:.4g}", (above, place), ha="left", va="center")


def _legend(points: Sequence[Point]) -> list[Patch]:
    known = [part for part in OF_PARTS if any(part in point.parts for point in points)]
    patches = [Patch(**OF_PARTS[part], label=part) for part in known]
    return [*patches, Patch(facecolor="white", edgecolor=SOFT, label=f"{EXPOSED}, in colour")]


def _tick(point: Point) -> str:
    return f"{point.world_size}*" if point.oversubscribed else str(point.world_size)


def _ranks(points: Sequence[Point], separator: str = " ") -> str:
    """The name of the axis, with what an asterisk means where there is one."""
    return f"ranks{separator}(*: {OVERSUBSCRIBED})" if any(point.oversubscribed for point in points) else "ranks"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()
