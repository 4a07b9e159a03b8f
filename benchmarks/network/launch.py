"""Starting ranks in network namespaces."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from benchmarks.harness.collect import Collected, collect, ending, termination_raises
from benchmarks.harness.progress import announce
from benchmarks.harness.records import RowFile
from benchmarks.network.namespaces import Network, NetworkError, why_not
from benchmarks.units import format_rate
from fastsync.launch.torchrun import launch_ranks

MASTER_PORT = 29500
"""Free in a namespace that is new."""
GRACE_SECONDS = 1.0
"""How long an error is kept back, so that where a rank has died, the launcher sees that first."""
CLONE_NEWNET = 0x40000000
BAD_OPTIONS = 2
"""Exit status, as of a wrong option: what was asked for cannot be had here."""


def measure_over_links(
    prog: str,
    measure: Callable[[Any, RowFile, int], list[str]],
    options: Any,
    networks: Sequence[tuple[int, int]],
    ranks_per_host: int,
    report: Callable[[Collected], None],
) -> int:
    """Calls ``measure(options, rows, rate)`` on new ranks for each number of hosts and rate, and reports.

    Returns:
        The exit status: 0; 1 if a method gave a wrong result or a rank failed; 2 if this machine cannot do it; 130
        after Ctrl-C, 143 after SIGTERM.
    """

    def launch(measure: Callable[..., list[str]], nproc: int, options: Any, rows: RowFile) -> list[list[str]]:
        del nproc
        notes: list[list[str]] = []
        for number, (hosts, rate) in enumerate(networks, 1):
            ranks = f"{hosts * ranks_per_host} ranks on {hosts} simulated hosts"
            announce(f"[network {number} of {len(networks)}] {ranks}, links of {format_rate(rate)}: starting")
            with Network(hosts, rate) as network:
                try:
                    notes = run_in_namespaces(network, ranks_per_host, measure, options, rows, rate)
                finally:
                    rows.reload()
        return notes

    # For the ranks: GPUs of one machine would find each other past the links, and c10d would warn that these addresses
    # have no host names.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with termination_raises():
            if reason := why_not():
                raise NetworkError(reason)
            collected = collect(measure, 0, options, options.json, launch)
    except NetworkError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return BAD_OPTIONS
    except (KeyboardInterrupt, SignalException) as error:
        # Before there were ranks, or while what they ran in was removed.
        status, note = ending(error)
        print(f"{prog}: {note}", file=sys.stderr)
        return status
    report(collected)
    return collected.status


def run_in_namespaces(
    network: Network, ranks_per_host: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Calls a function on the ranks of each namespace and returns the results in rank order, as ``launch_ranks``.

    Ranks of a host follow each other. Function and arguments travel by pickle.

    Raises:
        ChildFailedError: of the rank that failed first. Its traceback has been logged.
        SignalException: this process was told to stop.
    """
    num_ranks = len(network.addresses) * ranks_per_host
    return launch_ranks(
        _run_here, num_ranks, network.keepers, network.addresses[0], ranks_per_host, function, arguments, stop_timeout=1
    )


def _run_here(
    keepers: Sequence[int],
    master: str,
    ranks_per_host: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """Moves to the host's namespace before there is any connection, and calls the function."""
    rank = int(os.environ["RANK"])
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{keepers[rank // ranks_per_host]}/ns/net", encoding="ascii") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):  # for this thread, and for those that it starts
            raise OSError(ctypes.get_errno(), f"rank {rank} cannot enter its network namespace")
    os.environ |= {
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # the launcher's store is in another namespace
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    try:
        return function(*arguments)
    except Exception:
        time.sleep(GRACE_SECONDS)
        raise
