"""Where trainings spend their time, as horizontal stacked bars."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.report.pictures import COLOURS, SOFT, STYLE

HATCHES = ("", "//", "..", "xx", "", "\\\\", "--", "++")


def draw_phases(path: Path, bars: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Draws a bar for each training, of the seconds in each of its phases; all have the same phases."""
    names = list(bars)
    phases = list(next(iter(bars.values())))
    with mpl.rc_context(STYLE):
        figure = Figure((9, 1.6 + 0.5 * len(bars)), dpi=150, layout="constrained")
        axes = figure.subplots()
        ends = [0.0] * len(bars)
        for phase, colour, hatch in zip(phases, cycle((*COLOURS, SOFT)), cycle(HATCHES), strict=False):
            widths = [1e3 * bars[name][phase] for name in names]
            axes.barh(names, widths, left=ends, color=colour, hatch=hatch, edgecolor="white", label=phase)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=4)
        figure.savefig(path)
