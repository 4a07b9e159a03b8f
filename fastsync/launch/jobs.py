"""``fastsync launch``: writes files by which Slurm, Kubernetes and SkyPilot start the trainer.

Templates lie beside this module. Options of the command that submits a file, such as ``sbatch --partition`` and ``sky
launch --infra``, are none here.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from .._checks import check_at_least, did_you_mean
from ..ppo.cli import Arguments, option_words, parse

RUNS = "/runs"
"""Where a pod mounts the claim."""
_PLACE = re.compile(r"{{(\w+)}}")
"""Of a template, such as ``{{nodes}}``."""


@dataclass(frozen=True)
class Job(Arguments):
    """A training on machines. A file of settings is read now, so later changes to it have no effect."""

    template: ClassVar[str]
    submit: ClassVar[str]
    """The command that takes the file."""

    nodes: int = 1
    """Machines, or pods."""
    nproc: int = 1
    """Ranks on each machine, as many as it has GPUs."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1)
        if self.settings.resume not in (None, "auto"):
            raise ValueError(f"resume={self.settings.resume!r}: jobs always use resume=auto; set run_name instead")


@dataclass(frozen=True)
class Slurm(Job):
    """Write a batch script that trains under Slurm. Shortly before its time limit the job saves and requeues itself.

    Pass the options of ``sbatch``, such as ``--time``, to ``sbatch``.
    """

    template: ClassVar[str] = "slurm.sbatch"
    submit: ClassVar[str] = "sbatch"

    file: str = "train.sbatch"
    """File to write. It must not exist yet."""
    setup: str | None = None
    """Shell commands to begin with, such as "source venv/bin/activate"."""
    max_restarts: int = 0
    """How often the job comes back from its last checkpoint when a rank is lost."""

    def values(self) -> dict[str, object]:
        """Returns the values of the template's places."""
        # A requeued job keeps its number, so it finds its run.
        named = [] if self.settings.run_name else ["--run-name", '"$SLURM_JOB_NAME-$SLURM_JOB_ID"']
        words = shlex.join(["-m", "fastsync.train", *option_words(self.settings, "resume")])
        return {**vars(self), "command": " ".join([words, *named, "--resume", "auto"])}


@dataclass(frozen=True)
class Kubernetes(Job):
    """Write a TrainJob of Kubeflow Trainer, version 2.2 or newer, that trains on Kubernetes."""

    template: ClassVar[str] = "kubernetes.yaml"
    submit: ClassVar[str] = "kubectl apply -f"

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

    def values(self) -> dict[str, object]:
        """Returns the values of the template's places. Raises ValueError where no image is said."""
        if self.image is None:
            raise ValueError("image is missing: say which container image has fastsync-torch with the extra train")
        asked = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        resources = {name: value for name, value in asked.items() if value is not None} or None
        settings = self.settings if self.claim is None else replace(self.settings, runs_dir=RUNS)
        command = ["torchrun", *_words_of_a_rank(settings, self.name)]
        return _as_json(vars(self) | {"command": command, "resources": resources, "runs": self.claim and RUNS})


@dataclass(frozen=True)
class SkyPilot(Job):
    """Write a SkyPilot task that trains on machines of a cloud or of Kubernetes."""

    template: ClassVar[str] = "skypilot.yaml"
    submit: ClassVar[str] = "sky launch"

    file: str = "sky.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the task, and of the run's folder."""
    setup: str | None = None
    """Shell commands that install fastsync-torch with the extra train."""

    def values(self) -> dict[str, object]:
        """Returns the values of the template's places."""
        setup = self.setup and f"{self.setup.strip()}\n"
        texts = {"name": self.name, "setup": setup}
        command = shlex.join(_words_of_a_rank(self.settings, self.name))
        return {**vars(self), **_as_json(texts), "command": command}


KINDS: dict[str, type[Slurm | Kubernetes | SkyPilot]] = {
    "slurm": Slurm,
    "kubernetes": Kubernetes,
    "skypilot": SkyPilot,
}
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
    text = content(job)
    try:
        with Path(job.file).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"file={job.file!r} exists already; remove it or choose another name") from None
    print(f"wrote {job.file}. Submit it with: {job.submit} {shlex.quote(job.file)}")
    return 0


def content(job: Slurm | Kubernetes | SkyPilot) -> str:
    """Fills the template of a job. Its lines with a place that has None are left out."""
    values = job.values()
    lines = Path(__file__).with_name(job.template).read_text().splitlines(keepends=True)
    kept = [line for line in lines if all(values[name] is not None for name in _PLACE.findall(line))]
    return _PLACE.sub(lambda place: str(values[place[1]]), "".join(kept))


def _words_of_a_rank(settings: Any, name: str) -> list[str]:
    """What torchrun starts on each rank. Without a name of its own, the run has the job's."""
    settings = replace(settings, run_name=settings.run_name or name)
    return ["-m", "fastsync.train", *option_words(settings, "resume"), "--resume", "auto"]


def _as_json(values: Mapping[str, object]) -> dict[str, object]:
    """YAML is a superset of JSON. What a template has no place for need not be a value of JSON."""
    return {name: value if value is None else json.dumps(value, default=str) for name, value in values.items()}
