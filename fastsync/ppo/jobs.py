"""``fastsync launch``: writes files with which Slurm, Kubernetes and SkyPilot start the trainer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._checks import did_you_mean
from ..launch.jobs import RUNS, BatchJob, Task, TrainJob, job_file
from .cli import Arguments, option_words, parse


@dataclass(frozen=True)
class Training(Arguments):
    """The settings of the training. A file of settings is read now, so later changes to it have no effect."""

    def __post_init__(self) -> None:
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: jobs always use resume=auto; set run_name instead")
        super().__post_init__()  # type: ignore[misc]


@dataclass(frozen=True)
class Slurm(Training, BatchJob):
    """Write a batch script that trains under Slurm. Shortly before its time limit the job saves and requeues itself."""


@dataclass(frozen=True)
class Kubernetes(Training, TrainJob):
    """Write a TrainJob of Kubeflow Trainer that trains on Kubernetes."""


@dataclass(frozen=True)
class SkyPilot(Training, Task):
    """Write a SkyPilot task that trains on machines of a cloud or of Kubernetes."""


Job = Slurm | Kubernetes | SkyPilot
KINDS: dict[str, type[Job]] = {"slurm": Slurm, "kubernetes": Kubernetes, "skypilot": SkyPilot}
"""The subcommands of ``fastsync launch``."""


def main(arguments: Sequence[str]) -> int:
    """Writes the file that a command line asks for, and returns the exit status.

    Raises:
        ValueError: there is no such subcommand, the file exists already, or a setting does not suit.
    """
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: fastsync launch {{{','.join(KINDS)}}} ...", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, *options = arguments
    if name not in KINDS:
        raise ValueError(f"{name!r} is not one of {', '.join(KINDS)}{did_you_mean(name, KINDS)}")
    job = parse(KINDS[name], f"fastsync launch {name}", options)
    text, submit = write(job)
    try:
        with Path(job.file).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"file={job.file!r} exists already; remove it or choose another name") from None
    print(f"wrote {job.file}. Submit it with: {submit} {shlex.quote(job.file)}")
    return 0


def write(job: Job) -> tuple[str, str]:
    """Returns the file's content, and the command that submits it.

    Under Slurm a launcher on each machine starts the ranks there. Kubernetes and SkyPilot use torchrun.
    """
    settings = job.settings
    if isinstance(job, Slurm):
        # A requeued job keeps its number, so it finds its run.
        named = [] if settings.run_name else ["--run-name", "$SLURM_JOB_NAME-$SLURM_JOB_ID"]
        words = ["fastsync", "train", *option_words(settings, "resume"), *named, "--resume", "auto"]
        words += ["--nproc", str(job.nproc), "--nnodes", str(job.nodes), "--node-rank", "$SLURM_NODEID"]
        words += ["--master-addr", "$master_addr", "--master-port", "$master_port"]
        return job_file(job, [*words, "--max-restarts", str(job.max_restarts)]), "sbatch"
    settings = replace(settings, run_name=settings.run_name or job.name)
    if isinstance(job, Kubernetes) and job.claim is not None:
        settings = replace(settings, runs_dir=RUNS)
    words = ["-m", "fastsync.train", *option_words(settings, "resume"), "--resume", "auto"]
    return job_file(job, words), "sky launch" if isinstance(job, SkyPilot) else "kubectl apply -f"
