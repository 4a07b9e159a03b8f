"""What several tests of the engine need."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from fastsync.elastic.members_store import STORE
from tests.engine.elastic import Training


@pytest.fixture
def store() -> TCPStore:
    """A store that outlives the ranks, as a launcher's.

    It listens to IPv4 alone: of ``::ffff:127.0.0.1`` only a name server knows the name, for which c10d asks.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@pytest.fixture
def store_port(store: TCPStore) -> int:
    """Where ranks find that store."""
    return store.port


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server(("localhost", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def alone(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """An elastic training of this process alone."""
    monkeypatch.setenv(STORE, f"127.0.0.1:{store.port}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Training([0])
    dist.destroy_process_group()
