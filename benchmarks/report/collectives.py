"""What collectives cost by their size, as a picture from the rows of ``collectives``."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness.records import Record
from benchmarks.report.looks import LOOKS, Look
from benchmarks.report.pictures import DPI, STYLE, WIDTH
from benchmarks.report.table import grouped_by

OF_BACKENDS: dict[str, Look] = {
    "gloo": LOOKS["ddp"],
    "fastsync": LOOKS["fastsync.attach/none"],
    "mpi": LOOKS["fastsync.attach/fp16"],
}


def picture(records: Sequence[Record], file: Path) -> None:
    """Median time over size with p10 and p90, a line for each backend and a panel for each collective."""
    of_sizes = [record for record in records if record.settings["collective"] != "barrier"]
    panels = grouped_by(of_sizes, lambda record: record.settings["collective"])
    if not panels:
        return
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 2.6 * len(panels)))
        for axes, of_panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
            for of_backend in grouped_by(of_panel, lambda record: record.method):
                rows = sorted(of_backend, key=lambda record: int(record.settings["bytes"]))
                sizes = [int(row.settings["bytes"]) for row in rows]
                low, medians, high = ([1e6 * row.quantiles[name] for row in rows] for name in ("p10", "median", "p90"))
                look = OF_BACKENDS[rows[0].method]
                axes.plot(sizes, medians, label=rows[0].method, markersize=5, **look.line)
                axes.fill_between(sizes, low, high, color=look.colour, alpha=0.2, linewidth=0)
            settings = of_panel[0].settings
            axes.set_title(f"{settings['collective']}, {settings['world_size']} ranks", loc="left", fontsize=11)
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs")
            axes.set_xscale("log", base=2)
            axes.grid(axis="y")
            axes.legend()
        metadata = dict.fromkeys(("Creator", "Date")) if file.suffix == ".svg" else None
        figure.savefig(file, dpi=DPI, metadata=metadata)
