"""Options that the benchmarks of ranks on this machine share, and the checks that several commands share."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.progress import Progress

from benchmarks.baselines.methods import BY_DEFAULT, MIN_WARMUP
from benchmarks.harness.collect import Collected, collect
from benchmarks.harness.records import RowFile
from benchmarks.harness.timing import TIMEOUT, Sampling
from fastsync.doctor import num_usable_cores
from fastsync.messages import check_at_least

Device = Literal["auto", "cpu", "cuda"]
Methods = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="METHOD ...", help_behavior_hint="(such as ddp fastsync.attach/none fastsync.attach/int8+ef)"
    ),
]


@dataclass(frozen=True)
class RankOptions:
    """The options of a benchmark of ranks on this machine."""

    methods: Methods = BY_DEFAULT
    """Methods to synchronise. The step without synchronisation and the bare all_reduce of what they send are always
    measured as well. A name that is unknown gives the list of all."""
    nproc: int = 2
    """Number of ranks, each a process of its own on this machine."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    repetitions: int | None = None
    """Samples of each method."""
    device: Device = "auto"
    """What ranks compute on. auto: GPUs where there is one for each, or they may share."""
    warmup: int = 10
    """Steps of each method that are not timed."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores or GPUs; every table says so."""
    share_gpus: bool = False
    """Let ranks share GPUs where there are fewer, rather than compute on the CPU. They take turns there: it shows that
    everything works, and nothing of how it scales."""
    seed: int = 0
    """Seeds the order of the methods, the weights and the gradients."""
    timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""

    def __post_init__(self) -> None:
        check_at_least(self, nproc=1, repetitions=1)
        check_warmup(self.warmup)
        check_positive(self, "timeout")
        check_file("json", self.json)
        check_device(self.device, self.nproc, self.oversubscribe, self.share_gpus)

    def sampling(self, repetitions: int, device: torch.device, progress: Progress) -> Sampling:
        """The warm-up, repetitions and order of each method, with ``repetitions`` where none were chosen."""
        return Sampling(self.warmup, self.repetitions or repetitions, self.seed, self.timeout, device, progress)

    @property
    def crowded(self) -> bool:
        """True if there are more ranks than places for them."""
        return self.nproc > places(self.nproc, self.device == "cpu", self.share_gpus)


def run_on_ranks(
    command: str,
    options_type: type[RankOptions],
    measure_all: Callable[[Any, RowFile], list[str]],
    report: Callable[[Any, Collected], None],
    arguments: Sequence[str],
) -> int:
    """Parses the options of a command, measures on ranks, and reports.

    Returns:
        The exit status: 0; 1 if a method gave a wrong result or a rank failed; 130 after Ctrl-C.
    """
    options = tyro.cli(options_type, prog=f"python -m benchmarks {command}", args=arguments)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    collected = collect(measure_all, options.nproc, options, options.json)
    report(options, collected)
    return collected.status


def places(nproc: int, cpu: bool = False, share_gpus: bool = False) -> int:
    """Counts the ranks that find a place of their own on this machine where ``nproc`` are to run.

    GPUs if there is one for each or they may be shared, and cores otherwise, as
    ``fastsync.distributed.process_group`` chooses.
    """
    gpus = 0 if cpu else torch.cuda.device_count()
    return gpus if nproc <= gpus or (share_gpus and gpus) else num_usable_cores()


def check_device(device: Device, nproc: int, oversubscribe: bool, share_gpus: bool = False) -> None:
    """Refuses GPUs that are not there, and more ranks than find a place, unless they may share.

    Raises:
        ValueError: they would share, and may not, or there is no GPU to share.
    """
    gpus, cores, cpu = torch.cuda.device_count(), num_usable_cores(), device == "cpu"
    if share_gpus and (cpu or gpus == 0):
        raise ValueError("share_gpus: torch sees no GPU here, or may not take one: leave it out")
    if device == "cuda" and not share_gpus and nproc > gpus:
        raise ValueError(f"device=cuda: torch sees {gpus} GPUs, for {nproc} ranks")
    if nproc > places(nproc, cpu, share_gpus) and not (oversubscribe or share_gpus):
        raise ValueError(
            f"{nproc} ranks: this machine has {cores} cores, and GPUs for {gpus} ranks; ranks that share one slow each "
            "other down: choose fewer, or --oversubscribe, which every table then says"
        )


def check_names(option: str, chosen: Sequence[str], known: Iterable[str]) -> None:
    """Refuses names that are not known, and none at all."""
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    if not chosen:
        raise ValueError(f"{option}: choose at least one, such as ddp or fastsync.attach/fp16")


def check_positive(options: Any, *names: str) -> None:
    """Refuses numbers that are not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be more than 0")


def check_warmup(warmup: int) -> None:
    """Refuses fewer steps than the methods need to start up."""
    if warmup < MIN_WARMUP:
        raise ValueError(f"warmup={warmup} must be at least {MIN_WARMUP}: DDP and PowerSGD start up that long")


def check_file(option: str, path: Path | None) -> None:
    """Refuses a file of a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option}={path}: there is no folder {path.parent}")
