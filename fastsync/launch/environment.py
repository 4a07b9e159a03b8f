"""Finds out which rank this process is, from the environment variables of its launcher.

torchrun, Slurm's srun and the launchers of MPI have different variables. All other code asks here.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

_OMPI = "OMPI_COMM_WORLD_"
_MPI = {
    "Open MPI": (f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    "MPI's Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    "MPI's PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # HPE Cray
}
_NAMING_HOSTS = {
    "Open MPI": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...",
    "MPI's Hydra": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...",
}
_NOT_READ = ("PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK")
"""Variables of other launchers, which do not all tell how many ranks there are."""
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below Linux's ports for outgoing connections, from 32768 on
_PORT = 29500
"""torchrun's port, for launchers that tell no job number."""
_SHELLS = ("bash", "sh", "dash", "ksh", "zsh", "fish", "csh", "tcsh")


def threads_of_rank() -> int | None:
    """Returns the threads of a rank that OMP_NUM_THREADS asks for; None if it is not set or empty.

    OpenMP allows a list, with a number for each level of nested regions. The first one counts here.

    Raises:
        ValueError: it is neither a number from 1 on nor a list of such numbers.
    """
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    if value and not re.fullmatch(r"0*[1-9][0-9]*(\s*,\s*0*[1-9][0-9]*)*", value):
        raise ValueError(f"OMP_NUM_THREADS={value!r} is no number from 1 on, such as 4; set one, or unset it")
    return int(value.partition(",")[0]) if value else None


@dataclass(frozen=True)
class Rank:
    """The rank of this process among those that were started together."""

    launcher: str | None = None
    """The launcher that has started the ranks; None if this process is the only one."""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    """The number of ranks on this host. It and ``local_rank`` are None if the launcher does not tell."""
    first_host: str | None = None
    """The host of rank 0; None if the launcher does not tell."""
    port: int = _PORT
    """The port that rank 0 listens on, unless MASTER_PORT names another."""
    num_gpus: int = 0
    """GPUs of all ranks of this host. Each rank may see only its own. 0 if the launcher does not tell."""

    @contextmanager
    def variables(self) -> Iterator[None]:
        """Sets torchrun's variables inside a ``with`` block, so that torch and other libraries know which rank this is.

        MASTER_ADDR and MASTER_PORT stay as they are if they are set.

        Raises:
            RuntimeError: MASTER_ADDR is missing, and the launcher does not tell where rank 0 is.
        """
        if self.launcher in (None, "torchrun"):
            yield
            return
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": os.environ.get("MASTER_ADDR") or self._meeting_host(),
            "MASTER_PORT": os.environ.get("MASTER_PORT") or self.port,
        }
        before = {name: os.environ.get(name) for name in values}
        os.environ.update({name: str(value) for name, value in values.items() if value is not None})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is not None:
                    os.environ[name] = value
                else:
                    os.environ.pop(name, None)

    def _meeting_host(self) -> str:
        if self.local_world_size == self.world_size:
            return "localhost"
        if self.first_host is not None:
            return self.first_host
        raise RuntimeError(
            f"MASTER_ADDR is missing: {self.launcher} does not tell where rank 0 is. Name its host and a free port: "
            f"{_NAMING_HOSTS.get(self.launcher or '', 'export MASTER_ADDR=HOST MASTER_PORT=29500')}"
        )


def this_rank() -> Rank:
    """Finds out which rank this process is.

    RANK, which torchrun sets, is looked at first, because torchrun may run inside a step of Slurm. MPI's launchers come
    before Slurm, because they start their daemons as steps of Slurm. But srun may set PMI's variables itself.

    Raises:
        ValueError: a launcher has started this process, and does not tell how many ranks there are.
    """
    if "RANK" in os.environ:
        return _rank("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if _has_srun_set_pmi():
        return _unless_alone(_slurm_rank())
    for launcher, names in _MPI.items():
        if all(name in os.environ for name in names):
            return _unless_alone(replace(_rank(launcher, *names), port=_port_of_open_mpi()))
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return _unless_alone(_slurm_rank())
    if "PMI_RANK" in os.environ and "PMI_SIZE" in os.environ:
        return _unless_alone(_rank("PMI", "PMI_RANK", "PMI_SIZE"))
    for name in _NOT_READ:
        if name in os.environ:
            raise ValueError(
                f"{name}={os.environ[name]} is set, so a launcher has started this process, but fastsync cannot read "
                "how many ranks it has started. Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT on every rank, or use torchrun. For a process that is alone, unset {name}"
            )
    return Rank()


def _has_srun_set_pmi() -> bool:
    """Tells whether srun itself has set PMI's variables."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(os.environ.get(pmi, "") == os.environ.get(slurm) for pmi, slurm in pairs)


def first_host(hosts: str) -> str:
    """Returns the first host of Slurm's list, such as rack[0-1]node[08-15,17],login1."""
    (first,) = re.findall(r"^(?:\[[^]]*\]|[^,[])+", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first)


def tasks_of_node(node: int, tasks_per_node: str) -> int:
    """Returns the number of tasks of a node, from Slurm's list, such as 4(x2),1 for three nodes."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node]


def _rank(launcher: str, rank: str, world_size: str, local_rank: str = "", local_world_size: str = "") -> Rank:
    """Reads a rank from the variables of these names. The local variables may be missing."""
    return Rank(
        launcher,
        int(os.environ[rank]),
        int(os.environ.get(world_size, "1")),
        _number(local_rank),
        _number(local_world_size),
    )


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    return None if value is None else int(value)


def _unless_alone(rank: Rank) -> Rank:
    """Returns the rank. A single one, such as a shell that srun has opened, counts as a process without a launcher."""
    return rank if rank.world_size > 1 else Rank()


def _is_typed_into_a_shell() -> bool:
    """Tells whether the task of this step of Slurm is a shell without a script, as after ``srun -n 4 --pty bash``.

    The step's other tasks have no terminal, so their shells have ended.
    """
    try:
        words = Path(f"/proc/{int(os.environ['SLURM_TASK_PID'])}/cmdline").read_text().split("\0")[:-1]
    except (KeyError, OSError, ValueError):
        return False
    is_shell = bool(words) and Path(words[0]).name.lstrip("-") in _SHELLS
    return is_shell and all(word.startswith("-") for word in words[1:])


def _port_of_open_mpi() -> int:
    """Returns a port that differs between jobs, so that two jobs on a host do not meet."""
    job = os.environ.get("PMIX_NAMESPACE")
    return _PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _slurm_rank() -> Rank:
    """Reads the variables of Slurm's step, because those of the job may describe other steps."""
    if _is_typed_into_a_shell():
        return Rank()

    def step_number(name: str) -> int:
        return int(os.environ[f"SLURM_{name}"])

    rank, node = step_number("PROCID"), step_number("NODEID")
    # With --distribution=arbitrary rank 0 may be on another node than the first, which only rank 0 knows.
    host = first_host(os.environ["SLURM_STEP_NODELIST"]) if rank > 0 or node == 0 else None
    return Rank(
        "Slurm",
        rank,
        step_number("STEP_NUM_TASKS"),
        step_number("LOCALID"),
        tasks_of_node(node, os.environ["SLURM_STEP_TASKS_PER_NODE"]),
        host,
        # Numbers of jobs, and of steps in a job, are consecutive, so the factor keeps their ports apart.
        _FIRST_PORT + (step_number("JOB_ID") + 1009 * step_number("STEP_ID")) % _NUM_PORTS,
        int(os.environ.get("SLURM_GPUS_ON_NODE", "0")),
    )
