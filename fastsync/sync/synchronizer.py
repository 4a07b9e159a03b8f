"""The handle that ``attach`` returns: it averages gradients whenever a backward ends."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from .._checks import as_weight, resolve_group
from .compression import AnyCompression, Auto, Compression
from .elastic_in_use import is_in_elastic
from .handles_in_use import NOBODY, begin_use, end_use
from .ignored_states import IgnoredStates
from .in_ddp import check_not_in_ddp
from .join import until_all_run_out
from .machine import describe_machine
from .micro_batches import MicroBatches, Others
from .optimizer_steps import watch_optimizers
from .optimizer_watch import WatchedHandle, first_with_gradient
from .outer_in_use import NO_JOIN, name_of_outer
from .sent_buffers import SentBuffers
from .stats import GradStats, SyncStats
from .stats_in_order import StatsInOrder
from .sync_weights import broadcast_named
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
        self._stats_in_order = StatsInOrder()
        self._named = dict(named)
        self._sparse = frozenset(name for name, parameter in named.items() if id(parameter) in sparse)
        self._ids = frozenset(map(id, self._named.values()))
        self._without_gradients: dict[str, Tensor] = {}
        self._bucket_cap_bytes = int(bucket_cap_mb * 2**20)
        self._op = op
        self._overlaps = overlap
        self._buffers: SentBuffers | None = None
        self._ignored = IgnoredStates()
        self._weight: float | None = None
        self._put: dict[str, tuple[int, Tensor]] = {}  # what piggyback() got, and before which sync
        self._is_enabled = True
        self._shared: TrainingState | None = None  # what ranks share inside join(), or in the steps of Elastic
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
        if self._micro_batches is not None:
            self._micro_batches.begin(self._engine)
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
        A new loop ends the one before, so none begins inside another one.

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
        modules = (module for each in self._searched if (module := each()) is not None)
        others = Others(python, numpy)
        return known.run(modules, self._group, seed, self._engine.step(), self._average_micro_batches, others)

    def _average_micro_batches(self) -> None:
        self._engine.synchronize()
        # With shards, reading all means is a collective, and nothing changes them.
        self._stats_in_order.begin(None if self._optimizer_shards is not None else self._means())

    def _means(self) -> list[Tensor]:
        """Returns the means, in the order of the parameters. Every rank has to call it with ``shard_optimizer``."""
        if self._optimizer_shards is None:
            return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        means = self._optimizer_shards.averaged_gradients()
        return [means[name] for name in self._named if name in means]

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised, or of the newest micro-batches.

        At full width, or on one rank, the first call reads the means. From the next step on they are taken on the way.
        With both ``micro_batches`` and ``shard_optimizer`` every rank must call it, and they gather all means for it.

        Raises:
            RuntimeError: nothing was synchronised yet; or it is the first call, and the means have changed since.
        """
        if self._micro_batches is None:
            return super().grad_stats()
        if not self._stats_in_order.are_known:
            super().grad_stats()  # raises an error if there are none
        return GradStats(self._stats_in_order.read(self._means))

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
        device = next(iter(self._named.values())).device
        with until_all_run_out(
            self._engine, self._group, shared, device,
            sync_without_batches=self._sync_without_batches, share_model=self._init_sync,
        ):  # fmt: skip
            with self._sharing(shared):
                yield
            self._warn_of_gradients_not_averaged()

    @contextmanager
    def _sharing(self, states: TrainingState) -> Iterator[None]:
        """Refuses steps of optimizers that are not among these, inside."""
        before, self._shared = self._shared, states
        try:
            yield
        finally:
            self._shared = before

    def _is_in_elastic(self) -> bool:
        """Tells whether an ``Elastic`` whose steps have not ended trains these weights."""
        return is_in_elastic(self._named.values())

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
