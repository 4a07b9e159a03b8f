"""One loop for all who go on without lost ranks: agree on the members, form their group, and make them equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import SyncError
from .membership import Members, Membership, another_connection, host_of
from .peer_watch import PeerWatch

MOST_FAILURES = 3
"""A new group may fail so often, and once for each rank that may be lost meanwhile."""


class MembershipLoop:
    """The ranks that go on together, and how they come from one group to the next. See Note [One membership].

    Args:
        store: outlives every rank.
        own: this rank's number.
        timeout: seconds that a rank is waited for that is silent, but not dead.
        on_death: a method that is called in another thread with the number of a rank that has ended.
        look: a method that is called in that thread now and then, with a connection to the store for it alone.
        options: of ``Members``.
    """

    def __init__(
        self,
        store: Store,
        own: int,
        timeout: float,
        on_death: Callable[[int], None] | None = None,
        look: Callable[[Store], None] | None = None,
        **options: Any,
    ) -> None:
        # The watch must not keep their owner alive, which ends it.
        known_death = None if on_death is None else weakref.WeakMethod(on_death)
        known_look = None if look is None else weakref.WeakMethod(look)
        look_store = another_connection(store)

        def died(lost: int) -> None:
            if known_death is not None and (call := known_death()) is not None:
                call(lost)

        def looks() -> None:
            if known_look is not None and (call := known_look()) is not None:
                call(look_store)

        self.watch = PeerWatch(host_of(store), on_death=died, look=looks)
        weakref.finalize(self, self.watch.close)
        self.members = Members(store, own, self.watch, timeout, **options)

    def form_group(self) -> dist.ProcessGroup | None:
        """Forms the members' group. Returns None if one of them is lost meanwhile."""
        return self.members.form_group() if self.members.wait_until_ready() else None

    def go_on(
        self,
        agree: Callable[[], Membership],
        share: Callable[[Membership, dist.ProcessGroup], None],
        error: Exception | None = None,
        first: Membership | None = None,
    ) -> Membership:
        """Goes on with the ranks that are left, and with new ones. All members call it.

        Args:
            agree: returns the next membership, that of ``Members``. It is called again after each failure.
            share: goes over to the group of this membership, and makes its ranks equal. If it fails, as another rank is
                lost, it leaves this rank as it was, and all try again.
            error: what went wrong before.
            first: the membership to begin with, which all know. Whoever fails in it may try again.

        Returns:
            The membership that all have taken. If all of them have finished the last step, nothing is shared.

        Raises:
            ValueError: this rank is new, and ``share`` has refused it.
            RuntimeError: the others have gone on without this rank. Or too few are left, or none that has the state. Or
                the ranks that are left cannot go on together.
        """
        num_failures = 0
        try:
            while True:
                decided = first or agree()
                if decided.needs_nothing:
                    return decided
                if max(decided.progress.values()) < 0:
                    all_lost = "all ranks are lost that had the training's state"
                    raise SyncError(f"{self.members.name}: {all_lost}; start it again", reason=all_lost) from error
                group = self.form_group()
                if group is not None:
                    try:
                        share(decided, group)
                        return decided
                    except (RuntimeError, ValueError) as another:  # torch raises both for a group that has lost a rank
                        if self._is_refused(decided, another):
                            raise
                        error = another
                first = None
                num_failures += 1
                if num_failures > len(decided.members) + MOST_FAILURES:
                    reason = f"ranks {decided.members} could not go on together, {num_failures} times"
                    raise SyncError(
                        f"{self.members.name}: {reason}",
                        ranks=decided.members,
                        step=max(decided.progress.values()),
                        reason=reason,
                    ) from error
        except BaseException:
            if first is None:
                self.members.leave()
            raise

    def _is_refused(self, decided: Membership, error: Exception) -> bool:
        """Whether this rank is new, and has other settings. Then the others go on without it."""
        is_new = decided.progress[self.members.own] < 0
        return is_new and isinstance(error, ValueError) and not self.members.has_lost()
