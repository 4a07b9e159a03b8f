"""A process group that goes on with the ranks that are left when one is lost."""

from __future__ import annotations

import json
import pickle
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from . import _C
from .distributed import gloo_group

POLL_SECONDS = 0.1
MOST_SILENCES = 2  # checks in a row without a heartbeat after which a rank is given up; each takes some seconds
GRACE_SECONDS = 2.0


class SurvivingGroup:
    """A Gloo group over the ranks of another group, independent of that group's calls.

    The first rank chooses its name, because ranks may have made different numbers of groups before.
    """

    group: dist.ProcessGroup
    """The current group, replaced after each loss. Call its own methods; see ``gloo_group``."""
    ranks: list[int]
    """The members of the group, as ranks of the default group."""

    def __init__(self, process_group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._timeout = timeout
        self._is_closed = False
        name = [uuid4().hex]
        dist.broadcast_object_list(name, group=process_group, group_src=0)
        self._store: Store = PrefixStore(f"fastsync/{name[0]}/", dist.distributed_c10d._get_default_store())
        self._form(dist.get_process_group_ranks(process_group))

    def _form(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self._store = PrefixStore(f"{ranks}/", self._store)
        rank, name = ranks.index(dist.get_rank()), f"fastsync: ranks {ranks}"
        self.group = gloo_group(self._store, rank, len(ranks), self._timeout, name)
        self._liveness = _C.Liveness(self.group, "sites")

    def go_on_without_the_lost(self, progress: int, error: Exception) -> dict[int, int]:
        """Forms a group of the ranks that are left, once an error of the newest has shown that some are lost.

        Each rank writes to the store how far it has come, and waits until the others have done so. A rank without a
        heartbeat is given up after some seconds. A rank with one is waited for until twice the time-out, because it may
        not have come to a collective of the old group yet. Without a ``TCPStore`` or ``FileStore`` there are no
        heartbeats, so every rank is waited for that long. The first list of ranks that is written to the store holds
        for all. The store has to be alive: it lives with the launcher, or with rank 0. The old group ends with its last
        reference.

        Args:
            progress: how far this rank has come.
            error: what went wrong.

        Returns:
            The progress of each rank that is left.

        Raises:
            RuntimeError: the store does not answer, or the others have gone on without this rank.
        """
        if self._is_closed:
            raise RuntimeError("fastsync: this process ends") from error
        store, ranks, rank = PrefixStore("left/", self._store), self.ranks, dist.get_rank()
        self._close_connections()  # another rank may wait in the old group for this one, which does not come any more
        try:
            store.set(str(rank), str(progress))
            self._wait_for_the_others(store)
            here = [each for each in ranks if store.check([str(each)])]
            left = json.loads(store.compare_set("ranks", "", json.dumps(here)))
            progress_of = {each: int(store.get(str(each))) for each in left}
        except Exception as unreachable:
            raise RuntimeError(
                f"fastsync: rank {rank} has lost some of ranks {ranks} ({error}), and the store that would tell which "
                f"does not answer ({unreachable}); it has to live on a host that is not lost"
            ) from error
        if rank not in left:
            raise RuntimeError(
                f"fastsync: ranks {left} have gone on without rank {rank}, which came too late; start it again from "
                "their state"
            ) from error
        self._form(left)
        return progress_of

    def _wait_for_the_others(self, store: Store) -> None:
        deadline = time.monotonic() + 2 * self._timeout.total_seconds() + GRACE_SECONDS
        silences = dict.fromkeys(self.ranks, 0)  # checks in a row without a heartbeat, for each rank
        while absent := [each for each in self.ranks if not store.check([str(each)])]:
            if self._is_closed or time.monotonic() >= deadline:
                return
            if all(silences[each] >= MOST_SILENCES for each in absent):
                return
            time.sleep(POLL_SECONDS)
            silent = [self.ranks[index] for index in self._liveness.silent_ranks()]
            silences = {each: silences[each] + 1 if each in silent else 0 for each in self.ranks}

    def close(self) -> None:
        """Ends all waits in the group with an error, in other threads too, and forms no new group: the process ends."""
        self._is_closed = True
        self._close_connections()

    def _close_connections(self) -> None:
        if self.group.size() > 1:
            _C.close_connections(self.group)

    def broadcast_object(self, mine: object, source: int) -> Any:
        """Returns the object that rank ``source`` of ``ranks`` passes, as ``dist.broadcast_object_list`` does."""
        root = self.ranks.index(source)
        sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        numel = torch.tensor([sent.numel()], device="cpu")
        self.group.broadcast(numel, root).wait()
        if self.group.rank() != root:
            sent = torch.empty(int(numel), dtype=torch.uint8, device="cpu")
        self.group.broadcast(sent, root).wait()
        return pickle.loads(sent.numpy().tobytes())
