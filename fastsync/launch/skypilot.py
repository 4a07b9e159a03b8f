"""Tasks for SkyPilot: torchrun on each node of a cluster that SkyPilot finds and sets up."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fastsync._checks import check_at_least


@dataclass(frozen=True)
class Task:
    """The request to SkyPilot."""

    file: str = "sky.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the task, and of the run's folder."""
    nodes: int = 1
    """Machines."""
    nproc: int = 1
    """Ranks on each machine, as many as it has GPUs."""
    accelerators: str | None = None
    """GPUs of each machine, such as H100:8."""
    cpus: str | None = None
    """Cores of each machine, such as 16, or 16+ for at least so many."""
    infra: str | None = None
    """Where to look, such as aws, gcp/us-central1 or kubernetes. By default everywhere."""
    workdir: str | None = None
    """Folder to copy to the machines, in which setup and training run."""
    setup: str | None = None
    """Shell commands that install fastsync-torch with the extra train."""
    master_port: int = 29500
    """A port that is free on the first machine."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1)


def task_file(task: Task, command: Sequence[str]) -> str:
    """Makes the file.

    Args:
        task: what to ask for.
        command: what torchrun runs on each rank, such as ``-m fastsync.train``.
    """
    resources = {"infra": task.infra, "accelerators": task.accelerators, "cpus": task.cpus}
    head: dict[str, Any] = {"name": task.name, "num_nodes": task.nodes}
    if task.workdir is not None:
        head["workdir"] = task.workdir
    if any(resources.values()):
        head["resources"] = {name: value for name, value in resources.items() if value is not None}
    run = _RUN.format(nproc=task.nproc, port=task.master_port, command=shlex.join(command))
    parts = [yaml.safe_dump(head, sort_keys=False)]
    if task.setup is not None:
        parts.append(_block("setup", task.setup))
    return "\n".join([*parts, _block("run", run)])


_RUN = """\
master_addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" --nproc-per-node={nproc} \\
  --master-addr="$master_addr" --master-port={port} {command}
"""


def _block(name: str, commands: str) -> str:
    """A YAML text that keeps its lines."""
    return f"{name}: |\n{textwrap.indent(commands.strip(), '  ')}\n"
