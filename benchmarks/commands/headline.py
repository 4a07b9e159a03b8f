"""``python -m benchmarks headline``: the README's picture, from rows of ``sync``, ``link``, ``scaling`` and ``ppo``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import matplotlib as mpl
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.records import Record, read_json
from benchmarks.harness.statistics import replicates
from benchmarks.report.looks import LOOKS, Look
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
"""The methods of ``sync`` and ``link`` that are shown, from the top down."""
WHOLE = ("ddp", "fastsync.attach/none", "fastsync.attach/fp16")
"""Those of ``scaling``."""
UPDATES = {
    "fastsync, 2 ranks, 2 × the batch": ("averages gradients", "fastsync.attach/none"),
    "fastsync, 2 × 1 rank, no communication": ("sends nothing", "ddp"),
}
"""Those of ``ppo``, with a label and a look."""


@dataclass(frozen=True)
class Options:
    """Draw what a step takes, a panel for each file of rows. Of each the medians are drawn."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files that --json has written: of sync or link, for synchronisation alone; of scaling or ppo, for whole steps."""
    picture: Path = Path("docs/pictures/headline.png")


class Bar(NamedTuple):
    label: str
    look: Look
    ms: float


class Panel(NamedTuple):
    title: str
    bars: Sequence[Bar]
    """The first one is what the others are compared with."""


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


def read_panel(path: Path) -> Panel:
    """A panel of the rows in a file.

    Raises:
        ValueError: there is no such file, or a method is missing.
    """
    records = read_json(path)
    kind = records[0].benchmark if records else ""
    if kind == "scaling":
        most = max(record.settings["world_size"] for record in records)
        records = [record for record in records if record.settings["world_size"] == most]
        shown = {method: (LABELS[method], method) for method in WHOLE}
    elif kind == "ppo":
        records = [record for record in records if record.settings["hyperparameters"] == "cleanrl"]
        shown = UPDATES
    else:
        shown = {method: (label, method) for method, label in LABELS.items()}
    if missing := shown.keys() - {record.method for record in records}:
        raise ValueError(f"{path} has no rows of {', '.join(sorted(missing))}: measure them with --methods")
    of_method = {method: [record for record in records if record.method == method] for method in shown}
    bars = [Bar(label, LOOKS[look], milliseconds(of_method[method])) for method, (label, look) in shown.items()]
    return Panel(title(of_method[next(iter(shown))][0]), bars)


def milliseconds(launches: Sequence[Record]) -> float:
    """What a step takes, or an update: the median over the launches."""
    settings, seconds = launches[0].settings, float(np.median(replicates([record.samples for record in launches])))
    if launches[0].benchmark == "ppo":
        seconds = settings["num_envs"] * settings["num_steps"] / (launches[0].figures["steps_per_second"] or 0.0)
    return seconds * 1e3


def draw(panels: Sequence[Panel], picture: Path) -> None:
    """Draws a panel for each, below each other."""
    with mpl.rc_context(STYLE):
        heights = [len(panel.bars) + 0.8 for panel in panels]
        figure = Figure((WIDTH, 0.37 * sum(heights) + 0.6))
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
        for each, panel in zip(axes, panels, strict=True):
            _bars(each, panel.bars)
            each.set_title(panel.title, loc="left", x=-0.45, fontsize=11)  # above the labels, too
        figure.supxlabel(CAPTION, x=0.01, ha="left", fontsize=9, color=SOFT)
        figure.savefig(picture, dpi=DPI)


def _bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """A bar for each method, with its milliseconds and how many times as fast as the first one it is."""
    for place, bar in enumerate(bars):
        axes.barh(place, bar.ms, 0.75, **bar.look.bar)
        times = bars[0].ms / bar.ms
        of_first = f" ({times:{'.2f' if times < 1.2 else '.1f'}} ×)" if place else ""
        axes.annotate(f" {bar.ms:{'.1f' if bar.ms < 100 else '.0f'}} ms{of_first}", (bar.ms, place), va="center")
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)  # from the top down
    axes.set_xlim(0, 1.6 * max(bar.ms for bar in bars))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def title(record: Record) -> str:
    """Says whether it is synchronisation alone, what the ranks shared, and which hosts and links were simulated."""
    settings = record.settings
    if record.benchmark == "ppo":
        return f"The whole update of PPO on {settings['env']}, {settings['nproc']} ranks"
    ranks = settings["world_size"]
    if record.benchmark == "scaling":
        return f"The whole step of a small GPT, {ranks} ranks"
    if "link" not in settings:
        return f"Synchronisation alone, one host: {ranks} ranks"
    hosts = ranks // (per_host := settings.get("ranks_per_host", 1))
    of_ranks = f"{per_host} rank{'s' if per_host > 1 else ''}"
    return f"Synchronisation alone, {hosts} simulated hosts × {of_ranks}, {format_rate(settings['link'])}"


CAPTION = (
    "Medians. ×: the first line's time divided by this. Synchronisation alone:\n"
    "12.6 M float32 parameters, no forward and no optimizer. The hook is fastsync's;\n"
    "int8 has error feedback. Simulated: network namespaces, a shaped link."
)
