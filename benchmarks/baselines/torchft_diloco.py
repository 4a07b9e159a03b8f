"""torchft's DiLoCo (https://pypi.org/project/torchft), between sites of one rank each. It is no part of any extra."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

LIGHTHOUSE_PORT = 29510


@contextmanager
def torchft_diloco(model: nn.Module, optimizer: Optimizer, *, sync_every: int) -> Iterator[None]:
    """Synchronises at every so many steps of the optimizer, for the time of a ``with`` block.

    Raises:
        ModuleNotFoundError: torchft is not installed.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install torchft: pip install torchft") from error
    rank, num_sites, seconds = dist.get_rank(), dist.get_world_size(), timedelta(seconds=120)
    lighthouse = LighthouseServer(f"[::]:{LIGHTHOUSE_PORT}", min_replicas=num_sites) if rank == 0 else None
    address = _own_address()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=seconds),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=num_sites,
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=seconds,
        connect_timeout=seconds,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"site{rank}",
        hostname=address,
        init_sync=False,
    )
    outer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    try:
        with DiLoCo(manager, [model], optimizer, outer, sync_every, pin_memory=False):
            yield
    finally:
        dist.barrier()
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def _own_address() -> str:
    """Of this site, as the others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return str(probe.getsockname()[0])
