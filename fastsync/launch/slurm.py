"""Batch scripts for Slurm: a command on each machine, which saves before the time limit and goes on after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fastsync._checks import check_at_least

_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class BatchJob:
    """The request to Slurm. Before its time is up the job is told to save, and queues itself again."""

    file: str = "train.sbatch"
    """File to write. It must not exist yet."""
    nodes: int = 1
    """Machines."""
    nproc: int = 1
    """Ranks on each machine, as many as it has GPUs."""
    time: str = "24:00:00"
    """Time limit: minutes, hours:minutes:seconds, or days-hours:minutes:seconds."""
    stop_before: int = 120
    """Seconds before the time limit at which ranks are told to save: longer than an update and a checkpoint take."""
    partition: str | None = None
    """Partition, where there is no default or another is wanted."""
    account: str | None = None
    """Account that the time is charged to."""
    gpus_per_node: int | None = None
    """GPUs to ask for on each machine."""
    cpus_per_node: int | None = None
    """Cores to ask for on each machine."""
    job_name: str = "fastsync"
    """Name of the job, its output file and, with its number, of the run's folder."""
    setup: str | None = None
    """Shell commands to begin with, such as "source venv/bin/activate"."""
    max_restarts: int = 0
    """How often the job comes back from its last checkpoint when a rank is lost."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1, stop_before=1, max_restarts=0, gpus_per_node=1, cpus_per_node=1)
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time={self.time!r} is no time limit; write it as 1-12:00:00, 12:00:00 or 90")
        if 0 < _seconds(self.time) <= self.stop_before:
            raise ValueError(
                f"stop_before={self.stop_before} seconds leave nothing of time={self.time!r}, so that the job would go "
                "back into the queue again and again; ask for more time, or stop later"
            )
        for name in ("job_name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value.replace(",", "")):
                raise ValueError(f"{name}={value!r} may hold letters, digits, '.', '_' and '-' only")


def _seconds(time: str) -> int:
    """How long Slurm takes a time limit to be: minutes and seconds come first, after days hours; 0 is no limit."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def batch_script(job: BatchJob, command: Sequence[str]) -> str:
    """Makes the script, which runs the command once on each machine.

    Args:
        job: what to ask for.
        command: its words. One that begins with ``$`` is for the shell on the machine, which knows Slurm's variables,
            ``$master_addr`` and ``$master_port``: where machine 0 is, and a port that no other job takes there.
    """
    directives = {
        "job-name": job.job_name,
        "output": "%x-%j.out",
        "open-mode": "append",
        "time": job.time,
        "signal": f"B:USR1@{job.stop_before}",
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus_per_node,
        "gpus-per-node": job.gpus_per_node,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    words = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)
    return _SCRIPT.format(
        directives="\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue"]),
        setup=f"{job.setup}\n\n" if job.setup else "",
        command=shlex.quote(f"exec {words}"),
    )


_SCRIPT = """\
{directives}

{setup}# Ranks that are told to end save first. Slurm lets this script know before the time is up: it passes that on and
# waits for them. Unless they were done, it puts the job into the queue again, where it goes on from the checkpoint.
end_ranks() {{
    trap '' USR1 TERM
    # Not SIGTERM: srun does not pass it on, but kills its tasks.
    kill -USR1 "$step" 2>/dev/null
    wait "$step"
    status=$?
}}
save_and_requeue() {{
    echo "$(date): the time is nearly up; ranks are told to save"
    end_ranks
    if [ "$status" -ne 0 ]; then
        echo "$(date): the job goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}}
save_and_exit() {{
    end_ranks
    exit "$status"
}}

# Machine 0, where the others find each other, and a port that other jobs there do not use.
master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
master_port=$((20000 + SLURM_JOB_ID % 20000))
export master_addr master_port

srun --kill-on-bad-exit=0 bash -c {command} &
step=$!
trap save_and_requeue USR1
trap save_and_exit TERM
wait "$step"
"""
