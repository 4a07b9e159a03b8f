"""Says and draws what a prediction of efficiency means, and what it does not know."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.report.looks import Look, looks
from benchmarks.report.pictures import DPI, SOFT, STYLE, WIDTH, efficiency_axis, rank_axis
from benchmarks.report.table import grouped_by
from benchmarks.units import format_rate, parse_rate

FITTED = "as fitted"
"""The link that was measured, beside which others have their rate."""
Measured = Mapping[str, Sequence[tuple[int, float]]]
"""By method, of each number of ranks that was measured, the efficiency if a sync takes as long as there."""


@dataclass(frozen=True)
class Prediction:
    """One method on so many ranks over a link. Times in seconds."""

    method: str
    link: str
    num_ranks: int
    compute: float
    exposed: tuple[float, float, float]
    """As the model has it, and if its syncs were too fast or too slow by the worst error."""
    is_measured: bool
    """Whether rows have as many ranks and about as many bytes, over this link."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed[0]

    @property
    def efficiencies(self) -> tuple[float, float, float]:
        """As the model has it, the lowest and the highest."""
        expected, slower, faster = (self.compute / (self.compute + seconds) for seconds in self.exposed)
        return expected, slower, faster


def sentences(predictions: Sequence[Prediction], most_ranks: int) -> Iterator[str]:
    """What it means on as many ranks as were measured and on the most that were asked for, over each link."""
    for of_link in grouped_by(predictions, lambda each: each.link):
        asked = sorted({each.num_ranks for each in of_link})
        measured = [num_ranks for num_ranks in asked if num_ranks <= most_ranks]
        for num_ranks in sorted({*measured[-1:], asked[-1]}):
            yield from _of_ranks([each for each in of_link if each.num_ranks == num_ranks])
            if num_ranks > most_ranks:
                yield f"No row has more than {most_ranks} ranks, so for {num_ranks:,} this is a guess from fewer."


def _of_ranks(predictions: Sequence[Prediction]) -> Iterator[str]:
    best, *others = sorted(predictions, key=lambda each: each.step)
    expected, low, high = best.efficiencies
    yield (
        f"With {best.num_ranks:,} ranks over {link_name(best.link)} a step with {best.method} takes about "
        f"{duration(best.step)}, {duration(best.exposed[0])} of it exposed communication."
    )
    yield f"Efficiency is {expected:.1%}, and between {low:.1%} and {high:.1%} with the worst error that was seen."
    for other in others:
        yield f"{other.method} takes {other.step / best.step:.2f} times as long."


def link_name(link: str) -> str:
    """In words: the fitted link, or one of a rate as tc writes it."""
    return "the measured link" if link == FITTED else f"a link of {format_rate(parse_rate(link))}"


def what_it_does_not_know(job_compute: float) -> Iterator[str]:
    yield f"It does not know your step: that one computes for {duration(job_compute)} is given, not measured."
    yield "It knows one link, with nothing else on it: no switches or racks, no other traffic, no rank that is late."
    yield "Where ranks shared cores, their rows have that in them, and the prediction has it too."


def duration(seconds: float) -> str:
    """As people say it, with about three digits."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def draw(
    predictions: Sequence[Prediction], most_ranks: int, measured: Measured, caption: Sequence[str], path: Path
) -> None:
    """Draws efficiency over ranks: a panel for each link, grey where there are more ranks than ``most_ranks``.

    ``measured`` are the points to draw in the panel of the link that was fitted.
    """
    links = grouped_by(predictions, lambda each: each.link)
    look_of = looks(each.method for each in predictions)
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 1.4 + 0.22 * len(look_of) + 2.4 * len(links)))
        panels = figure.subplots(len(links), 1, sharex=True, squeeze=False).flat
        for axes, of_link in zip(panels, links, strict=True):
            for of_method in grouped_by(of_link, lambda each: each.method):
                _line(axes, of_method, look_of[of_method[0].method])
            for method, points in (measured if of_link[0].link == FITTED else {}).items():
                look = look_of[method]
                axes.plot(*zip(*points, strict=True), look.marker, color=look.colour, markeredgecolor="white")
            axes.set_title(link_name(of_link[0].link), loc="left", fontsize=11)
            efficiency_axis(axes, "efficiency")
            if (most := max(each.num_ranks for each in of_link)) > most_ranks:
                axes.axvspan(most_ranks, most, color="#f0f0f0", zorder=0)
        ranks = sorted({each.num_ranks for each in predictions})
        rank_axis(figure.axes[-1], ranks, map(str, ranks))
        handles = [Line2D([], [], **look.line, label=method) for method, look in look_of.items()]
        figure.legend(handles=handles, loc="outside upper left")
        figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize=9, color=SOFT)
        figure.savefig(path, dpi=DPI)


def _line(axes: Axes, predictions: Sequence[Prediction], look: Look) -> None:
    """A line through what is expected, in a band of what the worst error would make of it."""
    ranks = [each.num_ranks for each in predictions]
    expected, low, high = zip(*(each.efficiencies for each in predictions), strict=True)
    axes.plot(ranks, expected, **look.line | {"marker": "."})
    axes.fill_between(ranks, low, high, color=look.colour, alpha=0.15, linewidth=0)
