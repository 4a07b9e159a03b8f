"""``fastsync launch``: files by which Slurm, Kubernetes and SkyPilot start the trainer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._checks import did_you_mean
from ..launch.jobs import RUNS, BatchJob, Task, TrainJob, job_file
from .cli import option_words, parse
from .ppo import Settings


@dataclass(frozen=True)
class Training:
    """What the job is to train."""

    config: str | None = None
    """A YAML file of settings, or the name of a preset. What else is typed wins over it. It is read now, so later
    changes do not count."""
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: the job always goes on with resume=auto; set run_name")


@dataclass(frozen=True)
class Slurm(Training, BatchJob):
    """Write a batch script that trains under Slurm. Before its time is up the job saves, and queues itself again."""

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        BatchJob.__post_init__(self)


@dataclass(frozen=True)
class Kubernetes(Training, TrainJob):
    """Write a TrainJob of Kubeflow Trainer that trains on Kubernetes."""

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        TrainJob.__post_init__(self)


@dataclass(frozen=True)
class SkyPilot(Training, Task):
    """Write a task of SkyPilot that trains on machines of a cloud or of Kubernetes."""

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        Task.__post_init__(self)


Job = Slurm | Kubernetes | SkyPilot
KINDS: dict[str, type[Job]] = {"slurm": Slurm, "kubernetes": Kubernetes, "skypilot": SkyPilot}
"""What ``fastsync launch`` writes files for."""


def main(arguments: Sequence[str]) -> int:
    """Writes the file that a command line asks for, and returns the exit status.

    Raises:
        ValueError: nobody is there to launch it, the file exists already, or something has to be said.
    """
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: fastsync launch {{{','.join(KINDS)}}} ...", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, *options = arguments
    if name not in KINDS:
        raise ValueError(f"{name!r} is none of {', '.join(KINDS)}{did_you_mean(name, KINDS)}")
    job = parse(KINDS[name], f"fastsync launch {name}", options)
    text, submit = write(job)
    try:
        with Path(job.file).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"file={job.file!r} exists already; remove it or choose another name") from None
    print(f"{job.file} is written. Submit it with: {submit} {shlex.quote(job.file)}")
    return 0


def write(job: Job) -> tuple[str, str]:
    """Makes the file's content, and the command that submits it."""
    if isinstance(job, Slurm):
        return slurm_script(job), "sbatch"
    settings = replace(job.settings, run_name=job.settings.run_name or job.name)
    if isinstance(job, SkyPilot):
        return job_file(job, _rank_words(settings)), "sky launch"
    if job.claim is not None:
        settings = replace(settings, runs_dir=RUNS)
    return job_file(job, _rank_words(settings)), "kubectl apply -f"


def slurm_script(job: Slurm) -> str:
    """Makes the script. Each machine gets one launcher, which starts the ranks there."""
    # The number of a job stays when it is queued again, so that it finds its run.
    named = [] if job.settings.run_name else ["--run-name", "$SLURM_JOB_NAME-$SLURM_JOB_ID"]
    words = ["fastsync", "train", *settings_words(job.settings), *named, "--resume", "auto"]
    words += ["--nproc", str(job.nproc), "--nnodes", str(job.nodes), "--node-rank", "$SLURM_NODEID"]
    words += ["--master-addr", "$master_addr", "--master-port", "$master_port"]
    return job_file(job, [*words, "--max-restarts", str(job.max_restarts)])


def _rank_words(settings: Settings) -> list[str]:
    """What torchrun runs on each rank."""
    return ["-m", "fastsync.train", *settings_words(settings), "--resume", "auto"]


def settings_words(settings: Settings) -> list[str]:
    """Words of a command line that gives these settings, without what a batch script decides."""
    return option_words(settings, "resume")
