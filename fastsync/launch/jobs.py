"""Files by which Slurm, Kubernetes and SkyPilot start torchrun: templates beside this module, and what fills them.

What the command that submits a file can be told, as ``sbatch --partition`` and ``sky launch --infra``, is no option.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .._checks import check_at_least

RUNS = "/runs"
"""Where a pod mounts the claim."""
_PLACE = re.compile(r"{{(\w+)}}")
"""Of a template, such as ``{{nodes}}``."""


@dataclass(frozen=True)
class _Machines:
    template: ClassVar[str]

    nodes: int = 1
    """Machines, or pods."""
    nproc: int = 1
    """Ranks on each machine, as many as it has GPUs."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1)


@dataclass(frozen=True)
class BatchJob(_Machines):
    """The request to Slurm. Before its time is up the job is told to save, and queues itself again."""

    template: ClassVar[str] = "slurm.sbatch"

    file: str = "train.sbatch"
    """File to write. It must not exist yet."""
    time: str = "24:00:00"
    """Time limit: minutes, hours:minutes:seconds, or days-hours:minutes:seconds."""
    stop_before: int = 120
    """Seconds before the time limit at which ranks are told to save: longer than an update and a checkpoint take."""
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

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """Returns the values of the template's places."""
        # A word that begins with $ is for the shell on the machine, which knows Slurm's variables.
        words = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)
        return {**vars(self), "command": shlex.quote(f"exec {words}")}


@dataclass(frozen=True)
class TrainJob(_Machines):
    """The request to Kubeflow Trainer, version 2.2 or newer."""

    template: ClassVar[str] = "kubernetes.yaml"

    image: str | None = None
    """Container image that has fastsync-torch with the extra train. It must be said."""
    file: str = "trainjob.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the job, and of the run's folder."""
    gpus_per_node: int | None = None
    """GPUs of NVIDIA for each pod."""
    cpus_per_node: int | None = None
    """Cores for each pod."""
    memory: str | None = None
    """Memory for each pod, such as 32Gi. What is in shared memory counts."""
    claim: str | None = None
    """PersistentVolumeClaim for the run's folder, by which a job that is started again goes on."""

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """Returns the values of the template's places. Raises ValueError where no image is said."""
        if self.image is None:
            raise ValueError("image is missing: say which container image has fastsync-torch with the extra train")
        asked = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        resources = {name: value for name, value in asked.items() if value is not None} or None
        more = {"command": ["torchrun", *command], "resources": resources, "runs": self.claim and RUNS}
        return _as_json(vars(self) | more)


@dataclass(frozen=True)
class Task(_Machines):
    """The request to SkyPilot."""

    template: ClassVar[str] = "skypilot.yaml"

    file: str = "sky.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the task, and of the run's folder."""
    accelerators: str | None = None
    """GPUs of each machine, such as H100:8."""
    setup: str | None = None
    """Shell commands that install fastsync-torch with the extra train."""

    def values(self, command: Sequence[str]) -> dict[str, object]:
        """Returns the values of the template's places."""
        setup = self.setup and f"{self.setup.strip()}\n"
        texts = {"name": self.name, "accelerators": self.accelerators, "setup": setup}
        return {**vars(self), **_as_json(texts), "command": shlex.join(command)}


def job_file(job: BatchJob | TrainJob | Task, command: Sequence[str]) -> str:
    """Makes the file that starts a command on each machine (Slurm), or torchrun's words on each rank.

    Lines of the template with a place that has None are left out. Raises ValueError where something has to be said.
    """
    values = job.values(command)
    lines = Path(__file__).with_name(job.template).read_text().splitlines(keepends=True)
    kept = [line for line in lines if all(values[name] is not None for name in _PLACE.findall(line))]
    return _PLACE.sub(lambda place: str(values[place[1]]), "".join(kept))


def _as_json(values: Mapping[str, object]) -> dict[str, object]:
    """YAML is a superset of JSON. What a template has no place for need not be a value of JSON."""
    return {name: value if value is None else json.dumps(value, default=str) for name, value in values.items()}
