"""``--on-lost-rank continue``: a training goes on with the ranks that are left when one is lost."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from .. import _C
from .._checks import resolve_group
from ..elastic.elastic import JOINS, MOST_FAILURES, RankLostError, members_store
from ..elastic.membership import Members, host_of
from ..elastic.peer_watch import PeerWatch
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
        on_death = weakref.WeakMethod(self._on_death)
        self._watch = PeerWatch(
            host_of(store),
            on_death=lambda lost: known(lost) if (known := on_death()) else None,
            look=lambda: None,
        )
        weakref.finalize(self, self._watch.close)
        told: dict[str, Any] = {"name": "fastsync train", "way_back": "it cannot come back into this run"}
        self._members = Members(store, dist.get_rank(), self._watch, timeout, **told)
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
            raise RankLostError(
                f"fastsync train: ranks {lost} were lost before the training had begun, so ranks {left} end, too. "
                "Nothing was learned yet: start the run again"
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
                if self._go_on(put_back, error):
                    return self._newest  # type: ignore[no-any-return]
        self._num_done, self._newest = self._num_done + 1, result
        return result

    def end(self) -> None:
        """Waits until all ranks that are left have done all parts. Then nobody is missed any more."""
        self._has_ended = True
        self._go_on(lambda: None, None)

    def _go_on(self, put_back: Callable[[], None], error: Exception | None) -> bool:
        """Goes on with the ranks that are left. Returns whether this rank has got the result of its part."""
        number = self._num_done
        for _ in range(len(self.ranks) + MOST_FAILURES):
            decided = self._members.agree(self._num_done, self._has_ended)
            if decided.is_over:
                return False
            group = self._members.form_group() if self._members.wait_until_ready() else None
            if group is None:
                continue
            self.group = group
            try:
                if self._members.has_lost():  # before anybody knew of the new group
                    raise RuntimeError("fastsync train: another rank is lost")
                if self._num_done == number == max(decided.progress.values()):
                    put_back()
                self._use_group()
                self._catch_up(decided.progress)
            except (RuntimeError, ValueError) as another:
                if not self._is_of_lost_rank(another):
                    raise
                error = another
                self._close_group()
                continue
            if not self._has_ended:
                return self._num_done > number
        raise RuntimeError(f"fastsync train: ranks {self.ranks} could not go on together") from error

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
            _C.close_connections(self.group)


class Before:
    """What learning from a rollout changes in a ``ppo.PPO``, as it was before."""

    def __init__(self, ppo: Any) -> None:
        self._ppo = ppo
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._named_tensors()}
        self._states = copy.deepcopy([part.state_dict() for part in self._parts()])
        self._rate = copy.deepcopy(ppo.learning_rate.state_dict())
        self._numbers = ppo.step, ppo.update, ppo.streams.num_draws
        self._world_size = ppo.exchange.world_size
        self._random = torch.get_rng_state()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        modules = {"policy": self._ppo.policy, "rewards": self._ppo.reward_normalizer}
        for prefix, module in modules.items():
            if module is not None:
                yield from module.named_parameters(prefix)
                yield from module.named_buffers(prefix)

    def _parts(self) -> tuple[Any, ...]:
        return self._ppo.optimizer, self._ppo.scaler, self._ppo.sync

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts it back. What averaging still waits for ends first."""
        ppo = self._ppo
        ppo.sync._end_interrupted()
        for name, tensor in self._named_tensors():
            tensor.copy_(self._tensors[name])
        *_, averaging = states = copy.deepcopy(self._states)
        for residual in averaging["residuals"].values():  # adds as much to the mean of fewer ranks, see use_group()
            residual *= ppo.sync._group.size() / self._world_size
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)
        ppo.learning_rate.put_back(self._rate)
        ppo.step, ppo.update, ppo.streams.num_draws = self._numbers
        torch.set_rng_state(self._random)
