"""``python -m benchmarks ops``: pack and unpack against a copy of as many bytes, cat + mul + to, and torch._foreach.

A sample is the time of one call, as the mean over all input sets, each of them used once. Sets of larger sizes do not
fit into the cache together; those of the smallest do, as the newest gradients do in training. All methods of a pass use
the same sets and take turns in an order that changes; "nothing" is what the loop itself costs.

On a GPU a sample is the time of the kernels, which the GPU gets ahead of time, as in training. What the host takes to
start them is a figure of its own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.baselines.passes import COPY, PASSES, WIRES, Buffers, is_right
from benchmarks.harness.ahead import HostAhead
from benchmarks.harness.collect import Collected, collect
from benchmarks.harness.options import Device, check_file
from benchmarks.harness.progress import named, progress_bars
from benchmarks.harness.records import Record, RowFile, environment, quantiles
from benchmarks.harness.timing import rounds
from benchmarks.report.table import grouped_by, number, print_tables, spread
from benchmarks.units import parse_bytes
from fastsync.messages import check_at_least
from fastsync.ppo.stopwatch import Stopwatch

NOTHING = "nothing"
"""The method that does nothing: what is measured of it is the harness."""
LAUNCHES = {
    "cpu": "launches: operators that one call dispatches, nested ones included.",
    "cuda": "launches: kernels and copies that one call starts on the GPU, by torch.profiler.",
}
"""What is counted, by the device's type."""
LAUNCHES_AHEAD = 500
"""So many kernels at most are started ahead of a GPU, whose queue takes about a thousand."""
BYTES_IN_SETS = 256 << 20
MIN_SETS, MAX_SETS = 2, 64


@dataclass(frozen=True)
class Options:
    """Measure pack and unpack: GB/s against a copy of as many bytes in the same run, and what is launched."""

    sizes: tuple[str, ...] = ("18KiB", "1MiB", "4MiB", "25MiB", "256MiB")
    """Bytes of float32 gradients, such as 18KiB, 25MiB or 1GiB."""
    tensors: tuple[int, ...] = (1, 6, 160, 500)
    """Numbers of tensors that they are divided into, unevenly."""
    wires: tuple[Literal[tuple(WIRES)], ...] = tuple(WIRES)
    """What they are packed to; none is float32."""
    device: Device = "auto"
    """Where; auto takes the GPU if there is one."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    repetitions: int = 10
    """Samples of each method, each of them the mean over all input sets."""
    warmup: int = 2
    """Samples of each method that do not count."""
    seed: int = 0
    """Seeds the order of the methods, the gradients and where they are divided."""

    def __post_init__(self) -> None:
        check_at_least(self, repetitions=1, warmup=0)
        for name in ("sizes", "tensors", "wires"):
            if not getattr(self, name):
                raise ValueError(f"{name}: choose at least one")
        check_file("json", self.json)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: there is no GPU that torch can use; choose cpu")
        for size in self.sizes:
            nbytes = parse_bytes(size)
            if nbytes % 4 or not 1 <= max(self.tensors) <= nbytes // 4 or min(self.tensors) < 1:
                raise ValueError(f"sizes: {size} are not whole float32 values for {max(self.tensors)} tensors")

    @property
    def torch_device(self) -> torch.device:
        on_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if on_gpu else "cpu")


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0, 1 if a method gave a wrong result, 130 after Ctrl-C.
    """
    options = tyro.cli(Options, prog="python -m benchmarks ops", args=arguments)
    collected = collect(measure_all, 1, options, options.json)
    report(collected)
    return collected.status


def num_sets(nbytes: int) -> int:
    """Input sets: as many as make 256 MiB of gradients, between 2 and 64."""
    return max(MIN_SETS, min(MAX_SETS, BYTES_IN_SETS // nbytes))


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all combinations in this process. Returns notes."""
    torch.set_num_threads(1)  # as torchrun gives each rank
    device = options.torch_device
    cases = [(size, n, wire) for size in options.sizes for n in options.tensors for wire in options.wires]
    with progress_bars(shown=True) as progress:
        for size, num_tensors, wire in named(progress, cases, lambda case: "{} in {} tensors, wire {}".format(*case)):
            sets = _input_sets(parse_bytes(size), num_tensors, wire, device, options.seed)
            for name in PASSES:
                rows.add(measure(name, sets, _settings(size, num_tensors, wire, len(sets), options), device))
    return [LAUNCHES[device.type]]


def measure(
    name: str, sets: list[Buffers], settings: Mapping[str, Any], device: torch.device, ahead: HostAhead | None = None
) -> list[Record]:
    """Checks, counts and times all methods of the pass ``name``, one row for each.

    ``ahead`` is the clock; by default it follows from the device.
    """
    if ahead is None and device.type == "cuda":
        ahead = HostAhead()
    methods = PASSES[name]
    right = {method: is_right(name, methods[method], sets[0]) for method in methods}
    launches = {method: num_launches(partial(methods[method].run, sets[0]), device) for method in methods}
    timed: dict[str, Callable[[Buffers], object]] = {method: methods[method].run for method in methods if right[method]}
    timed[NOTHING] = lambda buffers: None
    samples: dict[str, list[float]] = {method: [] for method in timed}
    on_host: dict[str, list[float]] = {method: [] for method in timed}
    order = rounds(samples, settings["warmup"] + settings["repetitions"], settings["seed"])
    for turn, names in enumerate(order):
        for method in names:
            seconds, host = _time(timed[method], sets, device, launches.get(method, 0), ahead)
            if turn >= settings["warmup"]:
                samples[method].append(seconds)
                on_host[method].append(host)
    right = {method: right[method] and is_right(name, methods[method], sets[-1]) for method in methods}
    medians = {method: quantiles(values)["median"] for method, values in samples.items()}
    where = environment(device)
    return [
        Record(
            benchmark="ops",
            method=method,
            settings={**settings, "pass": name},
            figures={
                **figures(method, medians, sets[0].nbytes),
                "launches": launches[method],
                **({"host": quantiles(on_host.get(method, [])).get("median")} if ahead else {}),
            },
            correct=right[method],
            samples=samples.get(method, []),
            environment=where,
        )
        for method in methods
    ]


def figures(method: str, medians: Mapping[str, float], nbytes: int) -> dict[str, float | None]:
    """Bytes per second, that by the copy's, and the seconds of a call that are the loop's own, which stay in."""
    rate = nbytes / medians[method] if method in medians else None
    over_copy = medians[COPY] / medians[method] if {method, COPY} <= medians.keys() else None
    return {"bytes": nbytes, "rate": rate, "of_copy": over_copy, "harness": medians[NOTHING]}


def num_launches(run: Callable[[], object], device: torch.device) -> int:
    """Runs it once under the profiler, and waits for the device."""
    # torch 2.13's profiler writes to stderr, whenever it begins or ends, what is for tracing tools: lines of level 5.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    if on_gpu:  # collectives are annotated on the device as well, which starts nothing
        return sum(event.device_type == DeviceType.CUDA and not event.is_user_annotation for event in events)
    return sum(event.device_type == DeviceType.CPU and "::" in event.name for event in events)


def report(collected: Collected) -> None:
    """Prints a table for each size and direction."""
    of_pass = [record for name in PASSES for record in collected.records if record.settings["pass"] == name]
    groups = grouped_by(of_pass, lambda record: (record.settings["pass"], record.settings["size"]))
    knows_host = any(record.figures.get("host") is not None for record in of_pass)
    columns, legend = (COLUMNS | OF_HOST, f"{LEGEND} {LEGEND_OF_HOST}") if knows_host else (COLUMNS, LEGEND)
    print_tables(groups, _title, columns, (legend, *collected.notes))


LEGEND = (
    "µs: median [p10, p90] of a call. GB/s: bytes that the pass must read and write, by the median; of copy: that by "
    "the rate of a plain copy of as many bytes. harness: the loop's own time for each call, which is part of every "
    "other figure."
)
COLUMNS: dict[str, Callable[[Record], str]] = {
    "method": lambda record: record.method,
    "tensors": lambda record: str(record.settings["num_tensors"]),
    "wire": lambda record: record.settings["wire"],
    "µs": lambda record: spread(record.quantiles, lambda seconds: f"{seconds * 1e6:.1f}"),
    "GB/s": lambda record: number(record.figures["rate"], "#.3g", 1e9),
    "of copy": lambda record: number(record.figures["of_copy"], ".0%"),
    "launches": lambda record: str(record.figures["launches"]),
    "harness, µs": lambda record: number(record.figures["harness"], ".2f", 1e-6),
}

LEGEND_OF_HOST = "host: what the host takes to start a call, which is no part of µs."
OF_HOST: dict[str, Callable[[Record], str]] = {
    "host, µs": lambda record: number(record.figures.get("host"), ".1f", 1e-6)
}


def _settings(size: str, num_tensors: int, wire: str, sets: int, options: Options) -> dict[str, Any]:
    return {
        "size": size,
        "numel": parse_bytes(size) // 4,
        "num_tensors": num_tensors,
        "wire": wire,
        "input_sets": sets,
        "device": options.torch_device.type,
        **{name: getattr(options, name) for name in ("repetitions", "warmup", "seed")},
    }


def _input_sets(nbytes: int, num_tensors: int, wire: str, device: torch.device, seed: int) -> list[Buffers]:
    sets = [Buffers(nbytes // 4, num_tensors, WIRES[wire], device, seed + index) for index in range(num_sets(nbytes))]
    for buffers in sets:
        buffers.pack()  # something to unpack
    return sets


def _time(
    run: Callable[[Buffers], object],
    sets: list[Buffers],
    device: torch.device,
    num_launches: int,
    ahead: HostAhead | None,
) -> tuple[float, float]:
    """Seconds of a call on the device, and on the host, which are the same without ``ahead``."""
    if ahead is None:
        stopwatch = Stopwatch(device)
        with stopwatch:
            for buffers in sets:
                run(buffers)
        return stopwatch.seconds() / len(sets), stopwatch.seconds() / len(sets)
    at_once = max(1, LAUNCHES_AHEAD // max(1, num_launches))
    groups = [sets[i : i + at_once] for i in range(0, len(sets), at_once)]
    times = [ahead.time([partial(run, buffers) for buffers in group]) for group in groups]
    return sum(each.device for each in times) / len(sets), sum(each.host for each in times) / len(sets)


def _title(record: Record) -> str:
    settings, where = record.settings, record.environment
    return (
        f"{settings['pass']} {settings['size']} of float32 gradients, {settings['repetitions']} samples over "
        f"{settings['input_sets']} input sets\n"
        f"{where['gpu'] or where['cpu']}, {where['threads_per_rank']} thread, torch {where['torch']}, "
        f"fastsync {where['commit']}"
    )
