"""``fastsync slurm``: a batch script that trains under Slurm, and goes on after its time limit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fastsync.command_line import parse
from fastsync.ppo.config import Settings

_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Slurm:
    """Write a batch script that trains under Slurm. Before its time is up the job saves, and queues itself again."""

    script: str = "train.sbatch"
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
    config: str | None = None
    """A YAML file of settings, or the name of a preset. What else is typed wins over it. It is read now, so later
    changes do not count."""
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("nproc", 1), ("stop_before", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("gpus_per_node", "cpus_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time={self.time!r} is no time limit; write it as 1-12:00:00, 12:00:00 or 90")
        for name in ("job_name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value.replace(",", "")):
                raise ValueError(f"{name}={value!r} may hold letters, digits, '.', '_' and '-' only")
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: the job always goes on with resume=auto; set run_name")


def main(arguments: Sequence[str]) -> int:
    """Writes the script that a command line asks for, and returns the exit status.

    Raises:
        ValueError: the file exists already.
    """
    options = parse(Slurm, "fastsync slurm", arguments)
    try:
        with Path(options.script).open("x") as file:
            file.write(batch_script(options))
    except FileExistsError:
        raise ValueError(f"script={options.script!r} exists already; remove it or choose another name") from None
    print(f"{options.script} is written. Submit it with: sbatch {shlex.quote(options.script)}")
    return 0


def batch_script(options: Slurm) -> str:
    """The script. Each machine gets one launcher, which starts the ranks there."""
    directives = {
        "job-name": options.job_name,
        "output": "%x-%j.out",
        "open-mode": "append",
        "time": options.time,
        "signal": f"B:USR1@{options.stop_before}",
        "partition": options.partition,
        "account": options.account,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": options.cpus_per_node,
        "gpus-per-node": options.gpus_per_node,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    # The number of a job stays when it is queued again, so that it finds its run.
    train = ["fastsync", "train", *settings_words(options.settings)]
    if options.settings.run_name is None:
        train += ["--run-name", "$SLURM_JOB_NAME-$SLURM_JOB_ID"]
    train += ["--resume", "auto", "--nproc", str(options.nproc), "--nnodes", str(options.nodes)]
    train += ["--node-rank", "$SLURM_NODEID", "--master-addr", "$master_addr", "--master-port", "$master_port"]
    train += ["--max-restarts", str(options.max_restarts)]
    command = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in train)
    return _SCRIPT.format(
        directives="\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue"]),
        setup=f"{options.setup}\n\n" if options.setup else "",
        command=shlex.quote(f"exec {command}"),
    )


def settings_words(settings: Settings) -> list[str]:
    """The command line that gives these settings, without what the script decides."""
    words = []
    for setting in fields(Settings):
        name, value = setting.name.replace("_", "-"), getattr(settings, setting.name)
        if value == setting.default or setting.name == "resume":
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


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
