"""A process group that goes on with the ranks that are left when one is lost, and takes in new ones."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from .. import _C
from .._torch_compat import default_store
from ..elastic.loop import MembershipLoop
from ..elastic.members_store import JOINS, STORE, members_store
from ..elastic.membership import Membership, another_connection
from ..errors import SyncError

MOST_SILENCES = 2  # checks in a row without a heartbeat after which a rank is given up; each takes some seconds
PATIENCE_SECONDS = 1.0  # before the first check
KEPT_MEANS = 4  # ranks of a site are never so many means apart
_num_made = 0

Progress = Mapping[int, int]
"""How far each rank has come, by its number; -1 for one that is new."""


class RankJoinsError(SyncError):
    """A rank waits to join. The members break off what they do, and go on with it."""


class SurvivingGroup:
    """A Gloo group over the ranks of another group, independent of that group's calls.

    Its ranks agree as those of ``Elastic`` do, see Note [One membership]. They do so in the launcher's store, which
    outlives them, and where a new process finds them. Without a launcher that has one, they agree in the store of the
    default group. Then no process can join, and the rank that holds this store may not be lost.

    A process that the launcher has started to join has no group at first: ``go_on`` waits until the others take it in.
    """

    group: dist.ProcessGroup
    """The current group, replaced after each change. Call its own methods; see ``gloo_group``."""

    def __init__(self, process_group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.joins = os.environ.get(JOINS) == "1"
        """Whether this process joins others, which have begun."""
        self._is_closed = self._wants_change = False
        ranks = dist.get_process_group_ranks(process_group)
        name = "" if self.joins else _name_of(process_group)
        store = members_store(ranks)
        can_join = store is not None
        self._common_store = _common_store(store, ranks)
        if store is None:
            if self.joins:
                raise ValueError(f"{JOINS}=1: this process is to join others, and {STORE} does not tell where they are")
            store = PrefixStore(name, another_connection(default_store()))
        # Where a rank ends, the group's own connections break, and nobody is missed after the end.
        self._membership = MembershipLoop(
            store, dist.get_rank(), timeout.total_seconds(), look=self._look if can_join else None, name="fastsync",
            way_back="start it again, and it joins them" if can_join else "start it again from their state",
        )  # fmt: skip
        self._members = self._membership.members
        self._liveness: _C.Liveness | None = None
        self._formed: list[int] = []  # the members of the group, by their places in it
        if not self.joins:
            self._members.begin(ranks)
            self._form_first()

    @property
    def ranks(self) -> list[int]:
        """The members. They have the numbers of their ranks in the default group, and a new one gets a new number."""
        return self._members.now.members

    @property
    def own(self) -> int:
        """This rank's number."""
        return self._members.own

    def _form_first(self) -> None:
        group = self._membership.form_group()
        if group is None:
            dead = sorted(self._membership.watch.dead())
            unreachable = {each: self._members.now.addresses[each] for each in dead}
            reason = (
                f"rank {self.own} could not connect to all of ranks {self.ranks}; these did not answer: {unreachable}"
            )
            raise SyncError(
                f"fastsync: {reason}. If these addresses are not those of the link between sites, set "
                "GLOO_SOCKET_IFNAME to its interface, on every host",
                ranks=unreachable,
                reason=reason,
            )
        self._use(group)

    def _use(self, group: dist.ProcessGroup) -> None:
        self.group, self._formed = group, self.ranks
        self._liveness = _C.Liveness(group, "sites")

    # ---- changes ----------------------------------------------------------------------------------------------------

    def let_in(self) -> None:
        """Raises RankJoinsError on the first member if a rank waits to join.

        The others need not be asked: the first one closes its connections and calls ``go_on``, and then they do.
        """
        if self._wants_change:
            raise RankJoinsError("fastsync: a rank waits to join")

    def _look(self, store: Store) -> None:
        """Looks whether a rank waits to join, on the first member."""
        if self.ranks[:1] == [self.own]:
            with suppress(RuntimeError):
                self._wants_change = self._members.wants_to_change(store)

    def go_on(
        self,
        progress: Callable[[], int],
        share: Callable[[Progress], None],
        error: Exception | None = None,
        *,
        takes_new: bool = True,
    ) -> None:
        """Forms a group of the ranks that are left, and of new ones, once an error has shown that some are lost.

        A rank whose process has ended is given up at once, and one without a heartbeat after some seconds. One that is
        only late is waited for until the time-out. Without a ``TCPStore`` or ``FileStore`` there are no heartbeats. The
        old group ends with its last reference.

        Args:
            progress: tells how far this rank has come.
            share: makes the ranks of the new group equal. If it fails, as another rank is lost, all try again.
            error: what went wrong.
            takes_new: whether a new rank could do what this rank does next.

        Raises:
            ValueError: this rank is new, and ``share`` has refused it.
            RuntimeError: the store does not answer, or the others have gone on without this rank.
        """

        def agree() -> Membership:
            if self._is_closed:
                raise RuntimeError("fastsync: this process ends") from error
            self._close_connections()  # another rank may wait in the old group for this one, which does not come
            decided = self._agree(progress(), takes_new, error) if self.ranks else self._members.join()
            assert decided is not None  # these ranks never tell that the training is over
            self._wants_change = False
            return decided

        def go_over(decided: Membership, group: dist.ProcessGroup) -> None:
            self._use(group)
            share(decided.progress)

        self._membership.go_on(agree, go_over, error)

    def _agree(self, progress: int, takes_new: bool, error: Exception | None) -> Membership:
        try:
            return self._members.agree(progress, has_ended=False, takes_new=takes_new, silent=self._silences())
        except dist.DistError as unreachable:
            reason = (
                f"rank {self.own} has lost some of ranks {self.ranks} ({error}), and the store that would tell which "
                f"does not answer ({unreachable})"
            )
            text = f"fastsync: {reason}; it has to live on a host that is not lost"
            raise SyncError(text, step=progress, reason=reason) from error

    def check_same_sites(self, number: int, sites: Sequence[int], own_site: Sequence[int]) -> None:
        """Checks that the ranks of this site have averaged the same sites in a mean, before they move their weights.

        Each of them averages in a group of its own, which alone decides who is left. If a rank is lost amid a mean, one
        group may have it with the lost site, and another one without. The first rank's sites hold.

        Raises:
            RuntimeError: this rank's are others.
        """
        key = f"site {own_site}/mean {{}}"
        mine = json.dumps([*sites])
        theirs = self._common_store.compare_set(key.format(number), "", mine).decode()
        if theirs != mine:
            self._members.leave()
            reason = (
                f"Rank {self.own} has averaged the sites of ranks {mine}, and another rank of its site {[*own_site]} "
                f"those of ranks {theirs}"
            )
            raise SyncError(
                f"fastsync: a rank was lost amid a mean of the sites. {reason}, so the weights in this site would "
                "part. The training cannot go on; start it again from the checkpoints of all ranks",
                ranks={*sites} ^ {*json.loads(theirs)},
                step=number,
                reason=reason,
            )
        with suppress(RuntimeError, NotImplementedError):
            self._common_store.delete_key(key.format(number - KEPT_MEANS))

    def _silences(self) -> Callable[[], set[int]]:
        """Makes a function that returns the ranks without a heartbeat. Each of its calls may take some seconds."""
        liveness, ranks, silences, began = self._liveness, self._formed, Counter[int](), time.monotonic()

        def silent() -> set[int]:
            nonlocal silences
            if liveness is None or time.monotonic() - began < PATIENCE_SECONDS:
                return set()
            with suppress(RuntimeError):  # the store does not answer
                silences = Counter({ranks[at]: silences[ranks[at]] + 1 for at in liveness.silent_ranks()})
            return {each for each, number in silences.items() if number >= MOST_SILENCES}

        return silent

    def close(self) -> None:
        """Ends all waits in the group with an error, in other threads too, and forms no new group: the process ends."""
        self._is_closed = True
        self._members.leave()
        self._close_connections()

    def _close_connections(self) -> None:
        if self._liveness is not None and self.group.size() > 1:
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


def _common_store(of_group: Store | None, ranks: Sequence[int]) -> Store:
    """Returns the part of a store that is the same one in all groups with one rank of each site."""
    global _num_made
    if of_group is None:
        _num_made += 1
        of_group = PrefixStore(f"fastsync/sites{_num_made}", default_store())
    elif ranks[0] != 0 and isinstance(of_group, PrefixStore):  # as members_store() makes it
        of_group = of_group.underlying_store
    return another_connection(of_group)


def _name_of(process_group: dist.ProcessGroup) -> str:
    """Waits for all ranks, and returns one name. They need not have made equal numbers of groups before."""
    names = [""] * process_group.size()
    dist.all_gather_object(names, f"fastsync/{uuid4().hex}", group=process_group)
    return names[0]
