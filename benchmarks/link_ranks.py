"""Starting ranks in network namespaces, with torchrun's environment variables, and waiting for them."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from benchmarks.collect import RankError
from benchmarks.netns import Network, signals_wait

MASTER_PORT = 29500
"""Free in a namespace that is new."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one has failed, to say what they have seen."""
MAX_LINES = 30

Processes = Sequence["subprocess.Popen[str]"]


def run_in_namespaces(
    network: Network, ranks_per_host: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Calls a function on the ranks of each namespace and returns the results in rank order. Leaves no process.

    Each rank watches over the time it takes by itself; this waits until all have ended, or one has failed.

    Args:
        network: the namespaces.
        ranks_per_host: how many ranks each has. They follow each other.
        function: at the top level of a module; it and its arguments travel by pickle.
        *arguments: for the function.

    Raises:
        RankError: of the rank that failed first. What it has said is on standard error.
        SignalException: this process was told to stop.
    """
    # A signal that raised in the middle of starting or polling a process might leave a lock taken, or the process.
    with signals_wait() as received, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-link-")))
        (folder / "call").write_bytes(pickle.dumps((function, arguments)))
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        for rank in range(len(network.addresses) * ranks_per_host):
            log = None if rank == 0 else stack.enter_context(_log(folder, rank).open("w"))
            processes.append(
                network.start(
                    rank // ranks_per_host,
                    [sys.executable, "-m", "benchmarks.link_rank", str(folder), str(os.getpid())],
                    env=_environment(network, rank, ranks_per_host),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,  # rank 0 shows the progress
                    start_new_session=True,  # Ctrl-C comes to this process alone, which then ends the ranks
                )
            )
        _wait(processes, folder, received)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(len(processes))]


def _environment(network: Network, rank: int, ranks_per_host: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(network.addresses) * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d would warn that these addresses have no host names
        "CUDA_VISIBLE_DEVICES": "",  # GPUs of one machine would find each other past the links
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _wait(processes: Processes, folder: Path, received: list[signal.Signals]) -> None:
    """Returns when all have ended well.

    Raises:
        RankError: one has not.
        SignalException: a signal has been received.
    """
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        _pause(received)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        _pause(received)
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        first = min(failed, key=lambda rank: _time_of_error(folder, rank))
        _tell(first, processes[first], folder)
        raise RankError(first)


def _pause(received: list[signal.Signals]) -> None:
    """Lets a moment pass. Signals, which have to wait otherwise, have their effect here."""
    time.sleep(POLL_SECONDS)
    if received:
        first = received[0]
        received.clear()
        raise SignalException(f"ended by {first.name}", sigval=first)


def _time_of_error(folder: Path, rank: int) -> float:
    """When a rank raised. One that could not even say so died first: the others only saw that it was gone."""
    error = folder / f"{rank}.error"
    return error.stat().st_mtime if error.exists() else 0.0


def _tell(rank: int, process: "subprocess.Popen[str]", folder: Path) -> None:
    """Prints how a rank ended, and its traceback or the last lines that it wrote."""
    status = process.returncode
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    error = folder / f"{rank}.error"
    said = error if error.exists() else _log(folder, rank)
    lines = said.read_text().splitlines() if said.exists() else []
    print(f"rank {rank} {how}", *lines[-MAX_LINES:], sep="\n", file=sys.stderr)


def _end(processes: Processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"
