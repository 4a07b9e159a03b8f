"""``python -m benchmarks outer``: training between sites whose links are slow, synchronised at each step or every H.

Every site is a network namespace with one rank and a link of a known rate. A step computes nothing and takes as long as
it is told to, for the cores of one machine are not those of several. So what is measured is the share of a training's
time that is left for computing, and the bytes that a site sends, as its network interface counts them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import fastsync
from benchmarks.baselines.torchft_diloco import torchft_diloco
from benchmarks.harness.collect import Collected
from benchmarks.harness.options import check_names
from benchmarks.harness.progress import progress_bars, watched_rounds
from benchmarks.harness.records import Record, RowFile, environment
from benchmarks.network.launch import measure_over_links
from benchmarks.report.table import Columns, grouped_by, number, print_tables
from benchmarks.units import format_rate, parse_rate

PROG = "python -m benchmarks outer"
ALONE = "no synchronisation"


class Model(nn.Module):
    """Parameters in matrices of a GPT's sizes, whose gradients are there at once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        width = 256
        rows = [min(256, numel // width - first) for first in range(0, numel // width, 256)]
        self.weights = nn.ParameterList([torch.randn(row, width) for row in rows])

    def forward(self) -> torch.Tensor:
        return sum(weight.mean() for weight in self.weights)


@dataclass(frozen=True)
class Method:
    """How a training synchronises: each step (``every=1``) or in a context that hangs on the optimizer."""

    every: int
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    context: Callable[[nn.Module, Optimizer], AbstractContextManager] = lambda model, optimizer: nullcontext()
    after_step: Callable[[nn.Module], object] | None = None


def _attached(model: nn.Module, compression: str) -> nn.Module:
    fastsync.attach(model, compression)
    return model


def _each_step(compression: str) -> Method:
    return Method(1, partial(_attached, compression=compression))


def _diloco(every: int, **options: object) -> Method:
    return Method(every, context=partial(fastsync.DiLoCo, sync_every=every, **options))


def _local_sgd(every: int) -> Method:
    averager = PeriodicModelAverager(period=every, warmup_steps=0)
    averager.step = every  # it would average before the first step
    return Method(every, after_step=lambda model: averager.average_parameters(model.parameters()))


METHODS: dict[str, Callable[[], Method]] = {
    "ddp": lambda: Method(1, DistributedDataParallel),
    "fastsync.attach/int8+ef": partial(_each_step, "int8+ef"),
    "fastsync.attach/int4+ef": partial(_each_step, "int4+ef"),
    "fastsync.attach/lowrank": partial(_each_step, "lowrank"),
    "torch PeriodicModelAverager, H=50": partial(_local_sgd, 50),
    "torchft DiLoCo, H=50": lambda: Method(50, context=partial(torchft_diloco, sync_every=50)),
    "fastsync.DiLoCo/int8+ef, H=50": partial(_diloco, 50),
    "fastsync.DiLoCo/int8+ef, H=50, 4 fragments, delay 10": partial(
        _diloco, 50, fragments=4, fragment_sync_delay=10
    ),
    "fastsync.DiLoCo/topk, H=30": partial(_diloco, 30, compression=fastsync.TopK()),
    "fastsync.DiLoCo/topk, H=30, 3 fragments, delay 8": partial(
        _diloco, 30, compression=fastsync.TopK(), fragments=3, fragment_sync_delay=8
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Measure training between sites over slow links. Linux, as root."""

    sites: tuple[int, ...] = (2, 4)
    """Numbers of sites, one after the other."""
    rate: tuple[str, ...] = ("100mbit", "10mbit")
    """Of each site's link, each way, as tc writes it. One after the other."""
    methods: tuple[str, ...] = tuple(method for method in METHODS if "torchft" not in method or find_spec("torchft"))
    """How sites synchronise. torchft is measured where it is installed."""
    json: Path | None = None
    """File to write all rows to."""
    numel: int = 2_000_000
    """Parameters of the model."""
    step_time: float = 0.1
    """Seconds that a step computes."""
    rounds: int = 3
    """Outer steps that are timed, after one that is not."""
    each_step: int = 4
    """Steps that are timed of what synchronises each step."""
    timeout: float = 600.0
    """Seconds that ranks wait for each other."""

    def __post_init__(self) -> None:
        check_names("methods", self.methods, METHODS)


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status, as ``measure_over_links``."""
    options = tyro.cli(Options, prog=PROG, args=arguments)
    networks = [(sites, parse_rate(rate)) for sites in options.sites for rate in options.rate]
    return measure_over_links(PROG, measure_rank, options, networks, 1, report)


def measure_rank(options: Options, rows: RowFile, rate: int) -> list[str]:
    """Measures all methods as one site, of which rank 0 adds the rows. Returns notes."""
    with (
        fastsync.distributed.process_group(options.timeout, backend="gloo") as device,
        progress_bars(shown=dist.get_rank() == 0) as progress,
    ):
        alone = 0.0  # seconds of a step; measured first
        for name in (ALONE, *options.methods):
            watched = partial(watched_rounds, progress=progress, timeout=options.timeout)
            seconds, sent, steps = measure(name, Method(20) if name == ALONE else METHODS[name](), options, watched)
            totals = torch.tensor([seconds, sent], dtype=torch.float64)
            dist.all_reduce(totals, dist.ReduceOp.MAX)
            a_step, bytes_a_step = (totals / steps).tolist()
            alone = alone or a_step
            if dist.get_rank() == 0:
                settings = {"sites": dist.get_world_size(), "link": rate, "steps": steps}
                settings |= {"numel": options.numel, "step_time": options.step_time}
                figures = {"computing": alone / a_step, "bytes_a_step": bytes_a_step}
                rows.add([Record("outer", name, settings, figures, True, [a_step], environment(device))])
    return [LEGEND]


def measure(
    name: str, method: Method, options: Options, watched: Callable[..., Iterator[int]]
) -> tuple[float, int, int]:
    """Returns the seconds and bytes of the slowest site's steps, and how many steps those were.

    ``watched`` counts rounds of steps, as ``watched_rounds`` does.
    """
    torch.manual_seed(0)
    model = Model(options.numel)
    wrapped = method.wrap(model)
    optimizer = SGD(model.parameters(), lr=0.01)
    rounds = options.each_step if method.every == 1 else options.rounds

    def step() -> None:
        optimizer.zero_grad()
        began = time.perf_counter()
        loss = (1 + dist.get_rank()) * wrapped()  # as if each site had data of its own
        # Before backward: what overlaps with it would have to share the cores.
        time.sleep(max(0.0, options.step_time - (time.perf_counter() - began)))
        loss.backward()
        optimizer.step()
        if method.after_step is not None:
            method.after_step(model)

    with method.context(model, optimizer):
        for _ in watched([range(method.every)], description=f"{name}: steps that are not timed"):
            step()
        dist.barrier()
        began, sent_before = time.perf_counter(), bytes_sent()
        for _ in watched([range(rounds * method.every)], description=f"{name}: timed"):
            step()
        # As many fragments are on their way as when this began.
        return time.perf_counter() - began, bytes_sent() - sent_before, rounds * method.every


def bytes_sent() -> int:
    """What this namespace's interface has sent so far, all headers with it."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(counts[8])


def report(collected: Collected) -> None:
    """Prints a table for each number of sites and rate."""
    groups = grouped_by(collected.records, lambda record: (record.settings["sites"], record.settings["link"]))
    print_tables(groups, _title, COLUMNS, collected.notes)


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['sites']} sites, {format_rate(settings['link'])} each, {settings['numel']:,} parameters, "
        f"steps of {1e3 * settings['step_time']:.0f} ms"
    )


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "computing": lambda record: number(record.figures["computing"], ".1%"),
    "a step, ms": lambda record: number(record.samples[0], ",.1f", 1e-3),
    "sent a step, kB": lambda record: number(record.figures["bytes_a_step"], ",.2f", 1e3),
}
LEGEND = (
    "computing: the time of a step without synchronisation, as a share of that of a step. sent: by the site that "
    "sends most, all headers with it."
)
