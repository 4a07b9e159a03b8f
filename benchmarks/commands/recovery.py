"""``python -m benchmarks recovery``: from the death of a rank to the next finished step, and what that step has cost.

A sample is one training. Its ranks take steps until one of them, drawn at random, is ended by ``kill -9`` from outside
at a random moment. The ranks write the time of each step to files. The methods take turns.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
import tyro

from benchmarks.baselines.recovering import Settings, words
from benchmarks.harness.collect import TrainingError, collect, termination_raises
from benchmarks.harness.diaries import Author, Diaries, Recovery, recovery
from benchmarks.harness.kills import Command, kill, seconds_until_known, training
from benchmarks.harness.options import check_device, check_file, check_names, check_positive, places
from benchmarks.harness.progress import announce, named, progress_bars
from benchmarks.harness.records import Record, RowFile, environment
from benchmarks.network.launch import BAD_OPTIONS, MASTER_PORT
from benchmarks.network.namespaces import Network, NetworkError, why_not
from benchmarks.report.recovery import draw, print_report
from benchmarks.report.table import OVERSUBSCRIBED
from benchmarks.units import RATES
from fastsync.messages import check_at_least

ELASTIC, RESTART, TORCHFT, QUICK_TORCHFT = "fastsync.Elastic", "torchrun", "torchft", "torchft/short"
LIMIT = "limit: the connection ends"
LIGHTHOUSES = {
    TORCHFT: {"quorum_tick_ms": 100, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 5000},
    QUICK_TORCHFT: {"quorum_tick_ms": 100, "join_timeout_ms": 100, "heartbeat_timeout_ms": 100},
}
"""How long torchft waits for ranks: as its README has it, and the shortest times of its own tests."""
WARMUP_STEPS = 30
LONGEST_WAIT = 0.5
"""Seconds within which a rank dies after these steps."""
PICTURE_KILLS, PICTURE_SECONDS = (5.0, 20.0, 35.0), 50.0


@dataclass(frozen=True)
class Options:
    """Measure how long a training takes to go on after a rank was killed, and which steps that costs."""

    methods: tuple[str, ...] = (ELASTIC, RESTART, TORCHFT, QUICK_TORCHFT)
    """What to compare. How soon another process can know of a death is always measured."""
    repetitions: int = 20
    """Kills for each method, each in a training of its own."""
    nproc: int = 3
    """Number of ranks before the kill, each a process of its own."""
    numel: int = 500_000
    """Parameters of the model, about."""
    checkpoint_every: int = 1
    """Steps between two checkpoints of the training that torchrun starts again. 1 loses the fewest steps."""
    hosts: Literal[1, 2] = 1
    """2: ranks on two simulated hosts, with links of 1 Gbit/s. Only for fastsync, and for root."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    picture: Path | None = None
    """PNG to draw instead: the loss over time with three kills, of fastsync and of torchrun's restarts."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores; every table says so."""
    seed: int = 0
    """Seeds the moments and the victims."""
    timeout: float = 120.0
    """Seconds that a training may take to start, and then to recover."""

    def __post_init__(self) -> None:
        check_at_least(self, repetitions=1, numel=1, checkpoint_every=1)
        check_positive(self, "timeout")
        check_names("methods", self.methods, METHODS)
        for option in ("json", "picture"):
            check_file(option, getattr(self, option))
        if self.picture is not None and self.picture.suffix != ".png":
            raise ValueError(f"picture={self.picture} must be the name of a file that ends in .png")
        if self.picture is not None and self.hosts > 1:
            raise ValueError("picture: it shows ranks of one host; leave out --hosts")
        if self.nproc < 2:
            raise ValueError(f"nproc={self.nproc} must be at least 2: somebody has to be left")
        if self.hosts > 1 and set(self.methods) != {ELASTIC}:
            raise ValueError(f"hosts={self.hosts} is for fastsync alone: add --methods {ELASTIC}")
        check_device("cpu", self.nproc, self.oversubscribe)


@dataclass(frozen=True)
class Started:
    """What a method needs to start its ranks."""

    options: Options
    settings: Settings
    folder: Path
    lighthouse: str = ""
    keepers: Sequence[int] = ()
    """Processes in the namespaces of the hosts, if there are several."""
    replaces: bool = False

    def words(self, method: str, **changes: Any) -> list[str]:
        return words(method, self.folder, Settings(**asdict(self.settings) | changes))


@dataclass(frozen=True)
class Method:
    commands: Callable[[Started], list[Command]]
    restarts: bool = False
    """Whether all ranks are started again, rather than go on."""
    module: str | None = None

    def python(self) -> str | None:
        """The interpreter that has its module, as `make baselines` installs it; None where it is not installed."""
        if self.module is None or find_spec(self.module):
            return sys.executable
        own = Path(sys.prefix) / f"with-{self.module}" / "bin" / "python"
        return str(own) if own.exists() else None


def _elastic(given: Started) -> list[Command]:
    ranks = given.options.nproc
    if not given.keepers:
        launcher = [sys.executable, "-m", "fastsync.cli", "launch", "local", "-n", str(ranks)]
        return [Command([*launcher, *["--replace"] * given.replaces, "--", *given.words("elastic")], {})]
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(MASTER_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
    place["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # these addresses have no host names
    rank_words = [sys.executable, *given.words("elastic", store=str(given.folder / "store"))]
    return [
        Command(
            ["nsenter", f"--target={given.keepers[rank % len(given.keepers)]}", "--net", *rank_words],
            place | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"},
        )
        for rank in range(ranks)
    ]


def _restart(given: Started) -> list[Command]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    return [Command([*launcher, f"--nproc-per-node={given.options.nproc}", *given.words("restart")], {})]


def _torchft(given: Started) -> list[Command]:
    python = METHODS[TORCHFT].python() or sys.executable
    return [
        Command(
            [python, *given.words("torchft")],
            {"RANK": str(rank), "WORLD_SIZE": str(given.options.nproc), "RUST_LOG": "warn"},
        )
        for rank in range(given.options.nproc)
    ]


METHODS = {
    ELASTIC: Method(_elastic),
    RESTART: Method(_restart, restarts=True),
    TORCHFT: Method(_torchft, module="torchft"),
    QUICK_TORCHFT: Method(_torchft, module="torchft"),
}


def main(arguments: Sequence[str]) -> int:
    """Measures and reports, or draws.

    Returns:
        The exit status: 0; 1 if a result is wrong or a training failed; 2 if this machine has no namespaces; 130 after
        Ctrl-C, 143 after SIGTERM.
    """
    options = tyro.cli(Options, prog="python -m benchmarks recovery", args=arguments)
    work = measure_all if options.picture is None else picture
    with termination_raises():
        try:
            if options.hosts > 1 and (reason := why_not()):
                raise NetworkError(reason)
            collected = collect(work, 1, options, options.json, lambda work, _, *given: [work(*given)])
        except NetworkError as error:
            print(f"python -m benchmarks recovery: {error}", file=sys.stderr)
            return BAD_OPTIONS
    print_report(collected)
    return collected.status


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Kills ranks of all methods, in turns. After each kill the rows have it. Returns notes."""
    notes = list[str]()
    names = [name for name in options.methods if METHODS[name].python()]
    if left_out := [name for name in options.methods if name not in names]:
        notes.append(f"{' and '.join(left_out)}: left out, because torchft is not installed: `make baselines` does it")
    chance, where = random.Random(options.seed), environment(torch.device("cpu")) | {"threads_per_rank": 1}
    found: dict[str, list[Recovery]] = {name: [] for name in names}
    announce(f"limit: {options.repetitions} kills of bare processes")
    known = [seconds_until_known(chance) for _ in range(options.repetitions)]
    turns = [(name, number) for number in range(options.repetitions) for name in names]
    with progress_bars(shown=True) as progress:
        for name, _ in named(progress, turns, lambda turn: f"{turn[0]}, kill {turn[1] + 1}"):
            found[name].append(measure(name, options, chance))
            measured = [record_of(each, found[each], options, where) for each in names if found[each]]
            rows.replace([*measured, limit_record(known, options, where)])
    return notes


def measure(name: str, options: Options, chance: random.Random) -> Recovery:
    """Starts a training, kills one of its ranks, and waits until the others have recovered.

    Raises:
        TrainingError: it has not started, or not recovered, within ``options.timeout``.
    """
    method = METHODS[name]
    with running(name, options, 2 * options.timeout + LONGEST_WAIT) as process:
        authors = process.wait_for(
            lambda diaries: have_warmed_up(diaries, options.nproc), "the first step", time.monotonic() + options.timeout
        )
        victim = chance.choice(authors)
        time.sleep(chance.uniform(0, LONGEST_WAIT))
        death = kill(process, victim)
        return process.wait_for(
            lambda diaries: recovery(diaries, death, options.nproc, method.restarts),
            "the next step after the kill",
            time.monotonic() + options.timeout,
        )


@contextmanager
def running(name: str, options: Options, seconds: float, replaces: bool = False) -> Iterator[Any]:
    """The ranks of a method, for the time of a ``with`` block."""
    settings = Settings(options.numel, seconds, options.checkpoint_every)
    network = Network(options.hosts, RATES["gbit"]) if options.hosts > 1 else nullcontext()
    torchft_agrees = lighthouse(name) if name in LIGHTHOUSES else nullcontext("")
    with tempfile.TemporaryDirectory() as folder, network as hosts, torchft_agrees as address:
        told = Settings(**asdict(settings) | {"lighthouse": address})
        given = Started(options, told, Path(folder), address, hosts.keepers if hosts else (), replaces)
        with training(name, Path(folder), METHODS[name].commands(given)) as process:
            yield process


@contextmanager
def lighthouse(name: str) -> Iterator[str]:
    """What torchft's replicas agree by, in a process of its own. Yields its address."""
    python = METHODS[name].python() or sys.executable
    command = [python, *words("lighthouse", Path(), Settings(0, 0))[:-2], "", json.dumps(LIGHTHOUSES[name])]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            if not (address := process.stdout.readline().strip()):
                raise TrainingError("torchft: its lighthouse has not started")
            yield address
        finally:
            process.terminate()


def have_warmed_up(diaries: Diaries, nproc: int) -> list[Author] | None:
    """All ranks, once each has taken enough steps with all others."""
    ready = [author for author, events in diaries.items() if sum(e.ranks == nproc for e in events) >= WARMUP_STEPS]
    return sorted(ready) if len(ready) == nproc else None


def record_of(name: str, found: Sequence[Recovery], options: Options, where: dict[str, Any]) -> Record:
    """The row of a method."""
    settings = settings_of(options)
    if METHODS[name].restarts:
        settings["checkpoint_every"] = options.checkpoint_every
    settings |= LIGHTHOUSES.get(name, {})
    return Record(
        benchmark="recovery",
        method=name,
        settings=settings,
        figures={
            "repeated": fmean(each.repeated for each in found),
            "dropped": fmean(each.dropped for each in found),
            "step": median(each.step for each in found),
        },
        correct=all(each.correct for each in found),
        samples=[each.seconds for each in found],
        environment=where | ({"torchft": torchft_version(name)} if METHODS[name].module else {}),
    )


def torchft_version(name: str) -> str:
    command = [METHODS[name].python() or sys.executable, "-c", "from importlib import metadata as m"]
    command[-1] += "; print(m.version('torchft'))"
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def limit_record(known: Sequence[float], options: Options, where: dict[str, Any]) -> Record:
    """The row of the limit: nobody can go on before."""
    figures = dict.fromkeys(("repeated", "dropped", "step"))
    return Record("recovery", LIMIT, settings_of(options), figures, True, known, where)


def settings_of(options: Options) -> dict[str, Any]:
    crowded = {OVERSUBSCRIBED: True} if options.nproc > places(options.nproc, cpu=True) else {}
    return {
        "world_size": options.nproc,
        "hosts": options.hosts,
        "backend": "gloo",
        "numel": options.numel,
        "seed": options.seed,
        **crowded,
    }


def picture(options: Options, rows: RowFile) -> list[str]:
    """Draws the loss over time with three kills at the same moments. Returns notes."""
    assert options.picture is not None
    del rows
    curves = {}
    for name in (ELASTIC, RESTART):
        announce(f"{name}: a training of {PICTURE_SECONDS:g} s with {len(PICTURE_KILLS)} kills")
        curves[name] = curve(name, options)
    draw(curves, PICTURE_KILLS, options.checkpoint_every, options.picture)
    return [f"Picture: {options.picture}"]


def curve(name: str, options: Options) -> Diaries:
    """The diaries of a training whose ranks are killed, with times since all have warmed up."""
    chance = random.Random(options.seed)
    with running(name, options, options.timeout + PICTURE_SECONDS, replaces=True) as process:
        process.wait_for(
            lambda diaries: have_warmed_up(diaries, options.nproc), "the first step", time.monotonic() + options.timeout
        )
        began = time.monotonic()
        for moment in PICTURE_KILLS:
            time.sleep(max(0.0, began + moment - time.monotonic()))
            kill(process, chance.choice(at_work(process.diaries())))
        time.sleep(max(0.0, began + PICTURE_SECONDS - time.monotonic()))
        return {
            author: [event._replace(time=event.time - began) for event in events]
            for author, events in process.diaries().items()
        }


def at_work(diaries: Diaries) -> list[Author]:
    """The processes that have ended a step within the last second, or the newest that have."""
    newest = {author: events[-1].time for author, events in diaries.items() if events}
    return sorted(author for author, moment in newest.items() if moment > max(newest.values()) - 1)
