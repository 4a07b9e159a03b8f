"""``attach``, for trainers without DistributedDataParallel: one line, and every backward averages its gradients."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .. import _C
from .._checks import (
    MEAN_OF_USED,
    as_weight,
    check_bool,
    check_op,
    is_positive,
    named_parameters,
    resolve_group,
    sparse_weights,
    with_gradients,
)
from .._torch_compat import own_buffers, unseen_by_autograd, version_of
from ..distributed import as_bytes
from .compression import AnyCompression, Auto, Compression
from .handles_in_use import NOBODY, begin_use, check_free, end_use
from .ignored_states import IgnoredStates, States
from .in_ddp import check_not_in_ddp
from .machine import describe_machine
from .micro_batches import MicroBatches, Others, stats_in_order
from .optimizer_steps import watch_optimizers
from .optimizer_watch import WatchedHandle, first_with_gradient
from .outer_in_use import NO_JOIN, name_of_outer
from .stats import GradStats, SyncStats
from .sync_weights import broadcast_named, check_can_be_written, replace_inference_buffers
from .training_state import TrainingState

BUCKET_CAP_MB = 25.0
LOOK_SECONDS = 1.0
"""Seconds between checks in use_group() for lost ranks."""


class GradientSynchronizer(WatchedHandle):
    """Averages the gradients of some parameters whenever a backward ends: what ``attach`` returns.

    A copy or a pickle of it is None, so a copied model is not attached.
    """

    _claimed_by = "by attach(); call detach() of the handle that it returned, or set that handle's .compression"
    _made_by = "fastsync.attach"
    _late_reason = (
        "it came into the model after attach(), or could not be averaged then. Call detach() of the handle and attach "
        "the model again, on every rank. If each rank is to have its own, name it in ignored_states. A step that is "
        "meant to be this rank's own belongs inside no_sync()"
    )

    def __init__(
        self,
        named: Mapping[str, Tensor],
        compression: AnyCompression,
        group: dist.ProcessGroup,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        op: str = "mean",
        overlap: bool = True,
        sparse: frozenset[int] = frozenset(),
        check_weights: bool = True,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        self._checks_weights = check_weights
        self._micro_batches = micro_batches
        self._loop: weakref.ref[Iterator[int]] | None = None  # the newest one over micro_batches()
        self._stats_in_order: Tensor | None = None  # of the newest means over micro-batches
        self._needs_stats = False  # whether somebody has asked for them
        self._versions: list[tuple[int, int]] = []  # of the newest means, while nobody has
        self._named = dict(named)
        self._sparse = frozenset(name for name, parameter in named.items() if id(parameter) in sparse)
        self._ids = frozenset(map(id, self._named.values()))
        self._without_gradients: dict[str, Tensor] = {}
        self._bucket_cap_bytes = int(bucket_cap_mb * 2**20)
        self._op = op
        self._overlaps = overlap
        self._buffers: _Buffers | None = None
        self._ignored = IgnoredStates()
        self._weight: float | None = None
        self._put: dict[str, tuple[int, Tensor]] = {}  # what piggyback() got, and before which sync
        self._is_enabled = True
        self._shared: TrainingState | None = None  # what ranks share inside join(), or in the steps of Elastic
        self._elastic: weakref.ref[Any] | None = None  # the Elastic that was made with this handle
        self._is_attached = False
        self._examined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._begin(group, compression)

    def _begin(self, group: dist.ProcessGroup, compression: AnyCompression) -> None:
        self._group = group
        self._engine: _C.Synchronizer = _C.Synchronizer(
            list(self._named.values()),
            list(self._named),
            group,
            self._bucket_cap_bytes,
            self._op,
            self._sparse,
        )
        if self._checks_weights:
            self._engine.compare_weights(
                list(self._named.values()), list(self._named), describe_machine(self._named.values())
            )
        self._knows_machines = self._micro_batches is None
        if self._micro_batches is not None:
            self._engine.set_micro_batches(self._micro_batches.number)
        self._accumulated_step = -1  # the newest step after which no_sync() let gradients accumulate
        self._deferred_clip_step = -1
        self._steps_before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.compression = compression

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets ``backward()`` accumulate in ``.grad`` on this rank alone. The next backward outside averages the sum.

        Only the call of ``backward()`` has to be inside. All ranks must run the same backwards inside. With
        ``op="sum"``, ``.grad`` may hold the sum of the previous sync. Inside, it then holds only this rank's gradients
        since that sync. The next sync adds them to the sum.
        """
        self._refuse_with_micro_batches("no_sync()", "More micro-batches accumulate more: raise their number")
        before, self._is_enabled = self._is_enabled, False
        self._engine.set_enabled(False)
        try:
            yield
        finally:
            self._is_enabled = before
            self._engine.set_enabled(before)
            self._accumulated_step = self._engine.num_steps()

    def synchronize(self) -> None:
        """Averages every ``.grad`` now. Call it with ``overlap=False``, or after ``no_sync``.

        Every rank must call it. A parameter without a gradient on this rank counts as zeros if another rank has one.
        With ``op="sum"``, a sum stays as it is if nothing was added to it. Values written to ``.grad`` by hand count as
        this rank's own gradients.

        Raises:
            ValueError: at the first sync, where the ranks differ in parameters or settings.
            RuntimeError: another rank did not take part in time, or is lost.
        """
        self._refuse_with_micro_batches("synchronize()", "The end of the loop over micro_batches() averages")
        self._engine.synchronize()

    def abandon_step(self) -> None:
        """Ends the step of a ``backward()`` that raised, so that collectives of your own pair up afterwards.

        Only the rank whose backward raised has to call it; elsewhere it does nothing. The other ranks then get nan for
        that step. Without this call, a rank with its gradients on a CPU sends what others wait for by itself. A rank
        with its gradients on a GPU, or with lowrank, sends it with its next ``backward()`` or ``synchronize()``. Call
        ``zero_grad()`` afterwards: there, some gradients may be means already.

        Raises:
            RuntimeError: it was called inside a backward, or another rank is lost.
        """
        self._engine.abandon_step()

    # ---- the same bits on any number of ranks -----------------------------------------------------------------------

    def micro_batches(self, seed: int = 0, *, python: bool = False, numpy: bool = False) -> Iterator[int]:
        """Yields the indices of this rank's micro-batches in one step, for ``attach(micro_batches=)``.

        Put forward and backward of each into the loop, with the mean loss over the micro-batch. The loop begins with
        ``.grad`` None. When it ends, ``.grad`` is the mean over all micro-batches of all ranks. All bits are the same
        on any number of ranks. A micro-batch that does not reach a parameter counts as zeros there.

        Before each micro-batch torch's generators of the CPU and of the model's GPU are seeded by ``seed``, the step
        and the index. At the end of the loop they go on from where they were. The step is the number of syncs, which
        ``state_dict()`` has.

        Every rank must run the loop to its end, also one that has no micro-batch. Leaving it before averages nothing.

        Args:
            seed: equal on all ranks.
            python: seed Python's ``random`` in the same way.
            numpy: seed NumPy's global generator in the same way.

        Raises:
            ValueError: the handle has no ``micro_batches``. Or there is a BatchNorm in train mode, or a forward has
                changed a buffer.
            RuntimeError: as ``synchronize()``.
        """
        known = self._micro_batches
        if known is None:
            raise ValueError(
                "micro_batches: this handle averages in each backward; use fastsync.attach(model, micro_batches=8)"
            )
        before = None if self._loop is None else self._loop()
        if isinstance(before, Generator):
            before.close()  # first, because it puts back generators
        modules = (module for each in self._searched if (module := each()) is not None)
        others = Others(python, numpy)
        loop = known.run(modules, self._group, seed, self._engine.step(), self._average_micro_batches, others)
        self._loop = weakref.ref(loop)
        return loop

    def _average_micro_batches(self) -> None:
        self._engine.synchronize()
        is_sharded = (
            self._optimizer_shards is not None
        )  # then reading all means is a collective, and nothing changes them
        self._stats_in_order = stats_in_order(self._means()) if self._needs_stats and not is_sharded else None
        self._versions = [] if self._needs_stats or is_sharded else self._versions_of_gradients()
        if not self._knows_machines:
            assert self._micro_batches is not None
            self._micro_batches.warn_of_unlike_machines(self._group)
            self._knows_machines = True

    def _means(self) -> Iterable[Tensor]:
        """Returns the means, in the order of the parameters. Every rank has to call it with ``shard_optimizer``."""
        if self._optimizer_shards is None:
            return (parameter.grad for parameter in self.parameters() if parameter.grad is not None)
        means = self._optimizer_shards.averaged_gradients()
        return (means[name] for name in self._named if name in means)

    def _versions_of_gradients(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self.parameters())
        return [(id(gradient), version_of(gradient)) for gradient in gradients if gradient is not None]

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised, or of the newest micro-batches.

        At full width, or on one rank, the first call reads the means. From the next step on they are taken on the way.
        With both ``micro_batches`` and ``shard_optimizer`` every rank must call it, and they gather all means for it.

        Raises:
            RuntimeError: nothing was synchronised yet; or it is the first call, and the means have changed since.
        """
        if self._micro_batches is None:
            return super().grad_stats()
        if self._stats_in_order is None:
            super().grad_stats()  # raises an error if there are none
            self._needs_stats = True
            if self._optimizer_shards is None and self._versions != self._versions_of_gradients():
                raise RuntimeError(
                    "fastsync: nobody had asked for grad_stats() before the newest loop over micro_batches(), and its "
                    "gradients have changed since: call grad_stats() before they are clipped, unscaled or set to zero"
                )
            self._stats_in_order = stats_in_order(self._means())
        return GradStats(self._stats_in_order)

    def _refuse_with_micro_batches(self, call: str, way_out: str) -> None:
        if self._micro_batches is not None:
            raise RuntimeError(f"fastsync: {call} does not go with attach(micro_batches=). {way_out}")

    # ---- ranks that run out of batches at different times -----------------------------------------------------------

    @contextmanager
    def join(self, *states: Any) -> Iterator[None]:
        """Lets ranks run out of batches at different times: put the training loop inside, on every rank.

        A rank whose loop has ended goes on taking part in the others' syncs until all loops have ended. Its gradients
        do not count: the mean is over the ranks that still have batches, as with DDP's
        ``divide_by_initial_world_size=False``. The means of ``piggyback`` are over these ranks, too. Every rank must
        have sent their names before. ``broadcast_buffers`` takes the buffers of the first of these ranks.

        At the end all ranks take over the state of a rank that took the most steps. That is: parameters and buffers,
        and ``states``. Other state that counts steps stays each rank's own. If a loop ends with gradients of
        ``no_sync`` that were not averaged, they count for nothing, and it warns.

        Args:
            states: the optimizers that step these parameters, and all else that counts steps: schedulers, GradScalers,
                averages of weights, data loaders. They need ``state_dict`` and ``load_state_dict``. Every rank passes
                the same ones, in the same order.

        Raises:
            ValueError: one of ``states`` has no state, or ranks have passed others. Or an optimizer steps inside that
                was not passed, or whose scheduler or GradScaler was not.
            RuntimeError: it is inside another ``join``; or as ``synchronize()``. No rank waits longer than the process
                group's time-out.
        """
        self._refuse_with_micro_batches("join()", "All ranks take all steps: use fastsync.data.MicroBatchSampler")
        shared = TrainingState(states, "sync.join(optimizer, scheduler, scaler, ...)", self._left_to_each_rank())
        self._refuse("join()", "Leave shard_optimizer out, on every rank")
        self._refuse_join_with_elastic()
        self._refuse_join_in_outer_block()
        if getattr(_thread, "joins", False):
            raise RuntimeError(
                "fastsync: join() was called inside another join(), so that ranks that have run out of batches would "
                "wait for each other; attach one nn.ModuleList of all models in place of several engines"
            )
        device = next(iter(self._named.values())).device
        self._engine.set_joining(True, shared.description())
        _thread.joins = True
        try:
            with self._sharing(shared):
                yield
            self._warn_of_gradients_not_averaged()
            self._sync_without_batches()
            is_last = self._engine.num_active() == 0
            while self._engine.num_active() != 0:  # nan if a rank has failed, which may still go on
                self._sync_without_batches()
        finally:
            _thread.joins = False  # first, because an error of the next line must not refuse later ones
            self._engine.set_joining(False)
        # All ranks take the parameters of the first rank whose loop ended last.
        size, rank = self._group.size(), self._group.rank()
        maxima = torch.tensor([size - rank if is_last else 0, not is_last], device=device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group)
        first, took_fewer_steps = maxima.tolist()
        self._init_sync(root=size - first)
        if took_fewer_steps:
            shared.share(self._group, size - first, device)

    @contextmanager
    def _sharing(self, states: TrainingState) -> Iterator[None]:
        """Refuses steps of optimizers that are not among these, inside."""
        before, self._shared = self._shared, states
        try:
            yield
        finally:
            self._shared = before

    def _is_in_elastic(self) -> bool:
        """Tells whether an ``Elastic`` whose steps have not ended was made with this handle."""
        elastic = None if self._elastic is None else self._elastic()
        return elastic is not None and not elastic.has_ended

    def _refuse_join_with_elastic(self) -> None:
        if self._is_in_elastic():
            raise RuntimeError(
                "fastsync: join() was called where an Elastic trains these weights, whose steps() tell each rank how "
                "many there are; leave join() out"
            )

    def _refuse_join_in_outer_block(self) -> None:
        if self._group.size() > 1 and (name := name_of_outer(self._named.values(), in_block=True)):
            raise RuntimeError(f"fastsync: join() was called inside a block of a {name} of the same weights. {NO_JOIN}")

    def _warn_of_gradients_not_averaged(self) -> None:
        has_gradients = any(parameter.grad is not None for parameter in self.parameters())
        if has_gradients and self._accumulated_step == self._engine.num_steps():
            warnings.warn(
                "fastsync: inside join() a rank's loop has ended with gradients of no_sync() that were not averaged, "
                "so they count for nothing. Run the last backward of the loop outside no_sync()",
                stacklevel=4,
            )

    def _sync_without_batches(self) -> None:
        """Takes part in one sync, with gradients that do not count."""
        self._engine.run_out()
        for parameter in self.parameters():
            parameter.grad = None
        self.synchronize()

    # ---- beside the gradients ---------------------------------------------------------------------------------------

    def piggyback(self, name: str, tensor: Tensor) -> None:
        """Sends a small tensor along with the next sync, to be averaged over the ranks in float32, at any compression.

        Ranks can so agree on control flow, such as a stop flag, without another collective. The value is read now. A
        later value of the same name replaces it. After the sync ``piggybacked()`` has the mean. All ranks must send the
        same names and shapes.

        Args:
            name: the key of the mean in ``piggybacked()``.
            tensor: float32, of any shape, on any device.

        Raises:
            ValueError: ``tensor`` is not a float32 tensor.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"tensor: {name!r} has to be a float32 tensor, got {got}; use tensor.float()")
        self._engine.piggyback(name, tensor)
        self._put[name] = self._engine.step(), tensor.detach().clone()

    def piggybacked(self) -> dict[str, Tensor]:
        """Returns the means that the newest sync carried, by name: float32, on the gradients' device."""
        return self._engine.piggybacked()

    def set_weight(self, weight: float) -> None:
        """Weights this rank's gradients from the next sync on: ``.grad`` becomes ``sum(w * g) / sum(w)``.

        Pass the number of tokens or samples if each rank takes the mean loss over its own, and the numbers differ. With
        ``op="sum"`` the result is ``sum(w * g)``. One small collective a step adds up the weights before the first
        gradients are sent. Call it before ``backward()``, for the first time on every rank before the same sync. The
        weight holds until it is set again. A CUDA graph cannot hold it.

        One weight counts for all that a sync averages. With several micro-batches pass the step's number of tokens
        before the first backward, and multiply each mean loss by its micro-batch's part of them.

        Args:
            weight: 0 or more. With 0 this rank's gradients do not count, even if they are nan. If all ranks have 0, the
                result is zeros plus the residuals of error feedback.

        Raises:
            ValueError: it is not a number from 0 to 1e300.
            RuntimeError: a backward has made gradients for the next sync already, under ``no_sync`` or since the last
                call. If only some ranks set their first weight, the next sync raises it on every rank.
        """
        self._refuse_with_micro_batches("set_weight()", "Multiply each loss by its weight")
        self._weight = as_weight(weight)
        self._engine.set_weight(self._weight)

    def stats(self) -> SyncStats:
        """Returns what synchronisation has cost so far; on a GPU with an estimate for steps that are under way."""
        shards = self._optimizer_shards
        return replace(
            super().stats(),
            parameter_wire_bytes=shards.parameter_wire_bytes() if shards else 0,
            waited_for=tuple(self._engine.waited_for()),
        )

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Returns the means over ranks that the newest sync has made, by parameter's name. Every rank must call it.

        It is for looking at the means with ``shard_optimizer``, where ``.grad`` stays this rank's own. What is
        changed here changes no step.
        """
        if self._optimizer_shards is not None:
            return self._optimizer_shards.averaged_gradients()
        return {name: p.grad.clone() for name, p in self._named.items() if p.grad is not None}

    # ---- from one group to another, and the end ---------------------------------------------------------------------

    def use_group(self, process_group: dist.ProcessGroup | DeviceMesh | None, *, init_sync: bool = True) -> None:
        """Averages over another process group from now on, such as one of the ranks that are left.

        Every rank of the new group must call it, between steps, with a synchronizer of the same parameters. A new rank
        first attaches to a group of its own, such as ``dist.new_group([rank])``. The step, the fp16 scales and the
        factors of lowrank become those of the group's rank 0. Residuals of error feedback stay on their rank, and add
        as much to the mean or the sum as before. What ``piggyback()`` got for the next sync stays, and a new rank takes
        rank 0's. ``stats()`` begins anew.

        Args:
            process_group: as in ``attach``.
            init_sync: first give every rank the parameters and buffers of the group's rank 0.

        Raises:
            ValueError: the argument is not a group, or its ranks hold different parameters or settings.
            RuntimeError: ``detach()`` was called.
        """
        if not self._is_attached:
            raise RuntimeError("fastsync: use_group() was called after detach(); attach to the new group")
        self._refuse("use_group()", "Call detach(), and attach to the new group")
        self._move_to(resolve_group(process_group), root=0)
        if init_sync:
            self._init_sync()

    def _move_to(self, group: dist.ProcessGroup, root: int) -> None:
        """Averages over another group from now on. Step, scales and factors become those of its rank ``root``."""
        self.end_interrupted()
        state, num_before = self.state_dict(), self._group.size()
        before = self._engine, self._group
        try:
            self._begin(group, self._compression)
        except BaseException:  # the group is too small for the compression, or could not be measured
            self._engine, self._group = before
            raise
        if self._weight is not None:
            self._engine.set_weight(self._weight)
        self._engine.take_over(before[0])
        before[0].detach()
        self._engine.set_enabled(self._is_enabled)
        self._engine.attach(list(self._named.values()), self._overlaps)
        self._send_buffers()
        for residual in state["residuals"].values():
            residual *= self._growth_from(num_before)
        self.load_state_dict(state)  # before the broadcast, so that nothing is lost if that rank does not answer
        factors = {name: factor.cpu() for name, factor in state.get("factors", {}).items()}
        own = {name: value for name, (step, value) in self._put.items() if step >= state["step"]}
        waiting = {name: value.cpu() for name, value in own.items()}
        shared = [{"step": state["step"], "scales": state["scales"], "factors": factors, "waiting": waiting}]
        dist.broadcast_object_list(shared, group=group, group_src=root)
        # All ranks send the same names. What this rank has put aside for another step is not meant for the next one.
        of_root = shared[0].pop("waiting")
        own = own if shared[0]["step"] == state["step"] else {}
        # The next sync checks the agreement, and reports names that this rank does not have.
        for part in ("scales", "factors"):
            shared[0][part] = {name: each for name, each in shared[0][part].items() if name in self._named}
        self.load_state_dict(state | shared[0])
        self._put = {}
        for name, value in of_root.items():
            self.piggyback(name, own.get(name, value))

    def _refuse(self, call: str, way_out: str) -> None:
        if self._optimizer_shards is not None:
            raise RuntimeError(f"fastsync: {call} does not work with shard_optimizer. {way_out}")

    def make_revocable(self) -> None:
        """Averages for a training that goes on without lost ranks, from the next step on.

        An error then comes at once, and does not say where the other ranks are. Each step keeps the residuals of the
        step before, beside its own. ``Elastic`` calls it, and so may a loop of your own that hands groups to
        ``use_group``. It lasts until then. Call it on every rank, before the same step.
        """
        self._engine.make_revocable()

    def end_interrupted(self) -> None:
        """Ends a step that has failed because a rank is lost. ``use_group`` calls it, too. It raises no errors.

        Other ranks may have left that step after an error. If the step waits for a lost rank, this closes the
        connections.
        """
        is_over = threading.Event()

        def close_where_ranks_are_lost() -> None:
            with suppress(RuntimeError):  # the store does not answer
                liveness = _C.Liveness(self._group, "use_group")
                while not is_over.wait(LOOK_SECONDS):
                    if liveness.silent_ranks() and not is_over.is_set():
                        _C.close_connections(self._group)

        watcher = threading.Timer(LOOK_SECONDS, close_where_ranks_are_lost)
        watcher.start()
        with suppress(RuntimeError, ValueError):
            self._engine.end_interrupted()
        is_over.set()
        watcher.cancel()

    def wait_for_parameters(self) -> None:
        """Waits for new parameters of other ranks, after a step of ``shard_optimizer(overlap_gather=True)``.

        PyTorch's own uses of a parameter wait by themselves. Call it before compiled code, and before an extension in
        C++ that is no operator of ``torch.ops``. Otherwise nothing is on its way, and it returns at once.

        Raises:
            RuntimeError: another rank has failed in its step, or is lost.
        """
        if self._optimizer_shards is not None:
            self._optimizer_shards.wait_for_parameters()

    def detach(self) -> None:
        """Takes the hooks off: from now on ``backward()`` averages nothing, and the model is as it was before.

        With ``shard_optimizer`` every rank must call it, because where ranks share no memory they then gather the
        optimizer's state.

        Raises:
            RuntimeError: it was called inside a backward. Or the optimizer's state could not be gathered.
        """
        self._engine.detach()
        try:
            if self._optimizer_shards is not None and self._is_attached:
                self._optimizer_shards.end()
        finally:
            self._is_attached = False
            end_use(self)

    def _init_sync(self, root: int = 0) -> None:
        """Gives all ranks of the group the parameters and buffers of one. Every rank must call it."""
        self._engine.agree(init_sync=True)
        named = {f"parameter {name}": p for name, p in (self._named | self._without_gradients).items()}
        if self._buffers is not None:
            named |= {f"buffer {name}": buffer for name, buffer in self._buffers.named().items()}
        broadcast_named(named, self._group, root)

    def _keep(self, owner: nn.Module | None) -> None:
        """Keeps the handle alive while the owner lives; without an owner, until ``detach``."""
        self._is_attached = True
        # Each module with parameters keeps the handle, because the owner may be a container made for this call alone.
        # A module whose parameters are all ignored may have a handle of its own.
        ignored = self._ignored.ids()
        modules = [
            module
            for module in (() if owner is None else owner.modules())
            if module is owner
            or (
                next(module.parameters(recurse=False), None) is not None
                and any(id(parameter) not in ignored for parameter in module.parameters())
            )
        ]
        begin_use(self, modules, kept_by=modules or [NOBODY])
        self._searched = [weakref.ref(module) for module in ([] if owner is None else owner.modules())]
        watch_optimizers()

    def _follow(self, compression: Compression | Auto) -> None:
        if self._optimizer_shards is not None:
            self._optimizer_shards.check_compression(compression)
        if self._micro_batches is not None:
            self._micro_batches.check_compression(compression)
        super()._follow(compression)

    def _send_buffers(self) -> None:
        """Sends the buffers with each sync from now on, if ``broadcast_buffers`` asks for it."""
        if self._buffers is not None and self._buffers.are_sent and self._buffers.named():
            self._engine.set_buffers(self._buffers.description, self._buffers.values, self._buffers.arrive)

    # ---- for clipping and optimizers -------------------------------------------------------------------------------

    def parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are averaged."""
        return [parameter for parameter in self._named.values() if parameter.requires_grad]

    def _parameters_of_model(self) -> Iterable[tuple[str, Tensor]]:
        modules = [module for known in self._searched if (module := known()) is not None]
        ignored = self._ignored.ids()
        named = chain.from_iterable(module.named_parameters() for module in modules)  # the owner's names come first
        return ((name, parameter) for name, parameter in named if id(parameter) not in ignored)

    def _growth_from(self, num_ranks: int) -> float:
        """Returns what multiplies residuals of a group of so many ranks: they add as much to the mean as there."""
        return 1.0 if self._op == "sum" else self._group.size() / num_ranks

    def _left_to_each_rank(self) -> list[Tensor]:
        return self._ignored.tensors()

    def _claimed_parameters(self) -> Iterable[Tensor]:
        """Returns all parameters, because frozen ones may not stay so."""
        return self._named.values()

    def _check_before_step(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError, too, if no sync came since the optimizer's previous step.

        It raises as well if a backward has added this rank's own gradients after the sync. The same holds for a
        parameter that came into the model after ``attach``.

        Raises:
            ValueError: DDP wraps the parameters by now. Or they belong to a pipeline's stage, which does not work with
                ``overlap``.
        """
        super()._check_before_step(optimizer)
        if optimizer not in self._examined and any(True for _ in self._stepped_by(optimizer)):
            check_not_in_ddp(self._named, "fastsync.attach")
            self._examined.add(optimizer)
        if not self._averages():
            return
        if self._shared is not None and any(True for _ in self._stepped_by(optimizer)):
            self._shared.check_step(optimizer)
        self._check_nothing_is_late(optimizer)
        # An engine's lock is held while it waits for other ranks. So a step asks only the engines that it belongs to.
        if next(self._stepped_by(optimizer), None) is None:
            return
        self._check_was_averaged(optimizer)
        stepped = next((parameter for parameter in self._stepped_by(optimizer) if parameter.grad is not None), None)
        if stepped is not None:
            self._check_not_made_of_samples(stepped, optimizer)

    def _averages(self) -> bool:
        return self._is_enabled

    def _way_to_average(self) -> str:
        if self._micro_batches is not None:
            return "put forward and backward into `for index in sync.micro_batches():`, and run that loop to its end"
        return (
            "run the last backward() outside no_sync(), or, with a schedule of torch.distributed.pipelining that "
            "computes gradients past all hooks, as zero-bubble ones do, use attach(overlap=False), and call "
            "synchronize() after schedule.step()"
            if self._overlaps
            else "call synchronize() before it"
        )

    def _check_not_made_of_samples(self, parameter: Tensor, optimizer: Optimizer) -> None:
        """Raises RuntimeError if .grad was made of per-sample gradients after the sync, as Opacus does in its step."""
        if getattr(parameter, "grad_sample", None) is None or self._engine.is_captured():
            return
        index = next(index for index, each in enumerate(self._named.values()) if each is parameter)
        if self._engine.num_writes()[index] < 0:
            raise RuntimeError(
                f"fastsync.attach: {type(optimizer).__name__} was about to step with a .grad that was made of "
                ".grad_sample after the ranks had averaged, as Opacus does, so it is this rank's own. Use Opacus's "
                "DistributedDPOptimizer without attach; or attach(overlap=False), and synchronize() after that write"
            )

    def _find_not_averaged(self, optimizer: Optimizer, is_synced: bool) -> tuple[Tensor, bool] | None:
        own = set(map(id, self._engine.with_own_gradients()))  # asked before Python reads any .grad
        if is_synced and not own:
            return None
        late = (parameter for parameter in self._stepped_by(optimizer) if id(parameter) in own or not is_synced)
        stepped = first_with_gradient(late)
        return None if stepped is None else (stepped, id(stepped) in own)

    def _named_parameters(self) -> Mapping[str, Tensor]:
        return self._named

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def attach(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    overlap: bool = True,
    init_sync: bool = True,
    op: str = "mean",
    broadcast_buffers: bool = False,
    ignored_states: States = (),
    check_weights: bool = True,
    micro_batches: int | None = None,
) -> GradientSynchronizer:
    """Makes a trainer data-parallel: from now on, when ``backward()`` returns, every ``.grad`` is the mean over ranks.

    The model stays as it is, and so does the optimizer; with ``shard_optimizer`` each rank then steps a shard of it.
    Call it on every rank once the model is on its device. Ranks must make several calls in the same order. Every rank
    must run the same number of backwards that reach any of the parameters. A parameter without a gradient on this rank
    counts as zeros if another rank has one; see ``op`` for another mean. It keeps ``grad is None`` if no rank has one.
    Parameters that the model gets later are not averaged. An optimizer that steps one raises RuntimeError: detach and
    attach again.

    Gradients of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` stay sparse: each rank sends the rows
    that it has, and ``.grad`` gets the rows of all ranks, coalesced. They travel at the end of backward. On a GPU the
    host then waits for them.

    Args:
        module_or_params: a model, which stays attached as long as it lives, or some parameters, until ``detach()``.
        compression: a wire (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"lowrank"``), a wire with
            error feedback (``"int8+ef"``), or ``"auto"``, which measures the group and chooses. See ``AnyCompression``.
            A single rank rounds as well.
        bucket_cap_mb: how large a bucket gets, in MiB. Smaller ones start earlier and cost more latency.
        process_group: the group to average over, or a one-dimensional ``DeviceMesh``; None for the default group. Pass
            a new group if backward has other collectives, such as SyncBatchNorm's, and ranks may miss gradients.
        overlap: send during ``backward()``. If false, call ``synchronize()`` after it, or after a pipeline's step.
        init_sync: first give every rank the parameters and buffers of the group's rank 0.
        op: ``"mean"``, or ``"sum"`` for a loss that is divided by the number of samples of all ranks. A second backward
            adds the new gradients of all ranks to the first sum. ``"mean_of_used"`` is the mean over the ranks that
            have a new gradient of the parameter, as with experts that see no token on some ranks.
        broadcast_buffers: with each sync give all ranks the buffers of rank 0, for modules that had buffers at the
            start.
        ignored_states: modules, parameters and buffers of the model that are left to each rank, such as experts. They
            are not averaged, broadcast, clipped or compared, and ranks may have different ones.
        check_weights: compare samples of the parameters over the ranks. They are read right after an optimizer's step,
            the first one and one in 50, and travel beside the gradients of a later sync. Where they differ,
            ``backward()`` raises RuntimeError on every rank, and names the first parameter. Only ranks on like machines
            are compared, because others may round differently. Pass False if weights are meant to differ, as with
            ``nn.Embedding(max_norm=)``.
        micro_batches: how many micro-batches a step has, a power of two. Then a step gives the same bits on any number
            of ranks. Put forward and backward into ``for index in sync.micro_batches():``; nothing is sent before its
            end. It goes with ``compression="none"`` and ``op="mean"``, and with float32 and float64 parameters on one
            CPU or GPU.

    Raises:
        ValueError: an argument is refused, or the ranks hold different parameters or settings. Or a parameter is
            averaged already, or of a kind that fastsync does not handle.
    """
    if not is_positive(bucket_cap_mb):
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb!r}")
    check_op(op, MEAN_OF_USED)
    check_bool(broadcast_buffers, "broadcast_buffers")
    check_bool(check_weights, "check_weights")
    if broadcast_buffers and not isinstance(module_or_params, nn.Module):
        raise ValueError("broadcast_buffers: loose parameters have no buffers; pass their module")
    owner = module_or_params if isinstance(module_or_params, nn.Module) else None
    ignored = IgnoredStates(ignored_states, owner)
    given = named_parameters(module_or_params, "module_or_params", but=ignored.ids())
    named = with_gradients(given, "module_or_params")
    trained = {f"module_or_params: parameter {name}": p for name, p in named.items() if p.requires_grad}
    check_can_be_written(trained)
    check_free(named, "module_or_params")
    check_not_in_ddp(named, "module_or_params")
    group = resolve_group(process_group)
    sparse = sparse_weights(module_or_params)
    micro = None if micro_batches is None else MicroBatches(micro_batches, named)
    if micro is not None:
        _check_goes_with_micro_batches(op, sparse, broadcast_buffers, bool(ignored.ids()))
        overlap = False
    if op != "mean":
        _check_not_sparse([name for name, p in named.items() if p.requires_grad and id(p) in sparse], op)
        sparse = frozenset()  # they are frozen, and what they get once they are not is refused
    sync = GradientSynchronizer(named, compression, group, bucket_cap_mb, op, overlap, sparse, check_weights, micro)
    sync._ignored = ignored
    sync._without_gradients = {name: p for name, p in given.items() if name not in named}
    sync._buffers = None if owner is None else _Buffers(owner, broadcast_buffers, ignored)
    sync._send_buffers()
    if init_sync:
        sync._init_sync()
    sync._engine.attach(list(named.values()), overlap)
    sync._keep(owner)
    return sync


def _check_goes_with_micro_batches(op: str, sparse: frozenset[int], broadcast_buffers: bool, ignores: bool) -> None:
    """Raises ValueError for an argument whose result would depend on the number of ranks."""
    why = "the result would depend on the number of ranks"
    if op != "mean":
        raise ValueError(f"op: with micro_batches expected 'mean', got {op!r}; {why}")
    if sparse:
        raise ValueError(f"micro_batches: an embedding has sparse=True, and {why}; use sparse=False")
    if broadcast_buffers:
        raise ValueError(f"broadcast_buffers: leave it out with micro_batches; {why}")
    if ignores:
        raise ValueError(f"ignored_states: leave it out with micro_batches; {why}")


def _check_not_sparse(names: Sequence[str], op: str) -> None:
    """Raises ValueError if ``op`` does not go with the sparse gradients of these parameters."""
    if names:
        way_out = "op='mean' and multiply the loss by the number of ranks, or use " if op == "sum" else ""
        raise ValueError(
            f"op: {op!r} does not go with sparse gradients, such as those of parameter {names[0]}; use {way_out}"
            "sparse=False in the embedding"
        )


_thread = threading.local()
"""``joins`` is true inside a ``join()`` of this thread."""


def is_in_join() -> bool:
    """Whether this thread is inside a ``join()``."""
    return bool(getattr(_thread, "joins", False))


class _Buffers:
    """The buffers of a module, which are sent as bytes beside the gradients. It does not keep the module alive.

    The buffers are looked up in each step, because a module may replace them. All ranks take those of rank 0. Inside
    ``join`` they take those of the first rank that still has batches.
    """

    def __init__(self, owner: nn.Module, are_sent: bool, ignored: IgnoredStates) -> None:
        self.are_sent = are_sent
        self._ignored = ignored
        self._sent: list[Tensor] = []
        self._modules = [
            (prefix, weakref.ref(module)) for prefix, module in owner.named_modules() if own_buffers(module)
        ]

    def named(self) -> dict[str, Tensor]:
        """Returns the buffers that the module has now, by name. A shared buffer has its first name."""
        alive = [(prefix, module) for prefix, known in self._modules if (module := known()) is not None]
        replace_inference_buffers((module for _, module in alive), but=self._ignored.ids())
        named = [each for prefix, module in alive for each in module.named_buffers(prefix, recurse=False)]
        first_name = {id(buffer): name for name, buffer in reversed(named)}
        ignored = self._ignored.ids()
        return {n: buffer for n, buffer in named if n == first_name[id(buffer)] and id(buffer) not in ignored}

    def description(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        lines = [f"buffer of shape {list(buffer.shape)}, {buffer.dtype}" for buffer in self.named().values()]
        return "\n".join(["broadcast_buffers True", *lines, ""])

    def values(self, is_first: Tensor) -> Tensor:
        """Returns the bytes to send, as float32, and a 1 at the end. All ranks except the first send zeros."""
        self._sent = list(self.named().values())
        all_bytes = torch.cat([as_bytes(buffer).to(is_first.device, non_blocking=True) for buffer in self._sent])
        return torch.cat(
            [torch.where(is_first, all_bytes.float(), 0.0), torch.ones(1, dtype=torch.float32, device=is_first.device)]
        )

    def arrive(self, sums: Tensor) -> None:
        """Writes the buffers. They stay as they are if a rank has failed, or if no rank has batches.

        Autograd does not see it, as with DDP: another forward, whose backward is to come, may have used them.
        """
        have_come = sums[-1] > 0
        parts = sums[:-1].to(torch.uint8).split([buffer.nbytes for buffer in self._sent])
        with unseen_by_autograd(self._sent):
            for buffer, part in zip(self._sent, parts, strict=True):
                values = part.clone().view(buffer.dtype).view(buffer.shape)  # a clone begins at an even address
                buffer.copy_(torch.where(have_come, values, buffer.to(values.device)))
        self._sent = []
