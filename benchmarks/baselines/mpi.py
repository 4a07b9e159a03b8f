"""Starts MPI's ranks, which time a collective. They are processes of their own: torch's wheels have no MPI."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.collect import TrainingError

BINARIES = Path(sys.prefix) / "with-mpi" / "bin"
"""Of the environment that has mpi4py, Open MPI and NumPy."""
HOW_TO_INSTALL = "mpi is left out, because it is not installed: `make baselines` installs it"
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMIX_")
_ANYWHERE = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}


@dataclass(frozen=True)
class Times:
    samples: list[float]
    """Seconds of the slowest rank."""
    correct: bool
    library: str
    """Such as Open MPI v5.0.8."""


def is_installed() -> bool:
    return (BINARIES / "mpirun").exists()


def time_collective(collective: str, numel: int, ranks: int, warmup: int, repetitions: int, timeout: float) -> Times:
    """Times a collective of ``numel`` float32 values, as ``mpi_collectives`` does.

    Raises:
        TrainingError: MPI failed, or did not end within ``timeout`` seconds.
    """
    program = Path(__file__).with_name("mpi_collectives.py")
    call = {"collective": collective, "numel": numel, "warmup": warmup, "repetitions": repetitions}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call.json"
        file.write_text(json.dumps(call), encoding="utf-8")
        command = [BINARIES / "mpirun", "--oversubscribe", "-n", str(ranks), BINARIES / "python", program, file]
        try:
            ended = subprocess.run(command, env=_variables(), capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TrainingError(f"mpirun: {collective} of {numel} values took more than {timeout:g} s") from None
        if ended.returncode:
            raise TrainingError(f"mpirun ended with status {ended.returncode}: {ended.stderr.strip()[-500:]}")
        measured = json.loads(file.read_text(encoding="utf-8"))
    return Times(measured["samples"], measured["correct"], measured["library"])


def _variables() -> dict[str, str]:
    """This process's variables without those of the launcher that has started it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return own | _ANYWHERE
