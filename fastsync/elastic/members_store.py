"""The store in which the ranks of one training agree who is left, and how a launcher tells where it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .membership import another_connection
from .peer_watch import host_and_port

STORE, JOINS = "FASTSYNC_STORE", "FASTSYNC_JOINS"
"""Environment variables: HOST:PORT of a store outside of all ranks, and whether this process joins a running training.
``fastsync launch local`` sets them."""
STORE_LIMIT = timedelta(seconds=60)
"""How long the store is waited for, and at the start the other ranks."""
_KEYS = "fastsync/elastic{}/{}"
KEYS_OF_FIRST = _KEYS.format(1, 0)
"""Begins that store's keys for the first Elastic or DiLoCo of a training that was never started again."""
_num_made = 0


def members_store(ranks: Sequence[int], given: Store | None = None) -> Store | None:
    """Returns the part of a store in which the ranks of one training agree. The store outlives every rank.

    All of them have to call it in the same order. If no store is given, it is the launcher's; None if there is none
    either. Groups that train apart have a part each. A process that joins gets the part of the group with rank 0.

    Args:
        ranks: the ranks that begin together, by their numbers in the default group.
        given: the user's store.

    Raises:
        ValueError: FASTSYNC_STORE is no address.
        RuntimeError: no store answers there.
    """
    global _num_made
    attempt = "0"
    if given is None:
        if place := os.environ.get(STORE):
            if not place.rpartition(":")[2].isdigit():
                raise ValueError(f"{STORE}={place!r}: expected HOST:PORT, the address of a TCPStore")
            host, port = host_and_port(place)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]  # torchrun keeps the store when it starts all anew
        else:
            return None
        try:
            given = TCPStore(host, port, is_master=False, timeout=STORE_LIMIT)
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"fastsync: no store answers at {host}:{port} within {STORE_LIMIT.total_seconds():g} s, where the "
                f"ranks agree; {STORE} has to be the address of a TCPStore, which under torchrun is "
                "MASTER_ADDR:MASTER_PORT of the ranks that train"
            ) from error
    _num_made += 1
    store = PrefixStore(_KEYS.format(_num_made, attempt), another_connection(given))
    is_apart = ranks[0] != 0 and os.environ.get(JOINS) != "1"
    return PrefixStore(f"from rank {ranks[0]}", store) if is_apart else store
