"""``python -m benchmarks scaling``: how well a training step scales, and where its time goes.

Each world size is launched several times on this machine, in turns with the others. Over several machines any launcher
starts the ranks: ``torchrun --nnodes 2 --nproc-per-node 8 -m benchmarks scaling`` is one launch of its world size, and
``--rows`` joins the rows of several.

A step is that of ``ddp``: forward, backward with what makes the gradients the mean over the ranks, and the optimizer's
step. The methods, the plain model without communication and an empty step take turns, each time from a barrier.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.progress import Progress

from benchmarks.baselines.methods import SYNCHRONISED, left_out
from benchmarks.baselines.models import TRAININGS, Scale
from benchmarks.baselines.training_steps import NO_DDP
from benchmarks.harness.collect import ENDINGS, ending
from benchmarks.harness.measure import Measurement, all_gather, backend_of_rivals, measure_training, overhead
from benchmarks.harness.options import Device, Methods, check_device, check_names, check_positive, check_warmup, places
from benchmarks.harness.progress import announce, progress_bars
from benchmarks.harness.records import Record, RowFile, read_json
from benchmarks.harness.timing import TIMEOUT, Sampling
from benchmarks.report.efficiency import points
from benchmarks.report.page import ROWS, Document, check_folder, write_page
from benchmarks.report.scaling import scaling_document
from benchmarks.report.table import OVERSUBSCRIBED, print_lines, print_table
from fastsync.distributed import process_group
from fastsync.launch.environment import this_rank
from fastsync.launch.torchrun import launch_ranks
from fastsync.messages import check_at_least

WorldSizes = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="N [N ...]",
        instance_from_str=lambda words: tuple(int(word) for word in " ".join(words).replace(",", " ").split()),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(size) for size in value],
    ),
]

PROG = "python -m benchmarks scaling"
STOPPING = 5.0
"""Seconds that ranks have to end after Ctrl-C: they have nothing to save."""


@dataclass(frozen=True)
class Options:
    """Measure how a training step scales with the number of ranks, and where its time goes. Writes a report."""

    world_sizes: WorldSizes = (1, 2)
    """Numbers of ranks on this machine. Efficiency is relative to the smallest. Where a launcher such as torchrun has
    started the ranks, there are as many as it has started."""
    model: Literal[tuple(TRAININGS)] = "mlp"
    """What is trained, on synthetic samples: a policy of perceptrons (mlp), or a GPT."""
    scale: Scale = "small"
    """small: narrow models and short sequences, for a CPU. full: as in the papers, for GPUs."""
    methods: Methods = ("ddp", "fastsync.attach/none", "fastsync.attach/fp16")
    """Methods to synchronise gradients; by default ddp, and attach without compression and with fp16. A name that is
    unknown gives the list of all."""
    repetitions: int = 3
    """Launches of each world size. Six are needed for intervals that hold their 95 %."""
    report: Path = Path("scaling-report")
    """Folder to write: rows.json, pictures, and index.html, which needs nothing else."""
    rows: tuple[Path, ...] = ()
    """Measure nothing: report the rows.json of several runs as one."""
    strong: bool = False
    """Keep the samples of all ranks together constant, and not those of each. Takes batch_size."""
    batch_size: int | None = None
    """Samples of a rank in a step, by default as many as suit one; with --strong, those of all ranks together."""
    steps: int | None = None
    """Timed steps of each method in a launch; by default between 200 for the smallest model and 10 for the largest."""
    device: Device = "auto"
    """What ranks compute on. auto: GPUs where this machine has one."""
    warmup: int = 5
    """Steps of each method that are not timed."""
    oversubscribe: bool = False
    """Measure world sizes that have more ranks than cores, too. They are marked everywhere."""
    step_timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""
    seed: int = 0
    """Seeds the order of the methods and the samples."""

    def __post_init__(self) -> None:
        check_at_least(self, batch_size=1, repetitions=1, steps=1)
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise ValueError(f"world_sizes={self.world_sizes}: name at least one, each from 1 on")
        check_names("methods", self.methods, SYNCHRONISED)
        check_warmup(self.warmup)
        if self.strong and self.batch_size is None:
            raise ValueError("batch_size: --strong takes the number of samples of all ranks together")
        check_positive(self, "step_timeout")
        check_folder(self.report)
        for world_size in (1,) if is_rank() else self.world_sizes:
            self.samples(world_size)
            check_device("cpu" if self.on_cpu else "cuda", world_size, self.oversubscribe)
        refused = left_out(list(self.methods), "gloo" if self.on_cpu else "nccl")
        if refused:
            raise ValueError("; ".join(f"methods: {name}: {reason}" for name, reason in refused.items()))

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or not torch.cuda.is_available()

    def samples(self, world_size: int) -> int:
        """Of each rank in a step.

        Raises:
            ValueError: so many ranks cannot share a batch.
        """
        batch_size = self.batch_size or TRAININGS[self.model][self.scale].batch_size
        if not self.strong:
            return batch_size
        if batch_size % world_size:
            raise ValueError(
                f"batch_size={batch_size} cannot be shared by {world_size} ranks: with --strong it is that of all "
                "ranks together, so choose a multiple of every world size"
            )
        return batch_size // world_size


def is_rank() -> bool:
    """Whether a launcher has started this process, as one of several."""
    return this_rank().launcher is not None


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0; 1 if a result was wrong or a rank failed; 2 if rows cannot be shown together; 130 after
        Ctrl-C. The report of what was measured is written in any case.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    if options.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    rows = RowFile(options.report / ROWS)
    status, notes = 0, []
    if options.rows:
        try:
            records = [record for path in options.rows for record in read_json(path)]
            points(records)
        except ValueError as error:
            print(f"{PROG}: {error}", file=sys.stderr)
            return 2
    elif is_rank():
        records = measure_rank(options, 0)
        if this_rank().rank != 0:
            return int(not all(record.correct for record in records))
    else:
        options.report.mkdir(parents=True, exist_ok=True)
        rows.add([])
        try:
            launch_all(options, rows)
        except ENDINGS as error:
            status, note = ending(error)
            notes.append(f"{note}; launches before are reported")
        records = rows.read()
    options.report.mkdir(parents=True, exist_ok=True)
    rows.replace(records)
    document = scaling_document(records, shlex.join([*PROG.split(), *arguments]), notes)
    write_page(options.report, document)
    show(document, options.report)
    return status or int(not all(record.correct for record in records))


def launch_all(options: Options, rows: RowFile) -> None:
    """Launches all world sizes, in turns, so that what drifts meets all of them."""
    sizes = sorted(set(options.world_sizes))
    order = [(repetition, size) for repetition in range(options.repetitions) for size in sizes]
    for number, (repetition, size) in enumerate(order, 1):
        announce(f"[launch {number} of {len(order)}] starting {size} rank{'s' if size > 1 else ''}")
        rows.add(launch_ranks(measure_rank, size, options, repetition, stop_timeout=STOPPING)[0])


def measure_rank(options: Options, launch: int) -> list[Record]:
    """Measures as one rank of a launch. Every rank returns the same rows."""
    with process_group(options.step_timeout, backend=backend_of_rivals()) as device:
        own = this_rank().local_world_size or dist.get_world_size()
        settings = {
            "scaling": "strong" if options.strong else "weak",
            "nodes": int(os.environ.get("GROUP_WORLD_SIZE", dist.get_world_size() // own)),
            "launch": launch,
        }
        if any(all_gather(own > places(own, cpu=device.type == "cpu"))):
            settings[OVERSUBSCRIBED] = True
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            records = train(options, launch, device, progress)
        return [replace(record, settings={**record.settings, **settings}) for record in records]


def train(options: Options, launch: int, device: torch.device, progress: Progress) -> list[Record]:
    """A row for the step without communication and for each method."""
    steps = options.steps or TRAININGS[options.model][options.scale].repetitions
    sampling = Sampling(options.warmup, steps, options.seed + launch, options.step_timeout, device, progress)

    def figures(of_rank: Sequence[Mapping[str, Measurement]], *_: object) -> dict[str, float | None]:
        return {**compute_figures([rank[NO_DDP].samples for rank in of_rank]), "overhead": overhead(of_rank)}

    batch_size, methods = options.samples(dist.get_world_size()), tuple(dict.fromkeys(options.methods))
    return measure_training("scaling", options.model, options.scale, batch_size, methods, sampling, figures)


def compute_figures(of_rank: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Medians over the steps of what the ranks' steps without communication show; None where there are no steps.

    Args:
        of_rank: each rank's seconds, a sample a step.

    Returns:
        compute: the mean over the ranks. stragglers: what the slowest rank takes beyond that mean.
    """
    times = np.array(of_rank)
    if not times.size:
        return {"compute": None, "stragglers": None}
    mean = times.mean(axis=0)
    return {"compute": float(np.median(mean)), "stragglers": float(np.median(times.max(axis=0) - mean))}


def show(document: Document, folder: Path) -> None:
    """Prints the tables and where the report is."""
    print_lines([document.title])
    for section in document.sections:
        print_table(section.title, section.table)
    print_lines([*document.summary, *document.notes, f"Report: {folder / 'index.html'}"])
