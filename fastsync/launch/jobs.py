"""Files by which Slurm, Kubernetes and SkyPilot start torchrun: templates beside this module, and what fills them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from .._checks import check_at_least

RUNS = "/runs"
"""Where a pod mounts the claim."""


@dataclass(frozen=True)
class BatchJob:
    """The request to Slurm. Before its time is up the job is told to save, and queues itself again."""

    template: ClassVar[str] = "slurm.sbatch"

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

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """What the template's places are filled with."""
        # A word that begins with $ is for the shell on the machine, which knows Slurm's variables.
        words = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)
        return {**vars(self), "command": shlex.quote(f"exec {words}")}


@dataclass(frozen=True)
class TrainJob:
    """The request to Kubeflow Trainer, version 2.2 or newer."""

    template: ClassVar[str] = "kubernetes.yaml"

    image: str | None = None
    """Container image that has fastsync-torch with the extra train. It must be said."""
    file: str = "trainjob.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the job, and of the run's folder."""
    namespace: str | None = None
    """Namespace, where it is not the default."""
    runtime: str = "torch-distributed"
    """The cluster's training runtime."""
    nodes: int = 1
    """Pods."""
    nproc: int = 1
    """Ranks in each pod, as many as it has GPUs."""
    gpus_per_node: int | None = None
    """GPUs of NVIDIA for each pod."""
    cpus_per_node: int | None = None
    """Cores for each pod."""
    memory: str | None = None
    """Memory for each pod, such as 32Gi. What is in shared memory counts."""
    shared_memory: str = "2Gi"
    """Most that the ranks of a pod may share in memory: Kubernetes gives a pod 64 MiB otherwise."""
    claim: str | None = None
    """PersistentVolumeClaim for the run's folder, by which a job that is started again goes on."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1, gpus_per_node=1, cpus_per_node=1)

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """What the template's places are filled with. Raises ValueError where no image is said."""
        if self.image is None:
            raise ValueError("image is missing: say which container image has fastsync-torch with the extra train")
        resources = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        asked = {name: value for name, value in resources.items() if value is not None} or None
        own = {field.name: getattr(self, field.name) for field in fields(TrainJob)}
        values = own | {"command": ["torchrun", *command], "resources": asked, "runs": self.claim and RUNS}
        return {name: value if value is None else json.dumps(value) for name, value in values.items()}


@dataclass(frozen=True)
class Task:
    """The request to SkyPilot."""

    template: ClassVar[str] = "skypilot.yaml"

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

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """What the template's places are filled with."""
        asked = {"infra": self.infra, "accelerators": self.accelerators, "cpus": self.cpus}
        resources = {name: value for name, value in asked.items() if value is not None} or None
        setup = self.setup and f"{self.setup.strip()}\n"
        texts = {"name": self.name, "workdir": self.workdir, "resources": resources, "setup": setup}
        quoted = {name: value if value is None else json.dumps(value) for name, value in texts.items()}
        return {**vars(self), **quoted, "command": shlex.join(command)}


def job_file(job: BatchJob | TrainJob | Task, command: Sequence[str]) -> str:
    """Makes the file that starts a command on each machine (Slurm), or torchrun's words on each rank.

    Raises:
        ValueError: something has to be said.
    """
    return fill(Path(__file__).with_name(job.template).read_text(), job.values(command))


def fill(template: str, values: Mapping[str, object]) -> str:
    """Puts values in the places of a template, such as ``{{nodes}}``. Lines with a place that has None are left out."""
    lines = []
    for line in template.splitlines(keepends=True):
        names = re.findall(r"{{(\w+)}}", line)
        if all(values[name] is not None for name in names):
            lines.append(re.sub(r"{{(\w+)}}", lambda place: str(values[place[1]]), line))
    return "".join(lines)
