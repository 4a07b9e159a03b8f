"""``python -m benchmarks ddp``: whole training steps of real models, taken apart into overhead and communication.

A sample is the time of a step, from a barrier until the slowest rank is through it: forward, backward with everything
that makes its gradients the mean over the ranks, and the optimizer's step. Beside the ways to synchronise run the plain
model, without DDP, and DDP under ``no_sync``: what is between those two is DDP's own overhead. What a way adds to the
second, or to the first if it has no DDP, is communication that backward did not hide, and what the way itself costs.
How long communication takes when nothing hides it, the bare all_reduce tells. Data are synthetic. All ways run in the
same processes and take turns.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collect import Collected, check_places, collect, places
from benchmarks.gradients import Gradients
from benchmarks.measure import (
    TIMEOUT,
    Measurement,
    Schedule,
    all_gather,
    measure_ways,
    measured_figures,
    wire_name,
)
from benchmarks.memory import check_ranks_fit
from benchmarks.models import TRAININGS, ModelGradients, Scale, Training
from benchmarks.records import Record, RowFile, environment, quantiles
from benchmarks.table import Columns, console, measured_on, milliseconds, number, progress_bars, spread, table
from benchmarks.timing import slowest_rank
from benchmarks.ways import (
    BARE,
    BY_DEFAULT,
    MIN_WARMUP,
    WAYS,
    Step,
    TrainingStep,
    Way,
    left_out,
    with_their_limits,
    wrapped,
)
from fastsync import SyncStats
from fastsync.distributed import process_group

if TYPE_CHECKING:
    ModelName = str
    WayName = str
else:
    ModelName = tyro.extras.literal_type_from_choices(TRAININGS)
    WayName = tyro.extras.literal_type_from_choices(name for name in WAYS if name != "no_sync")

POLICIES = ("mlp", "atari")
DEFAULT_WAYS = tuple(
    name for name in BY_DEFAULT if name.startswith(("ddp", "fastsync.register_comm_hook/", "fastsync.attach/"))
)


@dataclass(frozen=True)
class Options:
    """Measure training steps of real models: DDP's own overhead, communication, and how much of it backward hides."""

    models: tuple[ModelName, ...] = tuple(TRAININGS)
    """What is trained: PPO's policies for vectors (mlp) and images (atari), ResNet-50, a GPT."""
    scale: Scale = "small"
    """small: narrow models, short sequences, small images, for a CPU. full: as in the papers, for GPUs."""
    batch_size: int | None = None
    """Samples in each rank's batch; by default as many as suit the model and the scale."""
    nproc: int = 2
    """Number of ranks, each a process of its own on this machine."""
    cpu: bool = False
    """Compute on CPUs where there are GPUs, too."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores or GPUs; every table says so."""
    share_gpus: bool = False
    """Let ranks share GPUs where there are fewer, rather than compute on the CPU. They take turns there: it shows that
    everything works, and nothing of how it scales."""
    ways: tuple[WayName, ...] = DEFAULT_WAYS
    """Ways to synchronise. The plain model, DDP under no_sync, and the bare all_reduce of what they send are always
    measured as well."""
    repetitions: int | None = None
    """Samples of each way; by default between 200 for the smallest model and 10 for the largest."""
    warmup: int = 3
    """Steps of each way that are not timed."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    seed: int = 0
    """Seeds the order of the ways, the weights and the data."""
    timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError(f"models: choose at least one of {', '.join(TRAININGS)}")
        if not self.ways:
            raise ValueError("ways: choose at least one, such as ddp or fastsync.attach/fp16")
        for name in ("nproc", "batch_size", "repetitions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.warmup < MIN_WARMUP:
            raise ValueError(f"warmup={self.warmup} must be at least {MIN_WARMUP}: DDP and PowerSGD start up that long")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"json={self.json}: there is no folder {self.json.parent}")
        if any(name in POLICIES for name in self.models) and importlib.util.find_spec("gymnasium") is None:
            raise ValueError(f"models {', '.join(POLICIES)} need gymnasium, which the extra 'train' installs")
        check_places(self.nproc, self.oversubscribe, self.cpu, self.share_gpus)
        for name in self.models:
            needed = memory_needed(TRAININGS[name][self.scale], 1 + len(with_their_limits(self.ways)))
            way_out = "choose fewer --ways, other models, or --scale small"
            check_ranks_fit(f"model {name}", needed, self.nproc, way_out, self.cpu, self.share_gpus)


def memory_needed(training: Training, num_ways: int) -> int:
    """Bytes that one rank allocates to measure so many ways: at most, as measured in main memory, without activations.

    The weights, own gradients, their mean and its bound; one result at a time is compared in float64. A way holds
    weights, gradients, the optimizer's state, its buffer, and DDP's buckets where it has them.
    """
    return 4 * training.numel * (14 + 7 * num_ways)


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0, or 1 if a way gave a wrong result or a rank failed.
    """
    options = tyro.cli(Options, prog="python -m benchmarks ddp", args=arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    collected = collect(measure_all, options.nproc, options, options.json)
    report(collected)
    return collected.status


class WholeStep:
    """A training step: what a way prepares for its backward, the backward, and the optimizer's step."""

    def __init__(self, step: TrainingStep, training: Training) -> None:
        self.model = step.model
        self._step = step
        self._optimizer = training.optimizer(step.model.parameters())

    def prepare(self) -> None:
        """Nothing is: all of a step is timed."""

    def run(self) -> None:
        self._step.prepare()
        self._step.run()
        self._optimizer.step()

    def result(self) -> Tensor:
        return self._step.result()

    def stats(self) -> SyncStats | None:
        return self._step.stats()


class _NoSync(nn.Module):
    """DDP that does not communicate: it decides so in the forward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        with self.model.no_sync():
            return self.model()


def _ddp_no_sync(gradients: Gradients, group: ProcessGroup) -> Step:
    return TrainingStep(_NoSync(wrapped(gradients, group)))


NO_DDP, NO_SYNC = "no_ddp", "no_sync"
PARTS: dict[str, Way] = {NO_DDP: WAYS["no_sync"], **WAYS, NO_SYNC: Way(_ddp_no_sync, wire=None, in_ddp=True)}
"""The ways that gradients are taken along in a step. A model of its own is all that ``sync`` needs for no_sync; here
that is no_ddp."""


def whole_steps(names: Sequence[str], training: Training) -> dict[str, Way]:
    """Ways whose steps are whole ones; the bare all_reduces, which are no training, stay what they are."""

    def whole(way: Way) -> Way:
        return replace(way, build=lambda gradients, group: WholeStep(way.build(gradients, group), training))

    return {name: PARTS[name] if name in BARE else whole(PARTS[name]) for name in (NO_DDP, *names)}


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all models as one rank, of which rank 0 keeps the rows. Returns notes."""
    with process_group(options.timeout, share_gpus=options.share_gpus) as device:
        names = with_their_limits(options.ways)
        excluded = left_out(names, dist.get_backend())
        names = [name for name in names if name not in excluded]
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            for model in dict.fromkeys(options.models):
                training = TRAININGS[model][options.scale]
                batch_size = options.batch_size or training.batch_size
                schedule = Schedule(
                    options.warmup, options.repetitions or training.repetitions, options.seed, options.timeout
                )
                gradients = ModelGradients(training, batch_size, device, options.seed)
                ways = whole_steps(names, training)
                of_rank = measure_ways(gradients, ways, schedule, device, progress, model)
                settings = {
                    "model": model,
                    "scale": options.scale,
                    **training.dimensions,
                    "batch_size": batch_size,
                    "numel": gradients.flat_grads.numel(),
                    "num_tensors": len(gradients.shapes),
                    "world_size": dist.get_world_size(),
                    "backend": dist.get_backend(),
                    **schedule.settings,
                }
                if options.nproc > places(options.nproc, options.cpu, options.share_gpus):
                    settings["oversubscribed"] = True
                records = to_records(of_rank, ways, settings, all_gather(environment(device))[0])
                if dist.get_rank() == 0:
                    rows.add(records)
    return [f"{name} is left out: {reason}" for name, reason in excluded.items()]


def to_records(
    of_rank: Sequence[Mapping[str, Measurement]],
    ways: Mapping[str, Way],
    settings: Mapping[str, Any],
    where: Mapping[str, Any],
) -> list[Record]:
    """One row a way: of the samples the slowest rank's, of the errors the largest, of the costs the mean."""
    samples = {name: slowest_rank([rank[name].samples for rank in of_rank]) for name in ways}
    medians = {name: quantiles(values)["median"] for name, values in samples.items() if values}
    num_samples = settings["batch_size"] * settings["world_size"]
    return [
        Record(
            benchmark="ddp",
            way=name,
            settings={**settings, "wire": wire_name(way)},
            figures={
                **breakdown(name, way, medians, num_samples),
                **measured_figures(name, of_rank),
            },
            correct=all(rank[name].correct for rank in of_rank),
            samples=samples[name],
            environment=where,
        )
        for name, way in ways.items()
    ]


def breakdown(name: str, way: Way, medians: Mapping[str, float], num_samples: int) -> dict[str, float | None]:
    """What the medians of the steps tell of one way. Seconds, and None where something was not measured or is none.

    over_no_ddp: what it adds to the step of the plain model; of no_sync that is DDP's own overhead.
    exposed: what it adds to the step that is the same but for synchronisation: under no_sync where it is in DDP, of the
    plain model where it is not. Communication that backward did not hide, and what the way itself costs.
    hidden: the share of the bare all_reduce's time that it does not add, where the gradients travel.
    samples_per_second: of all ranks together.
    """
    figures: dict[str, float | None] = dict.fromkeys(("over_no_ddp", "exposed", "hidden", "samples_per_second"))
    if name not in medians or name in BARE:
        return figures
    figures["samples_per_second"] = num_samples / medians[name]
    if NO_DDP in medians:
        figures["over_no_ddp"] = medians[name] - medians[NO_DDP]
    without = NO_SYNC if way.in_ddp else NO_DDP
    if way.averages and without in medians:
        exposed = figures["exposed"] = medians[name] - medians[without]
        if way.limit in medians:
            figures["hidden"] = 1 - exposed / medians[way.limit]
    return figures


def report(collected: Collected) -> None:
    """Prints a table for each model."""
    out = console()
    for model in dict.fromkeys(record.settings["model"] for record in collected.records):
        rows = [record for record in collected.records if record.settings["model"] == model]
        out.print(table(_title(rows[0]), COLUMNS, rows))
    for line in (LEGEND, *collected.notes):
        out.print(line, markup=False)


COLUMNS: Columns = {
    "way": lambda record: record.way,
    "step, ms": lambda record: spread(record.quantiles),
    "samples/s": lambda record: number(record.figures["samples_per_second"], ",.1f"),
    "over no_ddp, ms": lambda record: milliseconds(record.figures["over_no_ddp"]),
    "exposed, ms": lambda record: milliseconds(record.figures["exposed"]),
    "hidden": lambda record: number(record.figures["hidden"], ".0%"),
    "engine's exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "wire bytes": lambda record: number(record.figures["wire_bytes"], ",.0f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
LEGEND = (
    "step: forward, backward, synchronisation and the optimizer's step, median [p10, p90] of the slowest rank; of "
    "all_reduce that alone. samples/s: of all ranks. over no_ddp: what the median adds to the plain model's; of "
    "no_sync it is DDP's own overhead. exposed: what it adds to no_sync's, or to no_ddp's where it is not in DDP: "
    "communication that backward did not hide, and its own work. hidden: the share of the bare all_reduce of the same "
    "dtype that is not exposed; powerSGD_hook sends something else, in one bucket, as it would mix up two on Gloo, and "
    "so hides nothing. engine's exposed, wire bytes: per step and rank, as the engine counts them. error: of the "
    "gradients, relative, in the 2-norm. The learning rate is 0: the optimizer works, the weights stay."
)


def _title(record: Record) -> str:
    settings = record.settings
    training = TRAININGS[settings["model"]][settings["scale"]]
    dimensions = ", ".join(f"{name} {settings[name]}" for name in training.dimensions)
    crowded = ", OVERSUBSCRIBED" if settings.get("oversubscribed") else ""
    return (
        f"{settings['model']}, scale {settings['scale']} ({dimensions}), {settings['batch_size']} samples a rank, "
        f"{settings['numel']:,} parameters in {settings['num_tensors']} tensors\n"
        f"{settings['world_size']} {settings['backend']} ranks{crowded}, {settings['repetitions']} repetitions, "
        f"{measured_on(record)}"
    )
