"""Starting ranks in network namespaces."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.network.namespaces import Network
from fastsync.launch.torchrun import launch_ranks

MASTER_PORT = 29500
"""Free in a namespace that is new."""
GRACE_SECONDS = 1.0
"""How long an error is kept back, so that where a rank has died, the launcher sees that first."""
CLONE_NEWNET = 0x40000000


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
    with open(f"/proc/{keepers[rank // ranks_per_host]}/ns/net") as namespace:
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
