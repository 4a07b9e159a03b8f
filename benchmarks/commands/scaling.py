"""``python -m benchmarks scaling``: how well a training step scales, and where its time goes.

Each world size is launched several times, in turns with the others, through torchrun's launcher. Where there are
several machines, the same command is started on each; the first of the hostfile decides what is launched next, and
keeps the rows.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro
from rich.markup import escape
from rich.table import Table as RichTable
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from benchmarks.baselines.models import TRAININGS, Scale
from benchmarks.baselines.ways import SYNCHRONISED, left_out
from benchmarks.commands.ddp import check_installed, memory_needed
from benchmarks.harness.collect import ENDINGS, ending
from benchmarks.harness.memory import check_ranks_fit
from benchmarks.harness.options import Device, check_positive, check_warmup
from benchmarks.harness.progress import progress_bars
from benchmarks.harness.records import Record, RowFile
from benchmarks.harness.scaling_launch import Launch, measure_rank
from benchmarks.harness.timing import TIMEOUT
from benchmarks.network.coordination import CoordinationError, Coordinator
from benchmarks.network.hosts import Host, check_capacity, own_capacity, own_index, place, read_hostfile
from benchmarks.report.document import Document
from benchmarks.report.folder import ROWS, check_folder, write_report
from benchmarks.report.scaling import scaling_document
from benchmarks.report.table import console
from fastsync.launch.torchrun import Nodes, launch_ranks
from fastsync.wording import check_at_least

if TYPE_CHECKING:
    ModelName = str
    WayName = str
    WorldSizes = tuple[int, ...]
else:
    ModelName = tyro.extras.literal_type_from_choices(TRAININGS)
    WayName = tyro.extras.literal_type_from_choices(SYNCHRONISED)
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
STARTING = 120.0
"""Seconds that the machines of one launch wait for each other, once they were told to start it."""
MAX_PORT = 65535


@dataclass(frozen=True)
class Options:
    """Measure how a training step scales with the number of ranks, and where its time goes. Writes a report."""

    world_sizes: WorldSizes = (1, 2)
    """Numbers of ranks, in all. Efficiency is relative to the smallest."""
    strong: bool = False
    """Keep the samples of all ranks together constant, and not those of each."""
    model: ModelName = "mlp"
    """What is trained, on synthetic samples: PPO's policies for vectors (mlp) and images (atari), ResNet-50, a GPT."""
    scale: Scale = "small"
    """small: narrow models, short sequences, small images, for a CPU. full: as in the papers, for GPUs."""
    batch_size: int | None = None
    """Samples of a rank in a step; with --strong, those of all ranks together. By default as many as suit a rank, and
    with --strong that times the least common multiple of the world sizes."""
    ways: tuple[WayName, ...] = ("ddp", "fastsync.attach/none", "fastsync.attach/fp16")
    """Ways to synchronise gradients."""
    repetitions: int = 3
    """Launches of each world size. Six are needed for intervals that hold their 95 %."""
    steps: int | None = None
    """Timed steps of each way in a launch; by default between 200 for the smallest model and 10 for the largest."""
    warmup: int = 5
    """Steps of each way that are not timed."""
    sweep: tuple[int, ...] = (2**10, 2**13, 2**16, 2**19, 2**22, 2**25)
    """Bytes that the bare all_reduce sums, for busbw over size; none to leave it out."""
    sweep_repetitions: int = 20
    """Timed all_reduces of each size in a launch."""
    device: Device = "auto"
    """What ranks compute on. auto: GPUs where this machine has one."""
    oversubscribe: bool = False
    """Measure world sizes that have more ranks than cores, too. They are marked everywhere."""
    hostfile: Path | None = None
    """Machines, a line for each: name slots=N. The same command is started on all of them."""
    node_rank: int | None = None
    """Which line of the hostfile is this machine's, from 0 on. By default the one with its name."""
    master_port: int = 29500
    """A free port of the first machine. Each launch takes one of those that follow."""
    timeout: float = 3600.0
    """The longest time in seconds that a machine waits for the first one."""
    step_timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""
    report: Path = Path("scaling-report")
    """Folder to write: rows.json, rows.csv, report.md, pictures, and index.html, which needs nothing else."""
    seed: int = 0
    """Seeds the order of the ways and the samples."""

    def __post_init__(self) -> None:
        check_at_least(self, batch_size=1, repetitions=1, steps=1, sweep_repetitions=1)
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise ValueError(f"world_sizes={self.world_sizes}: name at least one, each from 1 on")
        if not self.ways:
            raise ValueError(f"ways: choose at least one of {', '.join(SYNCHRONISED)}")
        check_warmup(self.warmup)
        if self.sweep and min(self.sweep) < 4:
            raise ValueError(f"sweep={self.sweep}: the smallest is 4 bytes, one float32 value")
        uneven = [size for size in self.world_sizes if self.strong and (self.batch_size or 0) % size]
        if uneven:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be shared by {uneven[0]} ranks: with --strong it is that of all "
                "ranks together, so choose a multiple of every world size"
            )
        check_positive(self, "timeout", "step_timeout")
        last_port = self.master_port + (self.repetitions * len(set(self.world_sizes)) if self.hostfile else 0)
        if self.master_port < 1 or last_port > MAX_PORT:
            raise ValueError(
                f"master_port={self.master_port}: ports are from 1 to {MAX_PORT}, and this takes those up to "
                f"{last_port}, one for each launch; choose a lower one"
            )
        if self.node_rank is not None and self.hostfile is None:
            raise ValueError(f"node_rank={self.node_rank} is a line of a hostfile; name it with --hostfile")
        check_installed([self.model])

    def samples(self, world_size: int) -> int:
        """Of each rank in a step."""
        own = TRAININGS[self.model][self.scale].batch_size
        if self.strong:
            return (self.batch_size or own * math.lcm(*self.world_sizes)) // world_size
        return self.batch_size or own


@dataclass(frozen=True)
class Plan:
    """The machines that take part, and which of them this one is."""

    hosts: list[Host]
    index: int
    placed: dict[int, list[int]]
    """Ranks on each of the first machines, for each world size."""
    device: str


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0; 1 if a result was wrong or a rank failed; 2 for what cannot be measured here; 130 after
        Ctrl-C. The report of what was measured is written in any case.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    try:
        plan = make_plan(options)
        coordinator = Coordinator(plan.hosts, plan.index, options.master_port, options.timeout)
        oversubscribed = agree(options, plan, coordinator)
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, KeyboardInterrupt) as error:
        status, note = _ending(error)
        print(f"{PROG}: {note}", file=sys.stderr)
        return status
    if not coordinator.leads:
        return follow(options, plan, coordinator)
    return lead(
        options, plan, coordinator, oversubscribed, shlex.join(["python", "-m", "benchmarks", "scaling", *arguments])
    )


def make_plan(options: Options) -> Plan:
    """Decides where ranks go.

    Raises:
        ValueError: that cannot be, for a reason that this machine knows of.
    """
    if options.hostfile is None:
        hosts, index = [Host("this machine", max(options.world_sizes))], 0
    elif not options.hostfile.is_file():
        raise ValueError(f"hostfile={options.hostfile}: there is no such file")
    else:
        hosts = read_hostfile(options.hostfile)
        index = own_index(hosts) if options.node_rank is None else options.node_rank
        if not 0 <= index < len(hosts):
            raise ValueError(f"node_rank={index} must be from 0 to {len(hosts) - 1}, a line of {options.hostfile}")
    if index == 0:
        check_folder(options.report)
    placed = {size: place(hosts, size) for size in sorted(set(options.world_sizes))}
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    refused = left_out(list(options.ways), "nccl" if device == "cuda" else "gloo")
    if refused:
        raise ValueError("; ".join(f"ways: {name}: {reason}" for name, reason in refused.items()))
    return Plan(hosts, index, placed, device)


def agree(options: Options, plan: Plan, coordinator: Coordinator) -> set[int]:
    """The machines tell each other what they are to measure and whether they can. A collective call of all machines.

    Returns:
        The world sizes with more ranks than cores on one of the machines.

    Raises:
        ValueError: on every machine, if one cannot, or is to measure something else.
    """
    refusal, oversubscribed = "", []
    name = plan.hosts[plan.index].name
    try:
        capacity = own_capacity(plan.device)
        oversubscribed = [
            size
            for size, placed in plan.placed.items()
            if plan.index < len(placed)
            and check_capacity(name, capacity, placed[plan.index], size, options.oversubscribe)
        ]
        needed = memory_needed(TRAININGS[options.model][options.scale], 1 + len(set(options.ways)))
        ranks = max((placed[plan.index] for placed in plan.placed.values() if plan.index < len(placed)), default=0)
        way_out = "choose fewer --ways, another --model, or --scale small"
        check_ranks_fit(f"model {options.model}", needed, ranks, way_out, cpu=plan.device == "cpu")
    except ValueError as error:
        refusal = str(error)
    same = {name: str(value) for name, value in asdict(options).items() if name not in OWN}
    same |= {"device": plan.device, "hostfile": ", ".join(f"{host.name} slots={host.slots}" for host in plan.hosts)}
    said = coordinator.gather("plan", [refusal, oversubscribed, same])
    refusals = list(dict.fromkeys(refusal for refusal, *_ in said if refusal))
    if refusals:
        raise ValueError("; ".join(refusals))
    (_, _, first), *others = said
    for host, (_, _, theirs) in zip(plan.hosts[1:], others, strict=True):
        for name, value in first.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{name} is {value} on {plan.hosts[0].name} and {theirs[name]} on {host.name}; start the same "
                    "command on all machines"
                )
    return {size for _, sizes, _ in said for size in sizes}


OWN = ("hostfile", "node_rank", "report", "timeout", "device")
"""Options that may differ between machines; of hostfile and device it is what comes out of them that must not."""


def launches(options: Options, plan: Plan) -> Iterator[tuple[int, int]]:
    """Repetition and world size of each launch; the sizes take turns, so that what drifts meets all of them."""
    for repetition in range(options.repetitions):
        for size in plan.placed:
            yield repetition, size


def launch(
    options: Options, plan: Plan, coordinator: Coordinator, number: int, repetition: int, size: int
) -> list[Record] | None:
    """One launch, as far as this machine takes part. The first machine gets its rows."""
    placed = plan.placed[size]
    if plan.index >= len(placed):
        return None
    work = Launch(
        model=options.model,
        scale=options.scale,
        ways=tuple(dict.fromkeys(options.ways)),
        batch_size=options.samples(size),
        steps=options.steps or TRAININGS[options.model][options.scale].repetitions,
        warmup=options.warmup,
        sweep=options.sweep,
        sweep_repetitions=options.sweep_repetitions,
        seed=options.seed + repetition,
        timeout=options.step_timeout,
    )
    if plan.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    master = plan.hosts[0].name
    nodes = Nodes(len(placed), plan.index, master, options.master_port + 1 + number, STARTING)
    with coordinator.watched(len(placed)):
        return launch_ranks(measure_rank, placed[plan.index], work, nodes=nodes, stop_timeout=STOPPING)[0]


def lead(options: Options, plan: Plan, coordinator: Coordinator, oversubscribed: set[int], command: str) -> int:
    """The first machine: launches, keeps the rows, reports. Returns the exit status."""
    options.report.mkdir(parents=True, exist_ok=True)
    rows = RowFile(options.report / ROWS)
    rows.add([])
    status, notes = 0, []
    order = list(launches(options, plan))
    try:
        with progress_bars(shown=True) as progress:
            task = progress.add_task("", total=len(order))
            for number, (repetition, size) in enumerate(order):
                what = f"{size} rank{'s' if size > 1 else ''}, launch {repetition + 1} of {options.repetitions}"
                progress.update(task, description=what, refresh=True)
                coordinator.announce(f"launch {number}")
                records = launch(options, plan, coordinator, number, repetition, size)
                assert records is not None
                settings = {
                    "scaling": "strong" if options.strong else "weak",
                    "nodes": len(plan.placed[size]),
                    "launch": repetition,
                } | ({"oversubscribed": True} if size in oversubscribed else {})
                rows.add(replace(record, settings={**record.settings, **settings}) for record in records)
                progress.update(task, advance=1, refresh=True)
    except (Exception, KeyboardInterrupt) as error:
        status, note = _ending(error)
        notes.append(f"{note}; launches before are reported")
        if not isinstance(error, CoordinationError):
            coordinator.warn(note)
    coordinator.part()
    records = rows.read()
    wrong = [f"WRONG: {record.way} at {dict(record.settings)}" for record in records if not record.correct]
    document = scaling_document(records, command, [*notes, *wrong])
    write_report(options.report, document, records)
    show(document, options.report)
    return status or int(bool(wrong))


def follow(options: Options, plan: Plan, coordinator: Coordinator) -> int:
    """Any other machine: waits for what the first one launches next. Returns the exit status."""
    try:
        for number, (repetition, size) in enumerate(launches(options, plan)):
            coordinator.hear(f"launch {number}")
            launch(options, plan, coordinator, number, repetition, size)
        coordinator.part()
    except (Exception, KeyboardInterrupt) as error:
        status, note = _ending(error)
        if not isinstance(error, CoordinationError):  # that is what the others know
            coordinator.warn(note)
        print(f"{PROG}: {note}", file=sys.stderr)
        return status
    return 0


def _ending(error: BaseException) -> tuple[int, str]:
    """Returns the exit status and a note of what has ended a launch. What is no such thing is raised again."""
    if isinstance(error, ENDINGS):
        return ending(error)
    if isinstance(error, CoordinationError):
        return 1, str(error)
    if isinstance(error, (DistError, RendezvousError)):
        return 1, f"the machines have lost each other: {error}"
    raise error


def show(document: Document, folder: Path) -> None:
    """Prints the tables and where the report is."""
    out = console()
    out.print(document.title, markup=False, style="bold")
    for section in document.sections:
        assert section.table is not None
        table = RichTable(title=section.title, title_justify="left")
        for index, heading in enumerate(section.table.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
        for row in section.table.rows:
            table.add_row(*(escape(cell) for cell in row))
        out.print(table)
    for line in (*document.summary, *document.notes, f"Report: {folder / 'index.html'}"):
        out.print(line, markup=False)
