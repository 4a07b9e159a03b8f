"""Which ranks go on together: one list, which all of them read in the store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..distributed import gloo_group
from ..errors import RanksDifferError, SyncError
from .peer_watch import PeerWatch, reachable

POLL_SECONDS = 0.004
NEWS_SECONDS = 1.0
"""After an error, how long news of a lost rank is waited for."""
LOOK_SECONDS = 0.5
"""Seconds between two looks of a process that waits to join."""
UNREACHABLE_SECONDS = 20.0
"""Such a process waits no longer for members none of which can be reached, as after the end of the training."""
PROCESS = "FASTSYNC_PROCESS"
"""Environment variable: this process's number in ``fastsync launch local``, which asks for the rank it has become."""


class TooFewRanksError(SyncError):
    """Fewer ranks are left than the training needs. ``ranks`` are those that are left."""


@dataclass(frozen=True)
class Membership:
    """The ranks that go on together, and how far each had come."""

    epoch: int
    progress: dict[int, int]
    """The number of steps that each rank has finished, by its number; -1 for one that is new."""
    addresses: dict[int, str] = field(repr=False)
    """Where each rank can be watched."""
    is_over: bool = False
    """Whether all of them have finished the last step."""

    @property
    def members(self) -> list[int]:
        return list(self.progress)

    @property
    def needs_nothing(self) -> bool:
        """Whether all of them have finished the last step, and have its result."""
        return self.is_over and len({*self.progress.values()}) == 1

    def to_json(self) -> str:
        return json.dumps([self.epoch, list(self.progress.items()), list(self.addresses.items()), self.is_over])

    @classmethod
    def from_json(cls, text: str | bytes) -> Membership:
        epoch, progress, addresses, is_over = json.loads(text)
        return cls(epoch, dict(progress), dict(addresses), is_over)


class Members:
    """Agrees with the other ranks, again and again, on who goes on.

    Note [One membership]
    A membership has a number, its epoch. When a step has failed, or a rank wants to join, each member writes to the
    store that it is here, and how far it has come. It waits for the other members, but not for those that are dead, and
    for silent ones until the time-out. Then it proposes the ranks that are here, and the new ones, as the next
    membership. The proposal that comes first holds, by one atomic operation of the store. A rank that is not in it was
    taken for lost, and ends. So there are never two halves, whatever a rank believes of the others.
    """

    def __init__(
        self,
        store: Store,
        own: int,
        watch: PeerWatch,
        timeout: float,
        min_ranks: int = 1,
        max_ranks: int | None = None,
        name: str = "fastsync.Elastic",
        way_back: str = "start it again, and it joins them",
    ) -> None:
        self._store = store
        self.name, self._way_back = name, way_back  # for messages
        self.own = own
        self._watch = watch
        self._timeout = timeout
        self._min_ranks = min_ranks
        self._max_ranks = max_ranks
        self.now = Membership(-1, {}, {})

    def begin(self, members: list[int]) -> None:
        """Takes these ranks, all of which call this, as the first membership.

        Raises:
            ValueError: the store has the keys of an earlier training.
            RuntimeError: a rank is missing.
        """
        if self._store.check(["newest"]):  # nobody sets it before all have looked
            raise ValueError(
                "store: an earlier training has used it; pass a new one, such as a new file, or let FASTSYNC_STORE "
                "name a new one"
            )
        self._store.set(f"address/{self.own}", self._watch.address)
        addresses = {each: self._store.get(f"address/{each}").decode() for each in members}
        if self.own == members[0]:
            self._store.set("size", str(max(members) + 1))
        self._take(Membership(0, dict.fromkeys(members, 0), addresses))

    def agree(
        self,
        progress: int,
        has_ended: bool,
        *,
        takes_new: bool = True,
        silent: Callable[[], Set[int]] = frozenset,
    ) -> Membership:
        """Returns the next membership, see Note [One membership].

        Args:
            progress: how far this rank has come.
            has_ended: whether it has taken the last step.
            takes_new: whether a new rank could do what this rank does next. The one that has come furthest decides.
            silent: returns ranks that are not waited for either. It is asked while ranks are missing that are not dead.

        Raises:
            TooFewRanksError: no more than so many ranks are left.
            RanksDifferError: a rank has raised it, so none may go on.
            RuntimeError: the others have gone on without this rank.
        """
        here = PrefixStore(f"{self.now.epoch}/here", self._store)
        here.set(str(self.own), json.dumps([progress, has_ended, takes_new]))
        key = f"{self.now.epoch}/next"
        deadline = time.monotonic() + self._timeout
        ended = f"{self.now.epoch}/ended"
        while not self._store.check([key]):
            if self._store.check([ended]):
                raise RanksDifferError(self._store.get(ended).decode())
            dead = self._watch.dead()
            came = {each: here.check([str(each)]) for each in self.now.members}
            missing = {each for each in came if not came[each]} - dead
            is_late = time.monotonic() >= deadline
            if not is_late and missing and not missing <= silent():
                time.sleep(POLL_SECONDS)
                continue
            told = {each: json.loads(here.get(str(each))) for each in came if came[each]}
            *_, new_are_taken = max(told.values())
            new = self._waiting(self._store, len(told)) if new_are_taken else {}
            if len(told) + len(new) >= self._min_ranks:
                self._store.compare_set(key, "", self._proposal(told, new).to_json())
            elif is_late:
                reason = f"{len(told)} of ranks {self.now.members} are left, and min_ranks={self._min_ranks}"
                raise TooFewRanksError(
                    f"{self.name}: {reason}; no others have joined within {self._timeout:g} s",
                    ranks=told,
                    step=progress,
                    reason=reason,
                )
            else:
                time.sleep(LOOK_SECONDS / 2)
        decided = Membership.from_json(self._store.get(key))
        if self.own not in decided.progress:
            reason = (
                f"ranks {decided.members} have gone on without rank {self.own}, which was silent for "
                f"{self._timeout:g} s, or could not be reached"
            )
            raise SyncError(f"{self.name}: {reason}; {self._way_back}", ranks=[self.own], step=progress, reason=reason)
        self._take(decided)
        return decided

    def _proposal(self, told: Mapping[int, tuple[int, bool, bool]], new: Mapping[int, str]) -> Membership:
        is_over = all(has_ended for _, has_ended, _ in told.values())
        progress = {each: steps for each, (steps, *_) in told.items()}
        addresses = {each: self.now.addresses[each] for each in told}
        if not is_over:
            progress |= dict.fromkeys(new, -1)
            addresses |= new
        return Membership(self.now.epoch + 1, progress, addresses, is_over)

    def _take(self, membership: Membership) -> None:
        before, self.now = self.now, membership
        for gone in before.progress.keys() - membership.progress.keys():
            self._store.set(f"address/{gone}", "")  # else one that is stopped would seem to wait for joining
        self._watch.watch({each: at for each, at in membership.addresses.items() if each != self.own})
        self._store.set("newest", membership.to_json())
        if before.epoch < 0 and (process := os.environ.get(PROCESS)):
            self._store.set(f"process/{process}", str(self.own))
        if self.own == membership.members[0] and before.epoch > 0:
            self._forget(before.epoch - 1)

    def _forget(self, epoch: int) -> None:
        """Deletes the keys of an old membership, which all ranks have left."""
        with suppress(RuntimeError, NotImplementedError):  # a FileStore does not list its keys
            for key in self._store.list_keys():
                # Decisions stay, or a rank that wakes up late would make one of its own.
                if key.startswith((f"{epoch}/here/", f"{epoch}/ready/", f"{epoch}/left", f"group{epoch}/")):
                    self._store.delete_key(key)

    def wait_until_ready(self) -> bool:
        """Waits until all members have come here. Returns false if one is lost meanwhile."""
        ready = PrefixStore(f"{self.now.epoch}/ready", self._store)
        ready.set(str(self.own), "")
        deadline = time.monotonic() + self._timeout
        while not all(ready.check([str(each)]) for each in self.now.members):
            if self.has_lost() or time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def form_group(self) -> dist.ProcessGroup | None:
        """Forms the members' group. Returns None if one of them is lost: then the connecting thread ends by itself."""
        made: list[dist.ProcessGroup] = []
        members = self.now.members
        rank, store = members.index(self.own), PrefixStore(f"group{self.now.epoch}", another_connection(self._store))

        def connect() -> None:
            with suppress(RuntimeError):
                limit, name = timedelta(seconds=self._timeout), f"fastsync: ranks {members}"
                made.append(gloo_group(store, rank, len(members), limit, name))

        thread = threading.Thread(target=connect, name="fastsync connects", daemon=True)
        thread.start()
        while thread.is_alive() and not self.has_lost():
            thread.join(0.05)
        return made[0] if made and not thread.is_alive() else None

    def has_lost(self) -> bool:
        """Whether a member is dead."""
        return not self._watch.dead().isdisjoint(self.now.members)

    def is_ending(self) -> bool:
        """Whether a member is dead, or has left this membership after an error."""
        others = [f"{self.now.epoch}/here/{each}" for each in self.now.members if each != self.own]
        return self.has_lost() or any(self._store.check([other]) for other in others)

    def break_off(self, progress: int) -> None:
        """Tells the others that this rank ends after so many steps, and that they wait for it in vain afterwards."""
        self._store.set(f"{self.now.epoch}/left", str(progress))

    def is_missed(self, step: int, store: Store) -> bool:
        """Whether a member has broken off before this step. ``store`` is another connection, for another thread."""
        key = f"{self.now.epoch}/left"
        return store.check([key]) and int(store.get(key)) <= step

    def may_have_caused(self, error: BaseException) -> bool:
        """Whether an error may come from a group that has lost a member. Waits a moment for news of it.

        If the error tells that the ranks differ, no member goes on.
        """
        if isinstance(error, RanksDifferError):  # which every rank raises, but one may see this rank leave before
            self._store.set(f"{self.now.epoch}/ended", str(error))
            return False
        if isinstance(error, dist.DistError):
            return True
        # torch.distributed raises a ValueError in place of a failed collective's error, as it does not list the group.
        if isinstance(error, RuntimeError | ValueError):
            deadline = time.monotonic() + NEWS_SECONDS  # a collective may notice a death before the watch does
            while not self.is_ending():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL_SECONDS)
            return True
        return False

    # ---- new ranks --------------------------------------------------------------------------------------------------

    def wants_to_change(self, store: Store) -> bool:
        """Whether a rank waits that may join. ``store`` is another connection, for another thread."""
        return bool(self._waiting(store, len(self.now.members)))

    def _waiting(self, store: Store, num_ranks: int) -> dict[int, str]:
        """Returns the addresses of those that wait to join, at most as many as there is room for beside so many."""
        found: dict[int, str] = {}
        size = int(store.get("size"))
        for each in range(size, size + store.add("joined", 0)):
            if self._max_ranks is not None and num_ranks + len(found) >= self._max_ranks:
                break
            if each in self.now.progress or not store.check([f"address/{each}"]):
                continue
            address = store.get(f"address/{each}").decode()
            if not address:
                continue
            if reachable(address):
                found[each] = address
            else:  # it tells the address again if it lives
                store.set(f"address/{each}", "")
        return found

    def join(self) -> Membership | None:
        """Waits until the others take this process in. Returns None if the training is over.

        Raises:
            RuntimeError: none of them could be reached for some seconds.
        """
        size = int(self._store.get("size"))
        self.own = size + self._store.add("joined", 1) - 1
        seen, limit = time.monotonic(), min(self._timeout, UNREACHABLE_SECONDS)
        while True:
            self._store.set(f"address/{self.own}", self._watch.address)
            newest = newest_membership(self._store)
            if newest.is_over:
                return None
            if self.own in newest.progress:
                self._store.set(f"address/{self.own}", "")
                self._take(newest)
                return newest
            if any(reachable(address) for address in newest.addresses.values()):
                seen = time.monotonic()
            elif time.monotonic() - seen > limit:
                reason = (
                    f"this process waited to join ranks {newest.members}, none of which could be reached for "
                    f"{limit:g} s"
                )
                text = f"{self.name}: {reason}; they have ended, or are lost"
                raise SyncError(text, ranks=newest.members, reason=reason)
            time.sleep(LOOK_SECONDS / 2)

    def leave(self) -> None:
        """Tells the others at once that this rank does not go on."""
        self._watch.close()


def newest_membership(store: Store) -> Membership:
    """Returns the newest membership. Waits until there is one."""
    newest = Membership.from_json(store.get("newest"))
    while store.check([f"{newest.epoch}/next"]):  # a slow member may have written an old one last
        newest = Membership.from_json(store.get(f"{newest.epoch}/next"))
    return newest


def rank_of_process(store: Store, process: int) -> int | None:
    """Returns the rank that a process of ``fastsync launch local`` has become, or None."""
    key = f"process/{process}"
    return int(store.get(key)) if store.check([key]) else None


def another_connection(store: Store) -> Store:
    """Returns another connection to a store. One connection serves one thread at a time."""
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def host_of(store: Store) -> str:
    """Returns the host that holds a store or, where that is not known, the one that the ranks meet at."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "localhost")
