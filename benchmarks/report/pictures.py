"""Pictures as SVG. Colours are those of M. Okabe and K. Ito (Color Universal Design, 2008), which the colour-blind can
tell apart; markers, dashes and hatches tell the same without any colour."""

import io
import math
from collections.abc import Sequence
from itertools import cycle, islice

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from benchmarks.report.document import Picture
from benchmarks.report.efficiency import PARTS, Bandwidth, Point
from benchmarks.report.table import OVERSUBSCRIBED, grouped_by
from benchmarks.units import format_bytes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<")
PART_COLOURS = dict(zip(PARTS, ("#0072B2", "#56B4E9", "#E69F00", "#D55E00"), strict=True))
PART_HATCHES = dict(zip(PARTS, ("", "//", "..", "xx"), strict=True))
INK, SOFT, LINE = "#1b1f24", "#59636e", "#d8dee4"
STYLE = {
    "svg.hashsalt": "fastsync",  # the same rows give the same file
    "svg.fonttype": "path",  # looks the same everywhere
    "font.size": 11,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
}


def efficiency_picture(points: Sequence[Point], scaling: str) -> Picture:
    """Efficiency over world size with intervals, a line for each way, and the ideal."""
    with mpl.rc_context(STYLE):
        figure = Figure((9, 4.8), layout="constrained")
        axes = figure.subplots()
        ways = list(dict.fromkeys(point.way for point in points))
        axes.axhline(1, color=SOFT, linewidth=1.2, linestyle=(0, (6, 4)), label="ideal")
        styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
        for index, (way, (colour, marker)) in enumerate(zip(ways, islice(styles, len(ways)), strict=True)):
            of_way = [point for point in points if point.way == way]
            # Moved apart, so that no interval hides another.
            shift = 2 ** (0.05 * (index - (len(ways) - 1) / 2))
            places = [point.world_size * shift for point in of_way]
            values = [point.efficiency for point in of_way]
            axes.plot(places, values, color=colour, linewidth=1.6)
            for place, point in zip(places, of_way, strict=True):
                if math.isfinite(point.efficiency_high):
                    axes.plot([place] * 2, [point.efficiency_low, point.efficiency_high], color=colour, linewidth=1.6)
                face = "white" if point.oversubscribed else colour
                axes.plot([place], [point.efficiency], marker=marker, markersize=8, color=colour, markerfacecolor=face)
            axes.plot([], [], marker=marker, markersize=8, color=colour, linewidth=1.6, label=way)
        _world_sizes_along(axes, points)
        axes.set_ylabel(f"{scaling} efficiency")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        tops = [1.0, *(p.efficiency for p in points), *(p.efficiency_high for p in points)]
        axes.set_ylim(0, 1.08 * max(value for value in tops if math.isfinite(value)))
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=min(4, len(ways) + 1))
        description = f"{scaling.capitalize()} efficiency over world size. " + "; ".join(
            f"{point.way} on {point.ranks}: {point.efficiency:.0%}" for point in points
        )
        return Picture("efficiency", description, _svg(figure))


def breakdown_picture(points: Sequence[Point]) -> Picture:
    """Draws where a step's time goes: a panel for each way, a stack for each world size."""
    with mpl.rc_context(STYLE):
        ways = list(dict.fromkeys(point.way for point in points))
        columns = min(3, len(ways))
        rows = math.ceil(len(ways) / columns)
        figure = Figure((9, 0.7 + 3.4 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        for axes in panels[len(ways) :]:
            axes.set_visible(False)
        for axes, way in zip(panels, ways, strict=False):
            of_way = [point for point in points if point.way == way]
            for index, point in enumerate(of_way):
                _stack(axes, index, point)
            axes.set_title(way)
            # On three lines, for there is little room below a bar.
            labels = [_tick(point).replace("rsub", "r-\nsub") for point in of_way]
            axes.set_xticks(range(len(of_way)), labels, fontsize=9)
            axes.tick_params(axis="x", length=0)
            axes.set_axisbelow(True)
            axes.grid(axis="y")
            axes.axhline(0, color=SOFT, linewidth=0.8)
            axes.set_xlabel("ranks")
        for row in range(rows):
            panels[row * columns].set_ylabel("step, ms")
        for part in PARTS:
            panels[0].bar([0], [0], color=PART_COLOURS[part], hatch=PART_HATCHES[part], edgecolor="white", label=part)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(PARTS))
        description = "Where a step's time goes, in milliseconds. " + "; ".join(
            f"{point.way} on {point.ranks}: "
            + ", ".join(f"{part} {seconds * 1e3:.2f}" for part, seconds in point.parts.items())
            for point in points
        )
        return Picture("breakdown", description, _svg(figure))


def bandwidth_picture(sweep: Sequence[Bandwidth]) -> Picture:
    """busbw of the bare all_reduce over the number of bytes, a line for each world size."""
    with mpl.rc_context(STYLE):
        figure = Figure((9, 4.8), layout="constrained")
        axes = figure.subplots()
        lines = grouped_by(sweep, lambda point: point.world_size)
        styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
        for line, (colour, marker) in zip(lines, islice(styles, len(lines)), strict=True):
            oversubscribed = line[0].oversubscribed
            places = [point.num_bytes for point in line]
            known = [point for point in line if math.isfinite(point.busbw_high)]
            axes.fill_between(
                [point.num_bytes for point in known],
                [point.busbw_low / 1e9 for point in known],
                [point.busbw_high / 1e9 for point in known],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
            axes.plot(
                places,
                [point.busbw / 1e9 for point in line],
                color=colour,
                marker=marker,
                markersize=7,
                markerfacecolor="white" if oversubscribed else colour,
                linestyle="--" if oversubscribed else "-",
                label=line[0].ranks,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({point.num_bytes for point in sweep}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("bytes summed")
        axes.set_ylabel("busbw, GB/s")
        axes.grid()
        figure.legend(loc="outside upper left", ncols=4)
        description = "busbw of the bare all_reduce in GB/s. " + "; ".join(
            f"{point.ranks}, {format_bytes(point.num_bytes)}: {point.busbw / 1e9:.3g}" for point in sweep
        )
        return Picture("busbw", description, _svg(figure))


def _stack(axes: Axes, place: int, point: Point) -> None:
    """Draws a stack; what is negative goes down from zero."""
    above = below = 0.0
    for part, seconds in point.parts.items():
        value = seconds * 1e3
        bottom = above if value >= 0 else below
        colour, hatch = PART_COLOURS[part], PART_HATCHES[part]
        axes.bar(place, value, 0.7, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        above, below = above + max(value, 0.0), below + min(value, 0.0)
    if point.oversubscribed:
        axes.bar(place, above, 0.78, color="none", edgecolor=SOFT, linestyle="--", linewidth=1)
    axes.annotate(
        f"{point.step * 1e3:.3g}", (place, above), (0, 3), textcoords="offset points", ha="center", fontsize=9
    )


def _tick(point: Point) -> str:
    return f"{point.world_size}\n{OVERSUBSCRIBED}" if point.oversubscribed else str(point.world_size)


def _world_sizes_along(axes: Axes, points: Sequence[Point]) -> None:
    ticks = {point.world_size: _tick(point) for point in points}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(ticks) / 1.25, max(ticks) * 1.25)
    axes.set_xlabel("ranks")


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()
