"""``fastsync launch``: writes files with which Slurm, Kubernetes and SkyPilot start the trainer or a user's script.

The templates are beside this module. Options of the command that submits a file, such as ``sbatch --partition`` and
``sky launch --infra``, are not options here.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from ..messages import check_at_least, did_you_mean
from .script import Script

HELP = """\
usage: fastsync launch {slurm,kubernetes,skypilot} [OPTIONS] [-- SCRIPT ...]
       fastsync launch local [-n RANKS] [--replace] SCRIPT ...

Write the file by which a cluster starts ranks with torchrun. It starts nothing:
the last line tells the command that submits it. Only local starts ranks, on
this host. There no rank ends because another one does; see fastsync.Elastic.

  slurm       a batch script, for sbatch
  kubernetes  a TrainJob of Kubeflow Trainer, for kubectl
  skypilot    a task, for sky launch

Your own script stands behind --, with its options, as torchrun takes it:

  fastsync launch slurm --nodes 2 --nproc 8 -- train.py --lr 0.1
  fastsync launch kubernetes --image IMAGE -- -m mypackage.train --lr 0.1

Without -- the PPO trainer runs. It takes every setting of fastsync train:

  fastsync launch slurm --nodes 2 --nproc 8 --env CartPole-v1

Each kind has options: fastsync launch slurm --help
Options of sbatch, kubectl and sky go to these, such as sbatch --partition.
"""
RUNS = "/runs"
"""The folder where a pod mounts the claim."""
SLURM_RUN = '"$SLURM_JOB_NAME-$SLURM_JOB_ID"'
"""The name of a run, for the shell. A requeued job keeps its number, so it finds its run."""
SKYPILOT_SETUP = """\
# Install fastsync here, by commands such as these, or by: fastsync launch skypilot --setup '...'
# pip install torch ninja 'setuptools>=77.0.3'
# pip install --no-build-isolation ./fastsync
python -c 'import fastsync'"""
_PLACEHOLDER = re.compile(r"{{(\w+)}}")
"""A placeholder of a template, such as ``{{nodes}}``."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""The name of a TrainJob: a label of RFC 1035."""
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""The name of a claim: a subdomain of RFC 1123."""
_QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
"""A quantity of Kubernetes."""
_TASK = re.compile(r"[A-Za-z0-9]+([._-]{1,2}[A-Za-z0-9]+)*")
"""The name of a task of SkyPilot."""
_ACCELERATORS = re.compile(r"(?=.*\d)[\w.+ -]+(:[\d.]+|:\d+[A-Z]+\+?)?", re.ASCII)
_NO_YAML = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that a block of YAML cannot hold, or takes for the end of a line."""


class Work(Protocol):
    """What a job runs: a user's script, or the trainer.

    ``own`` marks the lines of a template for a user's script, ``resumes`` those for the trainer, and ``from_folder``
    those for what takes files of this folder. An empty string keeps these lines, and None leaves them out.
    """

    @property
    def own(self) -> str | None: ...

    @property
    def resumes(self) -> str | None: ...

    @property
    def from_folder(self) -> str | None: ...

    def command(self, run_name: str, runs_dir: str | None = None) -> list[str]:
        """Returns the words after torchrun's options. The arguments are for the trainer alone."""

    def check_file(self) -> None:
        """Raises ValueError if what it runs is no file here."""


@dataclass(frozen=True)
class Job:
    """The options that all kinds of jobs have."""

    template: ClassVar[str]
    submit: ClassVar[str]
    """The command that takes the file."""

    nodes: int = 1
    """Machines, or pods."""
    nproc: int = 1
    """Ranks on each machine, as many as it has GPUs."""
    cpus_per_node: int | None = None
    """Cores of each machine, or pod. By default Slurm and SkyPilot are asked for one per rank."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1, cpus_per_node=1)


@dataclass(frozen=True)
class Slurm(Job):
    """Write a batch script for Slurm, which starts torchrun on each machine.

    Your own script stands behind --, as in: fastsync launch slurm --nodes 2 -- train.py. Without it the PPO trainer
    runs. Shortly before the time limit the trainer saves, and the job requeues itself.

    Pass the options of sbatch, such as --time, to sbatch.
    """

    template: ClassVar[str] = "slurm.sbatch"
    submit: ClassVar[str] = "sbatch"

    file: str = "train.sbatch"
    """File to write. It must not exist yet."""
    setup: str | None = None
    """Shell commands to begin with. By default they activate the virtual environment of this command, if it has one."""
    max_restarts: int = 0
    """How often the job comes back from its last checkpoint when a rank is lost."""

    def values(self, work: Work) -> dict[str, object]:
        """Returns the values of the template's placeholders."""
        work.check_file()
        words = [word if word == SLURM_RUN else shlex.quote(word) for word in work.command(SLURM_RUN)]
        setup = _activation() if self.setup is None else self.setup
        cpus = self.cpus_per_node or self.nproc  # Slurm's default is one for the task, which has all ranks of a machine
        return vars(self) | {"command": " ".join(words), "setup": setup, "cpus_per_node": cpus}


@dataclass(frozen=True)
class Kubernetes(Job):
    """Write a TrainJob of Kubeflow Trainer, version 2.2 or newer, for Kubernetes.

    Your own script stands behind --, as in: fastsync launch kubernetes --image IMAGE -- train.py. The image has to have
    it. Without it the PPO trainer runs.

    Pass the options of kubectl, such as --namespace, to kubectl.
    """

    template: ClassVar[str] = "kubernetes.yaml"
    submit: ClassVar[str] = "kubectl apply"

    image: str | None = None
    """Container image that has fastsync-torch, for the PPO trainer with the extra train. It is required."""
    file: str = "trainjob.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the job, and of the run's folder."""
    gpus_per_node: int | None = None
    """GPUs of NVIDIA for each pod."""
    memory: str | None = None
    """Memory of each pod, such as 32Gi, which includes shared memory."""
    claim: str | None = None
    """PersistentVolumeClaim, which pods mount as /runs. A restarted training resumes from it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, gpus_per_node=0)
        label = "at most 63 small letters, digits and -, that begin with a letter and end with no - (RFC 1035)"
        subdomain = "small letters, digits, - and ., that begin and end with no - or . (RFC 1123)"
        _check("name", self.name, _LABEL, label)
        _check("claim", self.claim, _SUBDOMAIN, subdomain)
        _check("memory", self.memory, _QUANTITY, "a quantity of Kubernetes, such as 32Gi, 500M or 1.5Ti")

    def values(self, work: Work) -> dict[str, object]:
        """Returns the values of the template's placeholders. Raises ValueError without an image."""
        if self.image is None:
            raise ValueError("image is missing: say which container image has fastsync-torch and what you run")
        asked = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        resources = {name: value for name, value in asked.items() if value is not None} or None
        runs = self.claim and RUNS
        command = ["torchrun", *work.command(self.name, runs)]
        return _as_json(vars(self) | {"command": command, "resources": resources, "runs": runs})


@dataclass(frozen=True)
class SkyPilot(Job):
    """Write a SkyPilot task, for machines of a cloud or of Kubernetes.

    Your own script stands behind --, as in: fastsync launch skypilot --nodes 2 -- train.py. SkyPilot copies this folder
    to the machines. Without it the PPO trainer runs.

    Pass the options of sky launch, such as --infra, to sky launch.
    """

    template: ClassVar[str] = "skypilot.yaml"
    submit: ClassVar[str] = "sky launch"

    file: str = "sky.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the task, and of the run's folder."""
    accelerators: str | None = None
    """GPUs of each machine, such as H100:8."""
    setup: str | None = None
    """Shell commands that install fastsync-torch, for the PPO trainer with the extra train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("name", self.name, _TASK, "letters and digits, with one or two of . _ - between them")
        _check("accelerators", self.accelerators, _ACCELERATORS, "a kind of GPU and a number, such as H100:8 or A100")

    def values(self, work: Work) -> dict[str, object]:
        """Returns the values of the template's placeholders."""
        work.check_file()
        setup = SKYPILOT_SETUP if self.setup is None else self.setup.strip()
        texts = {"name": self.name, "cpus": f"{self.cpus_per_node or self.nproc}+", "accelerators": self.accelerators}
        command = shlex.join(work.command(self.name))
        for text in (setup, command):
            if found := _NO_YAML.search(text):
                raise ValueError(
                    f"{text!r} has the character {found[0]!r}, which no block of YAML can hold; leave it out"
                )
        # The lines of an argument have the indentation of their block, which YAML takes away again.
        indented = {"setup": textwrap.indent(setup, "  "), "command": command.replace("\n", "\n  ")}
        return vars(self) | _as_json(texts) | indented


Kind: TypeAlias = Slurm | Kubernetes | SkyPilot
KINDS: dict[str, type[Kind]] = {
    "slurm": Slurm,
    "kubernetes": Kubernetes,
    "skypilot": SkyPilot,
}
"""The subcommands of ``fastsync launch``."""


ReadTrainer: TypeAlias = Callable[[type[Kind], str, Sequence[str]], tuple[Kind, Work]]
"""Reads the words of a command without a script: a kind's options, and the trainer's. It gets the kind, the name of the
command and the words."""


def main(arguments: Sequence[str], read_trainer: ReadTrainer, of_trainer: Callable[[], set[str]]) -> int:
    """Writes the file that a command line asks for, and returns the exit status.

    Args:
        arguments: the words after ``fastsync launch``.
        read_trainer: reads a command without a script.
        of_trainer: returns the names of the trainer's settings.

    Raises:
        ValueError: there is no such subcommand, the file exists already, or a setting does not suit.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *words = arguments
    if name == "local":
        from . import local

        return local.main(words)
    if name.startswith("-"):
        raise ValueError(f"one of {', '.join(KINDS)} comes first, as in: fastsync launch slurm -- train.py")
    if name not in KINDS:
        raise ValueError(f"{name!r} is not one of local, {', '.join(KINDS)}{did_you_mean(name, ['local', *KINDS])}")
    job, work = read(name, words, read_trainer, of_trainer)
    text = content(job, work).encode()
    try:
        with Path(job.file).open("xb") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"file={job.file!r} exists already; remove it or choose another name") from None
    except OSError as error:
        raise ValueError(f"file={job.file!r} cannot be written: {error.strerror}") from None
    print(f"wrote {job.file}. Submit it with: {_submitting(job, job.file)}")
    return 0


def read(
    name: str, words: Sequence[str], read_trainer: ReadTrainer, of_trainer: Callable[[], set[str]]
) -> tuple[Kind, Work]:
    """Reads the words after the name of a kind: its options, and the script to run. Errors of tyro end the process.

    Raises:
        ValueError: an option is not known here, or the words after ``--`` cannot run.
    """
    kind, prog = KINDS[name], f"fastsync launch {name}"
    if "--" in words:
        end = list(words).index("--")
        work = Script(words[end + 1 :])
        own = [re.sub(r"^--nproc[-_]per[-_]node(?==|$)", "--nproc", word) for word in words[:end]]  # torchrun's name
        try:
            from .options import read_options
        except ImportError:
            raise ValueError("tyro is missing, which reads options: pip install tyro") from None
        check_options(prog, kind, own, names_of_options(kind), script=words[end + 1 :], of_trainer=of_trainer)
        return read_options(kind, prog, own), work
    return read_trainer(kind, prog, words)


def content(job: Kind, work: Work) -> str:
    """Fills the template of a job. It leaves out lines with a placeholder whose value is None."""
    values = job.values(work) | {"own": work.own, "resumes": work.resumes, "from_folder": work.from_folder}
    lines = Path(__file__).with_name(job.template).read_text().splitlines(keepends=True)
    kept = [line for line in lines if all(values[name] is not None for name in _PLACEHOLDER.findall(line))]
    return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), "".join(kept))


def _check(option: str, value: str | None, form: re.Pattern[str], rule: str) -> None:
    """Raises ValueError for a value that the cluster would refuse."""
    if value is not None and not form.fullmatch(value):
        raise ValueError(f"{option}={value!r}: expected {rule}")


def names_of_options(options: Any) -> set[str]:
    """Returns the names of the options of a dataclass."""
    return {option.name for option in fields(options)}


def check_options(
    prog: str,
    kind: type[Kind],
    words: Sequence[str],
    known: set[str],
    *,
    script: Sequence[str] = (),
    of_trainer: Callable[[], set[str]] = set,
) -> None:
    """Raises ValueError for unknown words, and says where they belong.

    Args:
        prog: the command, for messages.
        kind: the kind of the job.
        words: the words before ``--``.
        known: the names of options.
        script: the words after ``--``.
        of_trainer: returns the names of settings that do not go with a script.
    """
    names = known | {"h", "help"}
    unknown: list[str] = []
    understood: list[str] = []
    is_known = False
    for number, word in enumerate(words):
        is_value = is_known and re.fullmatch(r"--?[A-Za-z][\w-]*", words[number - 1])
        is_script = word == "-m" or (word.endswith(".py") and not word.startswith("-"))
        if not is_value and (is_script or (number == 0 and not word.startswith("-"))):
            own, others = _parted(words[number:], names_of_options(kind))
            raise ValueError(
                f"put -- before your own script: {prog} {shlex.join([*words[:number], *own, '--', *others])}"
            )
        if (option := _option(word)) is not None:
            is_known = option in names or option.removeprefix("no_") in names
        (understood if is_known else unknown).append(word)
    if not unknown:
        return
    name = unknown[0].partition("=")[0]
    if (option := _option(name)) == "replace":
        raise ValueError(f"{name} is an option of fastsync launch local; leave it out here")
    if script and option in of_trainer():
        raise ValueError(
            f"{name} is a setting of the PPO trainer, and settings of the trainer do not go with a script; leave it "
            "out, or leave out -- and the script"
        )
    own, _ = _parted(understood, names_of_options(kind))
    typed = shlex.join([*own, "--", *(script or ["train.py"]), *unknown])
    way_out = did_you_mean(name.lstrip("-"), names, cutoff=0.8) or (
        f". If it is one of {kind.submit}, pass it there: {_submitting(kind, _file(kind, words), unknown)}. If it is "
        f"your script's, put it behind the script: {prog} {typed}"
    )
    raise ValueError(f"{name} is no option of {prog}{way_out}")


def _option(word: str) -> str | None:
    """Returns the name of the option that a word is, without its value; None if it is none."""
    option = re.match(r"--?([A-Za-z][\w-]*)", word)
    return None if option is None else option[1].replace("-", "_")


def _parted(words: Sequence[str], own: set[str]) -> tuple[list[str], list[str]]:
    """Parts words into options of these names, with their values, and all others."""
    found: tuple[list[str], list[str]] = ([], [])
    is_own = takes_value = False
    for word in words:
        name = _option(word)
        is_own = name in own if name is not None else is_own and takes_value
        takes_value = name is not None and "=" not in word
        found[0 if is_own else 1].append(word)
    return found


def _file(kind: type[Kind], words: Sequence[str]) -> str:
    """Returns the file that a command line names."""
    named = [word.removeprefix("--file=") for word in words if word.startswith("--file=")]
    named += [value for word, value in pairwise(words) if word == "--file"]
    return next(iter(named), kind.file)


def _submitting(job: Kind | type[Kind], file: str, options: Sequence[str] = ()) -> str:
    flag = ["-f"] if job.submit.startswith("kubectl") else []
    return f"{job.submit} {shlex.join([*options, *flag, file])}"


def _activation() -> str | None:
    """Returns the command that activates the virtual environment of this process, if it has one."""
    return None if sys.prefix == sys.base_prefix else f"source {shlex.quote(f'{sys.prefix}/bin/activate')}"


def _as_json(values: Mapping[str, object]) -> dict[str, object]:
    """Returns values as JSON, of which YAML is a superset. Unused values may be of any type."""
    return {name: value if value is None else json.dumps(value, default=str) for name, value in values.items()}
