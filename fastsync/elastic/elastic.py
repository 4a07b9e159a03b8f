"""``Elastic``: a training goes on when a rank is lost, in the same step, and new ranks join between two steps."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from .. import _C
from ..distributed import every_rank_calls
from ..errors import RankLostError, RanksDifferError
from ..messages import check_at_least
from ..sync.elastic_in_use import begin_elastic_use
from ..sync.grad_scaler import forget_step
from ..sync.handles_in_use import handles_of
from ..sync.optimizer_steps import innermost, unwrapped
from ..sync.outer_in_use import check_no_outer
from ..sync.synchronizer import GradientSynchronizer
from ..sync.training_state import TrainingState
from .kept_states import KeptStates
from .loop import MOST_FAILURES, MembershipLoop
from .members_store import JOINS, STORE, members_store
from .membership import Membership
from .step import Step

_NO_STORE = (
    "store: the ranks that are left agree in a store that no rank holds, and there is none. Start the ranks with "
    "`fastsync launch local -n 4 train.py`, with one torchrun for each rank, or pass a store of your own, such as "
    "torch.distributed.FileStore on a disk that all hosts share"
)


@dataclass(frozen=True)
class _Undone:
    """What a failed step had changed before it was taken back. It holds again if another rank has finished the step."""

    random_state: Tensor
    residuals: dict[str, Tensor]
    num_ranks: int


class Elastic:
    """Lets a training go on with the ranks that are left when one is lost, and takes in new ones.

    Put each step into a block::

        elastic = fastsync.Elastic(model, optimizer, sync, state=[scheduler])
        for step in elastic.steps(10_000):
            with step:
                loss = loss_of(model, batches[step.index, elastic.rank, elastic.num_ranks])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

    If a rank is lost inside the block, the others leave it, agree on who is left, and run the same step again. So no
    step is dropped, and each mean is over one and the same ranks. Where some have finished the step already, the others
    take over their state. New ranks come in between two steps, and take over the state of another. That is: parameters
    and buffers, the optimizer, and ``state``. Nothing else is shared.

    Before a step runs again, gradients are dropped. Buffers, torch's random state on the CPU, the residuals of error
    feedback, the optimizer's settings, such as learning rates, and ``state`` become what they were. A GradScaler takes
    the new gradients as if it had not seen the first. Nothing else is put back: let ``step.index`` choose the data.

    Args:
        model: the model that ``sync`` was attached to. Its gradients have to be on the CPU.
        optimizer: steps once in each block, or not at all. What follows it in the block must not need other ranks. A
            list of several is allowed, such as Muon and AdamW for different parameters.
        sync: what ``attach`` has returned.
        state: all else that counts steps, such as schedulers, GradScalers, averages of weights and data loaders. They
            need ``state_dict`` and ``load_state_dict``. Every rank passes the same ones, in the same order. Their
            states are copied before each step.
        min_ranks: with fewer ranks the training ends. Before, it waits for new ones for ``timeout``.
        max_ranks: with that many ranks, others that want to join wait until one is lost.
        timeout: how long a rank that is silent, but not dead, is waited for, in seconds.
        on_change: is called on every rank with ``members`` after each change, before the step runs again.
        store: a store that outlives every rank. By default that of ``fastsync launch local``, or of torchrun's agent.
            Other hosts reach this one by the interface that GLOO_SOCKET_IFNAME names, or that leads to the store.

    Raises:
        ValueError: an argument is refused, or there is no store that outlives the ranks. In a step: an optimizer steps
            the model that was not given, or whose scheduler or GradScaler was not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        sync: GradientSynchronizer,
        *,
        state: Sequence[Any] = (),
        min_ranks: int = 1,
        max_ranks: int | None = None,
        timeout: float = 60.0,
        on_change: Callable[[Sequence[int]], object] | None = None,
        store: Store | None = None,
    ) -> None:
        self._optimizers: list[Optimizer] = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self._check(model, sync, timeout)
        self._state = self._checked_state(sync, state)
        self.min_ranks, self.max_ranks = min_ranks, max_ranks
        check_at_least(self, min_ranks=1, max_ranks=max(1, min_ranks))
        self._model, self._sync = model, sync
        self._step = Step(sync._engine, model, own=lambda: self._members.own, fail=self._fail)
        self._on_change = on_change
        store = members_store(dist.get_process_group_ranks(sync._group), store)
        if store is None:
            raise ValueError(_NO_STORE)
        limits = {"min_ranks": min_ranks, "max_ranks": max_ranks}
        own = dist.get_rank(sync._group)
        self._membership = MembershipLoop(store, own, timeout, self._on_death, self._look, **limits)
        self._members = self._membership.members
        self._joins = os.environ.get(JOINS) == "1"
        if not self._joins:
            self._check_number(sync._group.size())
            with every_rank_calls("fastsync.Elastic", sync._group):
                self._state.agree(sync._group, torch.device("cpu"))
        self._is_in_use = self._has_begun = self._has_ended = self._has_failed = False
        self._undone: _Undone | None = None
        self._num_failed = 0
        self._failed_at: tuple[int, ...] = ()  # the step, and the members
        self._kept = KeptStates(self._optimizers, self._state.others(self._optimizers))
        self._step.watch([*dict.fromkeys(map(innermost, self._optimizers))])
        begin_elastic_use(self, sync._ids)
        _warn_of_agent()
        if not self._joins:
            self._members.begin(list(range(sync._group.size())))

    def _check(self, model: nn.Module, sync: GradientSynchronizer, timeout: float) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: expected a module, got {type(model).__name__}")
        for each in self._optimizers:
            if not isinstance(each, Optimizer):
                raise ValueError(
                    f"optimizer: expected a torch.optim.Optimizer, or a list of them, got {type(each).__name__}"
                )
        if not isinstance(sync, GradientSynchronizer):
            raise ValueError(
                f"sync: expected what fastsync.attach() returns, got {type(sync).__name__}; DDP and FSDP2 bind the "
                "model to one process group, so a lost rank ends them: see docs/guides/losing_ranks.md"
            )
        if sync._optimizer_shards is not None:
            raise ValueError(
                "sync: with shard_optimizer a lost rank takes its shard of the optimizer's state with it; leave "
                "shard_optimizer out, on every rank"
            )
        check_no_outer(
            model.parameters(), "model", "a lost or new rank would be one of Elastic's and none of that one's. "
            "Leave Elastic out, as that one goes on without lost sites; or delete that object first",
        )  # fmt: skip
        if sync not in handles_of(model):
            raise ValueError(
                "model: expected the module that attach() was given, because new ranks take its parameters and buffers"
            )
        stepped = {id(parameter) for each in self._optimizers for parameter in sync._stepped_by(each)}
        if not {*map(id, sync.parameters())} <= stepped:
            names = " and ".join(type(each).__name__ for each in self._optimizers) or "empty list"
            raise ValueError(
                f"optimizer: this {names} does not step all trained parameters of the model; pass a list of all "
                "optimizers that step it"
            )
        if sync._shared is not None:
            raise RuntimeError(
                "fastsync.Elastic: it was made inside join() of the same weights; steps() tells each rank how many "
                "there are, so leave join() out"
            )
        if not timeout > 0:
            raise ValueError(f"timeout: expected a positive number of seconds, got {timeout!r}")
        device = next(iter(sync._named.values())).device
        if device.type != "cpu":
            raise ValueError(
                f"model: it is on {device}, and a group of GPUs cannot go on without a rank yet; let the launcher "
                "start all ranks again from a checkpoint, as torchrun --max-restarts does"
            )

    def _checked_state(self, sync: GradientSynchronizer, state: Sequence[Any]) -> TrainingState:
        """Returns what ranks share. Raises ValueError for what belongs into another argument, or has no state."""
        if not isinstance(state, list | tuple):
            raise ValueError(f"state: expected a list of objects, got {type(state).__name__}; write state=[...]")
        for each in state:
            found = unwrapped(each)
            if found is not None and any(True for _ in sync._stepped_by(found)):
                raise ValueError(
                    f"state: this {type(each).__name__} steps parameters of the model; pass it in optimizer=[...]"
                )
        given = [*self._optimizers, *state]
        return TrainingState(given, "state=[scheduler, scaler, ...] of fastsync.Elastic", sync._left_to_each_rank())

    def _check_number(self, num_ranks: int) -> None:
        if num_ranks < self.min_ranks or (self.max_ranks is not None and num_ranks > self.max_ranks):
            raise ValueError(
                f"min_ranks={self.min_ranks}, max_ranks={self.max_ranks}: {num_ranks} ranks have made this Elastic"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(step {self._step.num_finished} of rank {self._members.own}, members {self.members})"
        )

    # ---- what a training asks ---------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """The numbers of the ranks that train together. A rank keeps its number, and a new one gets a new number."""
        return self._members.now.members

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        if self._members.own not in self.members:
            raise RuntimeError("fastsync.Elastic: this process joins when the loop over steps() begins; ask then")
        return self.members.index(self._members.own)

    @property
    def num_ranks(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def has_ended(self) -> bool:
        """Whether the loop over its steps has ended."""
        return self._has_ended

    @property
    def group(self) -> dist.ProcessGroup:
        """The members' process group, for collectives of your own inside a step. It is another one after a change."""
        return self._sync._group

    # ---- the steps --------------------------------------------------------------------------------------------------

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yields each step up to ``num_steps``, to put a ``with`` block on. One that has failed comes again.

        A process that joins first waits until the others take it in. A rank that breaks out of the loop leaves the
        training, and the others go on without it. If it does so inside the block, before the optimizer has stepped, the
        step is the others' alone. If all break out after the same step, the training ends there.

        Raises:
            SystemExit: the training was over before this process could join it.
            RuntimeError: the others have gone on without this rank. Or fewer than ``min_ranks`` are left.
        """
        if self._has_ended:
            raise RuntimeError("fastsync.Elastic: steps() has ended; put all steps of a training into one loop")
        self._begin()
        try:
            with self._sync._sharing(self._state):
                yield from self._loop(num_steps)
        finally:
            self._step.is_in_loop = False

    def _loop(self, num_steps: int) -> Iterator[Step]:
        step = self._step
        step.is_in_loop = True
        while True:
            while step.goes_on(num_steps):
                self._kept.keep()
                try:
                    yield step
                except GeneratorExit:
                    if step.was_entered and step.has_idled:  # amid the block: the others take the step without it
                        step.num_finished -= 1
                    self._break_off()
                    raise
                if self._has_ended:
                    raise RuntimeError(
                        f"fastsync.Elastic: an error has left the block of step {step.num_finished}, so this rank is "
                        "out, and the others go on without it; let the error end this process, and start it again to "
                        "join them"
                    )
                if step.was_entered and not step.must_agree:
                    continue
                if not step.was_entered:
                    raise RuntimeError("fastsync.Elastic: a step was not entered; write `with step:` around its code")
                self._agree(has_ended=False)
            self._has_ended = True
            if self._agree(has_ended=True).is_over:
                return
            self._has_ended = False

    def _begin(self) -> None:
        """Goes over to a group that ends with a rank, once."""
        if self._has_begun:
            return
        self._is_in_use = True
        if self._joins:
            if self._members.join() is None:
                print("fastsync.Elastic: the training was over before this process could join it", file=sys.stderr)
                sys.exit()
            self._step.num_finished = -1
        self._agree(has_ended=False, begins=True)
        self._has_begun = True

    def _break_off(self) -> None:
        """Ends the training on this rank, and leaves the others its state if they lack it."""
        if self._has_ended or sys.is_finalizing():  # the others know, or will know at once
            return
        self._has_ended = True
        self._sync._engine.give_up()  # in shared memory; whoever waits for messages looks
        self._members.break_off(self._step.num_finished)
        self._agree(has_ended=True)
        self._members.leave()

    def _fail(self, error: BaseException | None) -> bool:
        """Ends a step that has failed. Returns whether the error is dealt with: the ranks agree before the next step.

        Args:
            error: what has left the block. None if the block has caught it.
        """
        step = self._step
        step.is_inside = False
        reason = "a rank has failed in this step"
        error = error or RankLostError(f"fastsync.Elastic: {reason}", step=step.num_finished, reason=reason)
        if not self._is_of_lost_rank(error) or self._fails_again() or step.is_half_done:
            self._has_ended = True
            self._members.leave()
            return False
        step.must_agree = True
        self._sync._engine.give_up()
        self._close_group()
        self._has_failed = not step.has_stepped
        for scaler in self._state.scalers:
            forget_step(scaler, [*self._optimizers, *map(innermost, self._optimizers)])
        if step.has_stepped:
            step.num_finished += 1
            warnings.warn(
                f"fastsync.Elastic: step {step.num_finished - 1} has failed after its optimizer had stepped, so it "
                f"does not run again, and what followed in the block was left out ({error})",
                stacklevel=3,
            )
        return True

    def _is_of_lost_rank(self, error: BaseException) -> bool:
        """Whether an error comes from a group that has lost a rank."""
        if not isinstance(error, Exception):
            return False
        is_known = isinstance(error, RankLostError) or self._sync._engine.take_failure()
        return (is_known and not isinstance(error, RanksDifferError)) or self._members.may_have_caused(error)

    def _fails_again(self) -> bool:
        """Whether the same ranks have failed in this step so often that it is not for the loss of one."""
        place = (self._step.num_finished, *self.members)
        self._num_failed = self._num_failed + 1 if place == self._failed_at else 1
        self._failed_at = place
        return self._num_failed > MOST_FAILURES

    def _take_back(self) -> _Undone:
        """Puts back what the failed step has changed."""
        self._has_failed = False
        engine = self._sync._engine
        with suppress(RuntimeError):  # what the step still waited for
            engine.end_interrupted()
        residuals = self._sync.state_dict()["residuals"]
        undone = _Undone(torch.get_rng_state(), residuals, self._sync._group.size())
        if engine.step() != self._step.engine_step:
            engine.roll_back_step()
        self._step.put_back()
        self._kept.put_back()
        return undone

    def _redo(self, undone: _Undone) -> None:
        """Makes a step count again that another rank has finished. Buffers and the rest have come from that rank."""
        torch.set_rng_state(undone.random_state)
        growth = self._sync._growth_from(undone.num_ranks)
        residuals = {name: residual * growth for name, residual in undone.residuals.items()}
        self._sync.load_state_dict(self._sync.state_dict() | {"residuals": residuals})

    # ---- from one membership to the next ----------------------------------------------------------------------------

    def _agree(self, has_ended: bool, begins: bool = False) -> Membership:
        """Agrees on the members, and makes all of them equal. At the beginning all know who they are."""
        self._step.must_agree = False
        decided = self._membership.go_on(
            lambda: self._members.agree(self._step.num_finished, has_ended),
            self._move,
            first=self._members.now if begins else None,
        )
        if decided.epoch > 0 and not decided.needs_nothing and self._on_change is not None:
            self._on_change(decided.members)
        return decided

    def _move(self, decided: Membership, group: dist.ProcessGroup) -> None:
        """Goes over to a group of these members, and takes the state of one that has come furthest."""
        furthest = max(decided.progress.values())
        if self._has_failed:  # before anything is shared, because the ranks that have finished the step may be lost
            self._undone = self._take_back()
        steps = list(decided.progress.values())
        root = steps.index(furthest)
        own = self._sync.state_dict()
        try:
            self._sync._move_to(group, root)
            self._sync._engine.make_revocable()
            if min(steps) < furthest:
                self._share(root)
            if self._undone is not None and self._step.num_finished < furthest:
                self._redo(self._undone)
        except (RuntimeError, ValueError):
            self._close_group()
            # What has come from a rank that is lost by now must not stay, as others may not have got it.
            kept = {part: own[part] for part in ("step", "scales", "factors") if part in own}
            self._sync.load_state_dict(self._sync.state_dict() | kept)
            raise
        finally:
            self._step.engine = self._sync._engine
        if self._undone is not None or self._step.num_finished < furthest:
            for parameter in (*self._sync.parameters(), *self._sync._left_to_each_rank()):
                parameter.grad = None
        self._undone = None
        self._step.num_finished, self._step.wants_change = furthest, False

    def _share(self, root: int) -> None:
        """Gives all ranks the state of one, or leaves it as it is."""
        is_behind = self._step.num_finished < max(self._members.now.progress.values())
        tensors = [*self._model.parameters(), *self._model.buffers()]
        before = [each.detach().clone() for each in tensors] if is_behind else []
        try:
            self._sync._init_sync(root)
            device = torch.device("cpu")
            self._state.agree(self._sync._group, device)
            self._state.share(self._sync._group, root, device)
        except BaseException:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=False):
                    tensor.copy_(value)
            raise

    def _on_death(self, lost: int) -> None:
        # Others may be done sooner. Before the loop nobody waits in a step, and the group may have other users.
        if lost in self._members.now.progress and self._is_in_use and not self._has_ended:
            self._close_group()

    def _close_group(self) -> None:
        """Ends all waits in the group, on this rank and then on others."""
        if self._sync._group.size() > 1:
            _C.close_connections(self._sync._group)

    def _look(self, store: Store) -> None:
        """Looks whether a rank has broken off, and on the first member, whether one waits to join."""
        now = self._members.now
        with suppress(RuntimeError):
            if self._step.is_inside and self._members.is_missed(self._step.num_finished, store):
                self._close_group()
            if now.progress and now.members[0] == self._members.own:
                self._step.wants_change = self._members.wants_to_change(store)


def _warn_of_agent() -> None:
    """Warns where an agent of torchrun has started several ranks. It ends all of them when one is lost."""
    is_agent_s = "TORCHELASTIC_RUN_ID" in os.environ and STORE not in os.environ
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_agent_s else 1
    if num_ranks > 1 and os.environ.get("LOCAL_RANK") == "0":
        warnings.warn(
            f"fastsync.Elastic: torchrun has started {num_ranks} ranks on this host, and ends all of them when one is "
            f"lost. Start them by `fastsync launch local -n {num_ranks}`, or by an agent for each rank",
            stacklevel=3,  # where the Elastic is made
        )
