"""``python -m benchmarks ddp``: whole training steps of real models, taken apart into overhead and communication.

A sample is the time of a step, from a barrier until the slowest rank is through it: forward, backward with everything
that makes its gradients the mean over the ranks, and the optimizer's step. Beside the methods to synchronise run the
plain model, without DDP, and DDP under ``no_sync``: their difference is DDP's own overhead. What a method adds to the
second, or to the first if it has no DDP, is communication that backward did not hide, and what the method itself costs.
How long communication takes when nothing hides it, the bare all_reduce tells. Data are synthetic. All methods run in
the same processes and take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.progress import Progress

from benchmarks.baselines.methods import (
    BARE,
    BY_DEFAULT,
    WHOLE_WITH_ADAMW,
    WITH_ADAMW,
    WITH_MUON,
    Method,
    with_their_limits,
)
from benchmarks.baselines.models import TRAININGS, Scale
from benchmarks.baselines.training_steps import NO_DDP, NO_SYNC, PARTS
from benchmarks.harness.collect import Collected
from benchmarks.harness.measure import Measurement, measure_each, measure_training, measured_figures
from benchmarks.harness.options import Methods, RankOptions, check_names, run_on_ranks
from benchmarks.harness.records import Record, RowFile
from benchmarks.report.table import (
    WITHIN_NOISE,
    Columns,
    cost,
    grouped_by,
    milliseconds,
    number,
    print_tables,
    ranks_on,
    spread,
)
from fastsync.messages import check_at_least

NOT_TO_CHOOSE = {NO_DDP, "no_sync", *(set(WITH_ADAMW) - set(WHOLE_WITH_ADAMW)), *WITH_MUON}
"""What is measured in any case, and what is no whole step of a model."""
DEFAULT_METHODS = tuple(
    name for name in BY_DEFAULT if name.startswith(("ddp", "fastsync.register_comm_hook/", "fastsync.attach/"))
)


@dataclass(frozen=True)
class Models:
    models: tuple[Literal[tuple(TRAININGS)], ...] = tuple(TRAININGS)
    """What is trained: a policy of perceptrons (mlp), a GPT."""
    scale: Scale = "small"
    """small: narrow models and short sequences, for a CPU. full: as in the papers, for GPUs."""


@dataclass(frozen=True)
class Options(RankOptions, Models):
    """Measure training steps of real models: DDP's own overhead, communication, and how much of it backward hides."""

    methods: Methods = DEFAULT_METHODS
    """Methods to synchronise. The plain model, DDP under no_sync, and the bare all_reduce of what they send are always
    measured as well. A name that is unknown gives the list of all."""
    repetitions: int | None = None
    """Samples of each method; by default between 200 for the smallest model and 10 for the largest."""
    batch_size: int | None = None
    """Samples in each rank's batch; by default as many as suit the model and the scale."""
    warmup: int = 3
    """Steps of each method that are not timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("methods", self.methods, [name for name in PARTS if name not in NOT_TO_CHOOSE])
        check_names("models", self.models, TRAININGS)
        check_at_least(self, batch_size=1)


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("ddp", Options, measure_all, report, arguments)


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all models as one rank, of which rank 0 keeps the rows. Returns notes."""

    def measure_model(model: str, names: Sequence[str], device: torch.device, progress: Progress) -> list[Record]:
        training = TRAININGS[model][options.scale]
        batch_size = options.batch_size or training.batch_size

        def figures(
            of_rank: Sequence[Mapping[str, Measurement]], name: str, medians: Mapping[str, float]
        ) -> dict[str, float | None]:
            num_samples = batch_size * len(of_rank)
            return {**breakdown(name, PARTS[name], medians, num_samples), **measured_figures(name, of_rank)}

        sampling = options.sampling(training.repetitions, device, progress)
        return measure_training("ddp", model, options.scale, batch_size, names, sampling, figures)

    return measure_each(dict.fromkeys(options.models), with_their_limits(options.methods), options, rows, measure_model)


def breakdown(name: str, method: Method, medians: Mapping[str, float], num_samples: int) -> dict[str, float | None]:
    """Takes a method's step apart by the medians of all. Seconds, and None where something was not measured or is none.

    over_no_ddp: what it adds to the step of the plain model; of no_sync that is DDP's own overhead.
    A method that brings AdamW along has samples_per_second alone, because the plain model has another optimizer.

    exposed: what it adds to the step that is the same but for synchronisation: under no_sync where it is in DDP, of the
    plain model where it is not. Communication that backward did not hide, and what the method itself costs.
    hidden: the share of the bare all_reduce's time that it does not add, where the gradients travel.
    samples_per_second: of all ranks together.
    """
    figures: dict[str, float | None] = dict.fromkeys(("over_no_ddp", "exposed", "hidden", "samples_per_second"))
    if name not in medians or name in BARE:
        return figures
    figures["samples_per_second"] = num_samples / medians[name]
    if name in WHOLE_WITH_ADAMW:
        return figures
    if NO_DDP in medians:
        figures["over_no_ddp"] = medians[name] - medians[NO_DDP]
    without = NO_SYNC if method.in_ddp else NO_DDP
    if method.averages and without in medians:
        exposed = figures["exposed"] = medians[name] - medians[without]
        if method.limit in medians:
            figures["hidden"] = 1 - exposed / medians[method.limit]
    return figures


def report(options: Options, collected: Collected) -> None:
    """Prints a table for each model."""
    by_model = grouped_by(collected.records, lambda record: record.settings["model"])
    print_tables(by_model, _title, COLUMNS, (LEGEND, *collected.notes))


def _hidden(share: float | None) -> str:
    """None where it adds more than the bare all_reduce takes; more than all where it adds less than nothing: noise."""
    if share is None or 0 <= share <= 1:
        return number(share, ".0%")
    return "none" if share < 0 else WITHIN_NOISE


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "step, ms": lambda record: spread(record.quantiles),
    "samples/s": lambda record: number(record.figures["samples_per_second"], ",.1f"),
    "over no_ddp, ms": lambda record: cost(record.figures["over_no_ddp"]),
    "exposed, ms": lambda record: cost(record.figures["exposed"]),
    "hidden": lambda record: _hidden(record.figures["hidden"]),
    "engine's exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "wire bytes": lambda record: number(record.figures["wire_bytes"], ",.0f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
LEGEND = (
    "step: forward, backward, synchronisation and the optimizer's step, median [p10, p90] of the slowest rank; of "
    "all_reduce that alone. samples/s: of all ranks. over no_ddp: what the median adds to the plain model's; of "
    "no_sync it is DDP's own overhead. exposed: what it adds to no_sync's, or to no_ddp's where it is not in DDP: "
    "communication that backward did not hide, and its own work. hidden: the share of the bare all_reduce of the same "
    "dtype that is not exposed, none where more is; powerSGD_hook sends something else, in one bucket, as it would mix "
    "up two on Gloo, and so hides nothing. engine's exposed, wire bytes: per step and rank, as the engine counts them. "
    "error: of the "
    "gradients, relative, in the 2-norm. The learning rate is 0: the optimizer works, the weights stay."
)


def _title(record: Record) -> str:
    settings = record.settings
    training = TRAININGS[settings["model"]][settings["scale"]]
    dimensions = ", ".join(f"{name} {settings[name]}" for name in training.dimensions)
    return (
        f"{settings['model']}, scale {settings['scale']} ({dimensions}), {settings['batch_size']} samples a rank, "
        f"{settings['numel']:,} parameters in {settings['num_tensors']} tensors\n"
        f"{settings['repetitions']} repetitions, {ranks_on(record)}"
    )
