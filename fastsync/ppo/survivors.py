"""``--on-lost-rank continue``: a training goes on with the ranks that are left when one is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..distributed import close_connections, resolve_group
from ..elastic.loop import MOST_FAILURES, MembershipLoop
from ..elastic.members_store import JOINS, members_store
from ..elastic.membership import Membership
from ..errors import RankLostError
from .exchange import MissingRankError
from .settings import RunSettings

Result = TypeVar("Result")


def survivors_of(settings: RunSettings, device: torch.device) -> Survivors | None:
    """Returns what a run needs to go on without a lost rank; None if it ends then. Every rank must call it.

    Raises:
        ValueError: the run cannot go on without a rank here.
    """
    check_not_joining()
    if settings.on_lost_rank == "stop" or dist.get_world_size() == 1:
        return None
    if device.type != "cpu":
        raise ValueError(
            f"on_lost_rank='continue': a group of GPUs cannot go on without a rank, and this one is on {device}; set "
            "device to 'cpu', or use max_restarts"
        )
    store = members_store(range(dist.get_world_size()))
    if store is None:
        raise ValueError(
            "on_lost_rank='continue': the ranks that are left agree in a store that no rank holds, and there is none; "
            "start them with `fastsync train --nproc N`, or with one torchrun for each rank"
        )
    return Survivors(store, settings.timeout)


def check_not_joining() -> None:
    """Raises ValueError in a process that is to take the place of a lost rank."""
    if os.environ.get(JOINS) == "1":
        raise ValueError("the PPO trainer takes in no new ranks, so a lost one is not replaced; leave out --replace")


class Survivors:
    """The ranks that are left, and what they do together.

    Note [What a lost rank costs]
    Ranks do a training in parts, such as learning from a rollout, or saving a checkpoint. Each part ends with a
    collective in which every rank waits for all others. So who has finished a part knows that all have come to its end,
    and ranks are at most one part apart. When one is lost, the others agree on who is left, and on how many parts each
    has finished. A rank that is behind lacks only the result of its part, and gets it from another. The rank that is
    ahead, or all if none is behind, puts back what its part has changed so far, and runs it again.

    Args:
        store: a store that outlives every rank.
        timeout: seconds that a rank is waited for that is silent, but not dead.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self.group = resolve_group(None)
        """The group of the ranks that are left. Call its own methods, because torch does not list it."""
        self._num_done = 0
        self._newest: Any = None
        self._has_ended = self._is_served = False
        self._membership = MembershipLoop(
            store, dist.get_rank(), timeout, self._on_death, name="fastsync train",
            way_back="it cannot come back into this run",
        )  # fmt: skip
        self._members = self._membership.members
        self._members.begin(list(range(self.group.size())))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Says which rank is lost, if one is before ``serve``. Then the others end, because no part could run again.

        Raises:
            RankLostError: another rank is lost.
        """
        try:
            yield
        except RuntimeError as error:
            if self._is_served or not self._members.may_have_caused(error):
                raise
            self._close_group()  # another rank may wait in it for this one
            before = self.ranks
            left = self._members.agree(self._num_done, has_ended=False).members  # else they may take this one for lost
            lost = sorted({*before} - {*left})
            if not lost:
                raise
            reason = f"ranks {lost} were lost before the training had begun"
            raise RankLostError(
                f"fastsync train: {reason}, so ranks {left} end, too. Nothing was learned yet: start the run again",
                ranks=lost,
                reason=reason,
            ) from error

    def serve(self, use_group: Callable[[], None], has_failed: Callable[[], bool]) -> None:
        """Tells what a training does with another group, and how it knows of a failure.

        Args:
            use_group: goes over to ``group``. All ranks of the group call it, and a rank may be lost meanwhile.
            has_failed: tells whether the newest error is one of averaging gradients.
        """
        self._use_group, self._has_failed, self._is_served = use_group, has_failed, True

    @property
    def ranks(self) -> list[int]:
        """The numbers of the ranks that are left. Each keeps its number."""
        return self._members.now.members

    def run(self, part: Callable[[], Result], put_back: Callable[[], None] = lambda: None) -> Result:
        """Runs a part, again if a rank is lost in it. See Note [What a lost rank costs].

        Args:
            part: ends with a collective in which every rank waits for all others. Its result is the same on all ranks.
            put_back: puts back what the part has changed. It may be called several times.
        """
        tries_left = len(self.ranks) + MOST_FAILURES
        while True:
            try:
                result = part()
                break
            except (RuntimeError, ValueError) as error:
                tries_left -= 1
                if not (tries_left and self._is_of_lost_rank(error)):
                    raise
                self._close_group()  # another rank may wait in it for this one
                number = self._num_done
                self._go_on(put_back, error)
                if self._num_done > number:
                    return self._newest  # type: ignore[no-any-return]
        self._num_done, self._newest = self._num_done + 1, result
        return result

    def end(self) -> None:
        """Waits until all ranks that are left have done all parts. Then nobody is missed any more."""
        self._has_ended = True
        while not self._go_on(lambda: None).is_over:
            pass

    def _go_on(self, put_back: Callable[[], None], error: Exception | None = None) -> Membership:
        """Goes on with the ranks that are left. One that is behind gets the result of its part."""
        number = self._num_done

        def go_over(decided: Membership, group: dist.ProcessGroup) -> None:
            self.group = group
            try:
                if self._members.has_lost():  # before anybody knew of the new group
                    raise RankLostError("fastsync train: another rank is lost", reason="another rank is lost")
                if self._num_done == number == max(decided.progress.values()):
                    put_back()
                self._use_group()
                self._catch_up(decided.progress)
            except (RuntimeError, ValueError):
                self._close_group()
                raise

        return self._membership.go_on(lambda: self._members.agree(self._num_done, self._has_ended), go_over, error)

    def _catch_up(self, progress: Mapping[int, int]) -> None:
        """Gives the ranks that are behind the result of their part."""
        furthest = max(progress.values())
        if min(progress.values()) == furthest:
            return
        newest = [self._newest]
        dist.broadcast_object_list(newest, group=self.group, group_src=list(progress.values()).index(furthest))
        if self._num_done < furthest:
            self._num_done, self._newest = furthest, newest[0]

    def _is_of_lost_rank(self, error: Exception) -> bool:
        is_known = isinstance(error, MissingRankError) or self._has_failed()
        return is_known or self._members.may_have_caused(error)

    def _on_death(self, lost: int) -> None:
        if lost in self.ranks and not self._has_ended:  # others may be done sooner
            self._close_group()

    def _close_group(self) -> None:
        """Ends all waits in the group, on this rank and then on others."""
        if self.group.size() > 1:
            close_connections(self.group)
