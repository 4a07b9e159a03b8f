"""``fastsync launch``: files by which Slurm, Kubernetes and SkyPilot start the trainer."""

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
    """What the job is to train. A file of settings is read now, so later changes do not count."""

    def __post_init__(self) -> None:
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: the job always goes on with resume=auto; set run_name")
        super().__post_init__()  # type: ignore[misc]


@dataclass(frozen=True)
class Slurm(Training, BatchJob):
    """Write a batch script that trains under Slurm. Before its time is up the job saves, and queues itself again."""


@dataclass(frozen=True)
class Kubernetes(Training, TrainJob):
    """Write a TrainJob of Kubeflow Trainer that trains on Kubernetes."""


@dataclass(frozen=True)
class SkyPilot(Training, Task):
    """Write a task of SkyPilot that trains on machines of a cloud or of Kubernetes."""


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
    """Makes the file's content, and the command that submits it.

    Slurm starts a launcher on each machine, which starts the ranks there; the others have torchrun do both.
    """
    settings = job.settings
    if isinstance(job, Slurm):
        # The number of a job stays when it is queued again, so that it finds its run.
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
