"""``python -m benchmarks outer_loss``: what a sample teaches, where sites synchronise at each step or every H.

A GPT of 2 M parameters learns to write Python on two sites, each from its own half of the standard library's sources.
Or a CNN of 1 M learns to read digits. No time is measured: all methods take as many steps, and are judged on a part of
the data that none has seen.
"""

import copy
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import fastsync
from benchmarks.baselines.models import GPT
from benchmarks.harness.collect import Collected, collect
from benchmarks.harness.options import check_names
from benchmarks.harness.progress import progress_bars, watched_rounds
from benchmarks.harness.records import Record, RowFile, environment, read_json
from benchmarks.report.looks import looks
from benchmarks.report.pictures import DPI, SOFT, STYLE, WIDTH
from benchmarks.report.table import Columns, number, print_tables
from benchmarks.units import format_rate
from fastsync.distributed import dist_mean, process_group
from fastsync.sync.compression import parse_compression
from fastsync.sync.synchronizer import GradientSynchronizer

CONTEXT, VALIDATED_BATCHES = 64, 16
TIMEOUT = 600.0
"""Seconds that a step may take, and that a site waits for the other."""
EACH_STEP = "each step"
ATTACH = "attach"
"""``attach/WIRE``: synchronises each step, by that wire."""
OUTER: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8-lr0.7": {"outer_optimizer": partial(SGD, lr=0.7)},
    "int8-momentum0.5": {"outer_optimizer": partial(SGD, lr=0.7, momentum=0.5, nesterov=True)},
    "int8-lr1": {"outer_optimizer": partial(SGD, lr=1.0)},
    "int8-lr1-momentum0.9": {"outer_optimizer": partial(SGD, lr=1.0, momentum=0.9, nesterov=True)},
    "topk": {"compression": fastsync.TopK()},
}
"""Arguments of DiLoCo: as in the papers, four others to tune it, and for the slowest links."""


@dataclass(frozen=True)
class Options:
    """Train a small model on two sites by several methods, and compare the losses at equal samples."""

    model: Literal["gpt", "cnn"] = "gpt"
    """What learns: a GPT on Python's sources, or a CNN on handwritten digits."""
    methods: tuple[str, ...] = ("int8/10", "int8/30", "int8/100", "int8-lr1/10", "int8-lr1/30", "topk/30")
    """How differences travel between sites, and after how many steps: int8, as in the papers, with lr 0.7 and momentum
    0.9; int8-lr0.7, int8-momentum0.5, int8-lr1, int8-lr1-momentum0.9; topk. attach/WIRE: at each step, by a wire such
    as lowrank."""
    seeds: tuple[int, ...] = (0, 1, 2)
    starts: tuple[str, ...] = ("warm", "scratch")
    """warm: from a model that has been trained at each step for --warm-steps."""
    json: Path | None = None
    """File to write all rows to."""
    rows: tuple[Path, ...] = ()
    """Train nothing: show rows that --json has written."""
    links: Path | None = None
    """Rows of ``outer``, for --picture: what a step takes over each link."""
    picture: Path | None = None
    """File to draw the loss of --methods into, over the time that it takes to reach it."""
    steps: int = 500
    warm_steps: int = 300
    batch: int = 4
    """Sequences of 64 bytes, or pictures, that a site takes in each step."""
    inner: Literal["adamw", "muon"] = "adamw"
    """What steps inside each site: AdamW; or Muon for the matrices of a GPT's blocks, and AdamW for the rest."""
    learning_rate: float = 1e-3
    """Of AdamW, inside each site."""
    muon_learning_rate: float = 0.02
    """Of Muon."""
    validate_every: int = 50

    def __post_init__(self) -> None:
        if self.inner == "muon" and self.model != "gpt":
            raise ValueError(f"inner=muon: the model {self.model} has hardly any matrices; leave it out")
        check_names("methods", [method.partition("/")[0] for method in self.methods], [*OUTER, ATTACH])
        for method in self.methods:
            kind, _, rest = method.partition("/")
            if kind == ATTACH:
                parse_compression(rest)
            elif not rest.isdecimal() or int(rest) < 1:
                raise ValueError(f"methods: expected {kind}/STEPS, such as {kind}/30, got {method!r}")


def main(arguments: Sequence[str]) -> int:
    """Trains and reports. Returns the exit status: 0, or 1 if a rank failed."""
    options = tyro.cli(Options, prog="python -m benchmarks outer_loss", args=arguments)
    if options.rows:
        collected = Collected([record for path in options.rows for record in read_json(path)], [], 0)
    else:
        collected = collect(measure_rank, 2, options, options.json)
    if options.picture is not None and options.links is not None:
        draw(collected.records, read_json(options.links), options.methods, options.picture)
    print_tables(
        [collected.records], lambda record: f"Loss on unseen data, in {loss_unit(record)}", COLUMNS, collected.notes
    )
    return collected.status


def measure_rank(options: Options, rows: RowFile) -> list[str]:
    """Trains in all methods as one of two sites."""
    with process_group(TIMEOUT, backend="gloo") as device, progress_bars(shown=dist.get_rank() == 0) as progress:
        sites = Sites(options, progress)
        for seed in options.seeds:
            begun = {"scratch": sites.begin(seed), "warm": sites.begin(seed)}
            if "warm" in options.starts:
                sites.train(*begun["warm"], EACH_STEP, options.warm_steps, seed, f"seed {seed}, warm-up")
            for start in options.starts:
                for method in (EACH_STEP, *options.methods):
                    model, optimizers = copy.deepcopy(begun[start])
                    what = f"seed {seed}, {start}, {method}"
                    losses = sites.train(model, optimizers, method, options.steps, seed + 100, what)
                    if dist.get_rank() == 0:
                        numbers = {name: value for name, value in vars(options).items() if type(value) in (int, float)}
                        settings = numbers | {
                            "seed": seed,
                            "start": start,
                            "model": options.model,
                            "inner": options.inner,
                        }
                        rows.add([Record("outer_loss", method, settings, losses, True, [], environment(device))])
    return [f"{sum(p.numel() for p in model.parameters()):,} parameters"]


Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and what is right."""


class Text:
    """The standard library's sources: a third that none sees, and a third for each site."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.unseen, *self.parts = text.split(-(-len(text) // 3))

    def model(self) -> nn.Module:
        return GPT(256, CONTEXT, num_layers=4, width=192, num_heads=6)

    def batch(self, part: Tensor, size: int, generator: torch.Generator) -> Batch:
        first = torch.randint(len(part) - CONTEXT, (size, 1), generator=generator)
        samples = part[first + torch.arange(CONTEXT + 1)].long()
        return samples[:, :-1], samples[:, 1:]


class Digits:
    """scikit-learn's handwritten digits, parted as the text is. A row ends with its label."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        rows = torch.cat([torch.tensor(digits.data) / 16, torch.tensor(digits.target)[:, None]], dim=1).float()
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        self.unseen, *self.parts = rows.split(-(-len(rows) // 3))

    def model(self) -> nn.Module:
        return ConvNet()

    def batch(self, part: Tensor, size: int, generator: torch.Generator) -> Batch:
        rows = part[torch.randint(len(part), (size,), generator=generator)]
        return rows[:, :-1].view(-1, 1, 8, 8), rows[:, -1].long()


class ConvNet(nn.Sequential):
    """Two convolutions and two layers over pictures of 8 x 8. Its forward returns the loss, as the GPT's does."""

    def __init__(self) -> None:
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(super().forward(pictures), labels)


class Sites:
    """The data, and training on it as one of two sites."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._data = Text() if options.model == "gpt" else Digits()
        self._options = options
        self._progress = progress

    def begin(self, seed: int) -> tuple[nn.Module, list[Optimizer]]:
        torch.manual_seed(seed)
        model = self._data.model()
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
        if self._options.inner == "adamw":
            return model, [AdamW(model.parameters(), lr=self._options.learning_rate)]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=self._options.muon_learning_rate, weight_decay=0.0)
        return model, [muon, AdamW(others, lr=self._options.learning_rate)]

    def train(
        self, model: nn.Module, optimizers: list[Optimizer], method: str, steps: int, seed: int, what: str
    ) -> dict[str, float]:
        """Returns the sites' mean loss on unseen data after so many steps. Progress calls it ``what``."""
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        context: AbstractContextManager[object] = nullcontext()
        sync: GradientSynchronizer | None = None
        kind, _, rest = method.partition("/")
        if kind in (EACH_STEP, ATTACH):
            sync = fastsync.attach(model, rest or "none")
        else:
            context = fastsync.DiLoCo(model, optimizers, sync_every=int(rest), **OUTER[kind])
        losses = {}
        with context:
            for step in watched_rounds([range(1, steps + 1)], self._progress, what, TIMEOUT):
                model.zero_grad()
                model(*self._batch(self._data.parts[dist.get_rank()], generator)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                if step % self._options.validate_every == 0:
                    losses[str(step)] = self._validate(model)
        if sync is not None:
            sync.detach()
        return losses

    @torch.no_grad()
    def _validate(self, model: nn.Module) -> float:
        generator = torch.Generator().manual_seed(0)
        batches = [self._batch(self._data.unseen, generator) for _ in range(VALIDATED_BATCHES)]
        return float(dist_mean(torch.stack([model(*batch) for batch in batches]).mean()))

    def _batch(self, part: Tensor, generator: torch.Generator) -> Batch:
        return self._data.batch(part, self._options.batch, generator)


def loss_unit(record: Record) -> str:
    return "nats a picture" if record.settings.get("model") == "cnn" else "nats a byte"


def _newest(record: Record) -> float:
    return next(reversed(record.figures.values())) or 0.0


COLUMNS: Columns = {
    "start": lambda record: record.settings["start"],
    "seed": lambda record: str(record.settings["seed"]),
    "synchronised": lambda record: record.method,
    "steps": lambda record: next(reversed(record.figures)),
    "loss": lambda record: number(_newest(record), ".3f"),
}


TIMED = {EACH_STEP: "ddp", "int8": "fastsync.DiLoCo/int8+ef, H=50", "topk": "fastsync.DiLoCo/topk, H=30"}
"""Which row of ``outer`` tells what a step takes, or an outer step beside its steps."""


def draw(losses: Sequence[Record], links: Sequence[Record], shown: Sequence[str], path: Path) -> None:
    """Draws the mean loss of the methods that are shown, and over all seeds, against the time
    that steps take on each link, from the warm start if any."""
    starts = {record.settings["start"] for record in losses}
    first = [record for record in losses if record.settings["start"] == ("warm" if "warm" in starts else "scratch")]
    rates = sorted({record.settings["link"] for record in links}, reverse=True)
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 1.4 + 2.4 * len(rates)))
        panels = figure.subplots(len(rates), 1, sharex=True, squeeze=False).flat
        for axes, rate in zip(panels, rates, strict=True):
            timed = {record.method: record for record in links if record.settings["link"] == rate}
            for method, look in looks(each.method for each in first if each.method in (EACH_STEP, *shown)).items():
                of_method = [record.figures for record in first if record.method == method]
                minutes = [int(step) * seconds_a_step(method, timed) / 60 for step in of_method[0]]
                means = [sum(figures[step] for figures in of_method) / len(of_method) for step in of_method[0]]
                axes.plot(minutes, means, markersize=5, label=name_of(method), **look.line)
            axes.set(xscale="log", ylabel=f"loss, {loss_unit(first[0])}")
            axes.set_title(f"simulated link of {format_rate(rate)}", loc="left", fontsize=11)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")  # they would overlap
            axes.grid(visible=True)
        figure.axes[-1].set_xlabel("minutes")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left")
        figure.supxlabel(CAPTION, x=0.01, ha="left", fontsize=9, color=SOFT)
        figure.savefig(path, dpi=DPI)


def name_of(method: str) -> str:
    """What a picture calls a method."""
    kind, _, rest = method.partition("/")
    if kind in (EACH_STEP, ATTACH):
        wire, *options = (rest or "full width").split("+")
        return f"synchronised each step, {wire}{', error feedback' if 'ef' in options else ''}"
    how, *changed = kind.split("-")
    changes = [f", outer {change.replace('lr', 'lr ').replace('momentum', 'momentum ')}" for change in changed]
    return f"each {rest} steps, {how}{''.join(changes)}"


CAPTION = (
    "Sites are network namespaces of one machine. Losses are those of\n"
    "trainings; minutes are steps by what a step takes on the link."
)


def seconds_a_step(method: str, timed: Mapping[str, Record]) -> float:
    """What a step takes with its share of an outer step, from what ``outer`` has timed by method."""
    kind, _, every = method.partition("/")
    if kind == ATTACH:
        return timed[f"fastsync.{method}"].samples[0]
    record = timed[TIMED[kind.partition("-")[0]]]
    computes, takes = record.settings["step_time"], record.samples[0]
    return computes + (takes - computes) * int(record.method.partition("H=")[2] or 1) / int(every or 1)
