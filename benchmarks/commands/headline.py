"""``python -m benchmarks headline``: the picture of the README, from rows of ``sync`` and ``link``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure

from benchmarks.harness.records import read_json
from benchmarks.report.pictures import COLOURS, SOFT, STYLE

LABELS = {
    "ddp": "DDP",
    "fastsync.register_comm_hook/none": "DDP, fastsync's hook",
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
    titles: tuple[str, ...]
    """Of the panels, in the order of the files."""
    picture: Path = Path("docs/pictures/headline.png")


def main(arguments: Sequence[str]) -> int:
    """Draws. Returns the exit status: 0."""
    options = tyro.cli(Options, prog="python -m benchmarks headline", args=arguments)
    with mpl.rc_context(STYLE):
        figure = Figure((9, 2.9))
        panels = figure.subplots(1, len(options.rows), sharey=True, squeeze=False).flat
        for axes, path, title in zip(panels, options.rows, options.titles, strict=True):
            medians = {record.method: record.quantiles["median"] * 1e3 for record in read_json(path)}
            shown = {label: medians[method] for method, label in LABELS.items()}
            colours = [COLOURS[0] if label.startswith("attach") else SOFT for label in shown]
            bars = axes.barh(list(shown), list(shown.values()), color=colours)
            times = [f" {ms:.3g} ms ({shown['DDP'] / ms:.1f} ×)" for ms in shown.values()]
            axes.bar_label(bars, times, fontsize=9)
            axes.set_xlim(0, 1.45 * max(shown.values()))
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        figure.axes[0].invert_yaxis()
        figure.savefig(options.picture, dpi=110)
    return 0
