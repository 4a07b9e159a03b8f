"""``python -m benchmarks headline``: the picture of the README, from rows of ``sync`` and ``link``."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.records import Record, read_json
from benchmarks.report.looks import LOOKS
from benchmarks.report.pictures import DPI, SOFT, STYLE, WIDTH
from benchmarks.report.table import print_lines
from benchmarks.units import format_rate

LABELS = {
    "ddp": "DDP",
    "fastsync.register_comm_hook/none": "DDP with the hook",
    "fastsync.attach/none": "attach",
    "fastsync.attach/fp16": "attach, fp16",
    "fastsync.attach/int8+ef": "attach, int8",
}
"""The methods that are shown, from the top down."""


@dataclass(frozen=True)
class Options:
    """Draw what a step takes, a panel for each file of rows. Of each the medians are drawn."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files that --json of sync or link has written."""
    picture: Path = Path("docs/pictures/headline.png")


def main(arguments: Sequence[str]) -> int:
    """Draws. Returns the exit status: 0, or 2 if the rows are not those of the methods that are shown."""
    options = tyro.cli(Options, prog="python -m benchmarks headline", args=arguments)
    try:
        panels = [read_panel(path) for path in options.rows]
    except ValueError as error:
        print(f"python -m benchmarks headline: {error}", file=sys.stderr)
        return 2
    draw(panels, options.picture)
    print_lines([f"Picture: {options.picture}"])
    return 0


def read_panel(path: Path) -> dict[str, Record]:
    """The rows of a file by their method.

    Raises:
        ValueError: there is no such file, or a method is missing.
    """
    panel = {record.method: record for record in read_json(path)}
    if missing := LABELS.keys() - panel.keys():
        raise ValueError(f"{path} has no rows of {', '.join(sorted(missing))}: measure them with --methods")
    return panel


def draw(panels: Sequence[Mapping[str, Record]], picture: Path) -> None:
    """Draws a panel for each, below each other."""
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 2.15 * len(panels) + 0.3))
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
            _bars(axes, {method: panel[method].quantiles["median"] * 1e3 for method in LABELS})
            axes.set_title(title(panel["ddp"].settings), loc="left", fontsize=11)
        figure.supxlabel(caption(panels[-1]["ddp"]), x=0.01, ha="left", fontsize=9, color=SOFT)
        figure.savefig(picture, dpi=DPI)


def _bars(axes: Axes, medians: Mapping[str, float]) -> None:
    """A bar for each method, with its milliseconds and how many times as fast as DDP it is."""
    for place, (method, ms) in enumerate(medians.items()):
        axes.barh(place, ms, 0.75, **LOOKS[method].bar)
        times = medians["ddp"] / ms
        axes.annotate(f" {ms:{'.1f' if ms < 100 else '.0f'}} ms ({times:.1f} ×)", (ms, place), va="center")
    axes.set_yticks(range(len(LABELS)), list(LABELS.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(LABELS) - 0.5, -0.5)  # from the top down
    axes.set_xlim(0, 1.6 * max(medians.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def title(settings: Mapping[str, Any]) -> str:
    """Says what the ranks shared, and which hosts and links were simulated."""
    ranks = settings["world_size"]
    if "link" not in settings:
        return f"One host: {ranks} ranks"
    hosts = ranks // (per_host := settings.get("ranks_per_host", 1))
    of_ranks = f"{per_host} rank{'s' if per_host > 1 else ''} each"
    return f"{hosts} simulated hosts, {of_ranks}, {format_rate(settings['link'])}"


def caption(record: Record) -> str:
    """Says what a step is and what the words of the panels mean."""
    settings, cores = record.settings, record.environment["cores"]
    simulated = "\nSimulated: network namespaces on this machine, a shaped link." if "link" in settings else ""
    return (
        f"Median time of a step, {settings['numel'] / 1e6:.1f} M float32 parameters, {cores} cores. "
        f"×: DDP's time\ndivided by this. The hook is fastsync's; int8 is with error feedback.{simulated}"
    )
