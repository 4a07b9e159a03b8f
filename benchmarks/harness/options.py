"""Options that the benchmarks of ranks on this machine share, and the checks that several commands share."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.progress import Progress

from benchmarks.baselines.ways import BY_DEFAULT, MIN_WARMUP
from benchmarks.harness.collect import Collected, collect
from benchmarks.harness.records import RowFile
from benchmarks.harness.timing import TIMEOUT, Sampling
from fastsync import _C
from fastsync.wording import check_at_least

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class RankOptions:
    """The options of a benchmark of ranks on this machine."""

    nproc: int = 2
    """Number of ranks, each a process of its own on this machine."""
    device: Device = "auto"
    """What ranks compute on. auto: GPUs where there is one for each, or they may share."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores or GPUs; every table says so."""
    share_gpus: bool = False
    """Let ranks share GPUs where there are fewer, rather than compute on the CPU. They take turns there: it shows that
    everything works, and nothing of how it scales."""
    ways: tuple[str, ...] = BY_DEFAULT
    """Ways to synchronise."""
    repetitions: int | None = None
    """Samples of each way."""
    warmup: int = 10
    """Steps of each way that are not timed."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    seed: int = 0
    """Seeds the order of the ways, the weights and the gradients."""
    timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""

    def __post_init__(self) -> None:
        if not self.ways:
            raise ValueError("ways: choose at least one, such as ddp or fastsync.attach/fp16")
        check_at_least(self, nproc=1, repetitions=1)
        check_warmup(self.warmup)
        check_positive(self, "timeout")
        check_json(self.json)
        if self.device == "cuda" and not self.share_gpus:
            check_gpus(self.nproc)
        check_places(self.nproc, self.oversubscribe, self.cpu, self.share_gpus)

    def sampling(self, repetitions: int, device: torch.device, progress: Progress) -> Sampling:
        """The warm-up, repetitions and order of each way, with ``repetitions`` where none were chosen."""
        return Sampling(self.warmup, self.repetitions or repetitions, self.seed, self.timeout, device, progress)

    @property
    def cpu(self) -> bool:
        """True if ranks compute on CPUs where there are GPUs, too."""
        return self.device == "cpu"

    @property
    def crowded(self) -> bool:
        """True if there are more ranks than places for them."""
        return self.nproc > places(self.nproc, self.cpu, self.share_gpus)


def run_on_ranks(
    command: str,
    options_type: type[RankOptions],
    measure_all: Callable[[Any, RowFile], list[str]],
    report: Callable[[Any, Collected], None],
    arguments: Sequence[str],
) -> int:
    """Parses the options of a command, measures on ranks, and reports.

    Returns:
        The exit status: 0; 1 if a way gave a wrong result or a rank failed; 130 after Ctrl-C.
    """
    options = tyro.cli(options_type, prog=f"python -m benchmarks {command}", args=arguments)
    if options.cpu:
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
    return gpus if nproc <= gpus or (share_gpus and gpus) else _C.num_usable_cores()


def check_places(nproc: int, oversubscribe: bool, cpu: bool = False, share_gpus: bool = False) -> None:
    """Refuses more ranks than find a place, unless they may share.

    Raises:
        ValueError: they would share, and may not, or there is no GPU to share.
    """
    if share_gpus and (cpu or torch.cuda.device_count() == 0):
        raise ValueError("share_gpus: torch sees no GPU here, or may not take one: leave it out")
    if nproc > places(nproc, cpu, share_gpus) and not (oversubscribe or share_gpus):
        cores, gpus = _C.num_usable_cores(), torch.cuda.device_count()
        raise ValueError(
            f"nproc={nproc}: this machine has {cores} cores, and GPUs for {gpus} ranks; "
            "ranks that share one slow each other down: choose fewer, or --oversubscribe, which every table then says"
        )


def check_gpus(nproc: int) -> None:
    """Refuses more ranks than torch sees GPUs."""
    if nproc > torch.cuda.device_count():
        raise ValueError(f"device=cuda: torch sees {torch.cuda.device_count()} GPUs, for {nproc} ranks")


def check_positive(options: Any, *names: str, unit: str = " seconds") -> None:
    """Refuses numbers that are not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be more than 0{unit}")


def check_warmup(warmup: int) -> None:
    """Refuses fewer steps than the ways need to start up."""
    if warmup < MIN_WARMUP:
        raise ValueError(f"warmup={warmup} must be at least {MIN_WARMUP}: DDP and PowerSGD start up that long")


def check_json(path: Path | None) -> None:
    """Refuses a file of a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"json={path}: there is no folder {path.parent}")
