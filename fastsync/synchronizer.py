"""``attach``, for trainers without DistributedDataParallel: one line, and every backward averages its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from . import _C
from .attached import check_that_the_model_has, check_unattached, is_attached, keep, let_go
from .buffers import Buffers
from .checks import check_group, resolve_nodes
from .compression import AnyCompression
from .ddp import check_unhooked
from .forgotten import ForgottenCalls
from .handle import GradientHandle
from .joining import UnevenInputs, check_outside_join, joining
from .optimizer_steps import check_no_optimizer_in_backward
from .parameters import named_parameters, with_gradients
from .pipelines import check_no_stage
from .regroup import move_to_group
from .replicas import broadcast

BUCKET_CAP_MB = 25.0
BroadcastBuffers: TypeAlias = bool | Literal["mean"]
LARGEST_WEIGHT = 1e300  # whose sum over any number of ranks is finite


class GradientSynchronizer(GradientHandle, Joinable):
    """Averages the gradients of some parameters whenever a backward ends: what ``attach`` returns.

    A copy or a pickle of it is None: a copied model is a plain one.
    """

    _argument = "module_or_params"

    def __init__(
        self,
        named: Mapping[str, Tensor],
        compression: AnyCompression,
        group: dist.ProcessGroup,
        ranks_per_node: int | None,
        bucket_cap_mb: float,
        op: str = "mean",
        overlap: bool = True,
    ) -> None:
        Joinable.__init__(self)
        self._named = dict(named)
        self._bucket_cap_bytes = int(bucket_cap_mb * 2**20)
        self._op = op
        self._overlaps = overlap
        self._without_gradients: dict[str, Tensor] = {}
        self._buffers: Buffers | None = None
        self._weight: float | None = None
        self._broadcast_buffers: BroadcastBuffers = False
        self._uneven: UnevenInputs | None = None  # while ranks join
        self._is_enabled = True
        self._called_step = -1  # the newest that synchronize() was called for
        self._forgotten = ForgottenCalls()  # of synchronize()
        self._begin(group, ranks_per_node, compression)

    def _begin(self, group: dist.ProcessGroup, ranks_per_node: int | None, compression: AnyCompression) -> None:
        self._group = group
        self._ranks_per_node = ranks_per_node
        named = self._named
        self._engine: _C.Synchronizer = _C.Synchronizer(
            list(named.values()), list(named), group, self._bucket_cap_bytes, self._op == "sum"
        )
        self.compression = compression

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, ``backward()`` accumulates into ``.grad`` on this rank alone; the next outside averages the sum.

        Only the call of ``backward()`` has to be inside, on all ranks for the same ones.
        """
        before, self._is_enabled = self._is_enabled, False
        self._engine.set_enabled(False)
        try:
            yield
        finally:
            self._is_enabled = before
            self._engine.set_enabled(before)

    def synchronize(self) -> None:
        """Averages every ``.grad`` there is, now: with ``overlap=False``, or after ``no_sync``.

        Every rank must call it. A parameter without a gradient here counts as zeros where another rank has one.

        Raises:
            ValueError: at the first sync, where the ranks differ in parameters or settings.
            RuntimeError: another rank did not take part in time, or is lost; or the model was sharded after attach.
        """
        check_that_the_model_has(self)
        self._forgotten.note_call()
        self._engine.synchronize()
        self._called_step = self._engine.num_steps()

    def join(self) -> AbstractContextManager[None]:
        """Lets ranks run out of batches at different times: put the training loop inside, on every rank.

        A rank whose loop has ended goes on taking part in the syncs of the others, with gradients that count for
        nothing, until all loops have ended. The mean is over the ranks that still have batches (or over their weights):
        what DDP does with ``divide_by_initial_world_size=False``. So is what ``piggyback`` sends, by names that were
        sent on every rank before, or are with the first sync inside. ``broadcast_buffers`` brings together those of
        these ranks, rank 0's being those of the first of them. At the end all ranks get the parameters and buffers
        of one that has taken the most steps; optimizers' state stays what it is on each rank. One engine at a
        time; for several, or with what else has collectives of its own, see ``join_hook``.

        Raises:
            RuntimeError: it is inside another ``join``; or as ``synchronize()``: no longer than the process group's
                time-out a rank waits for others.
        """
        return joining(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Makes ``torch.distributed.algorithms.join.Join([sync, zero_redundancy_optimizer])`` do what ``join`` does.

        ``Join`` is notified, by an all-reduce, at the first gradient of each backward that averages, and by
        ``synchronize()``: so list this before optimizers, and step each once after every such backward.

        Raises:
            ValueError: ``divide_by_initial_world_size=True``: the mean is over the ranks that still have batches.
        """
        if kwargs.get("divide_by_initial_world_size", False):
            raise ValueError(
                "divide_by_initial_world_size: fastsync's means are over those that still have batches; leave it out"
            )
        uneven = UnevenInputs(self)
        uneven.notify_before_syncs()
        return uneven

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` has its own collectives: the parameters' device."""
        return next(iter(self._named.values())).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that is averaged over."""
        return self._group

    def piggyback(self, name: str, tensor: Tensor) -> None:
        """Sends a small tensor along with the next sync, to be averaged over the ranks in float32, at any compression.

        With it, ranks agree on control flow (a KL divergence, a stop flag) without a collective of its own. Its value
        is taken now; once the sync is over, its mean is in ``piggybacked()``. A second one of the same name takes its
        place.
        All ranks must send the same names and shapes.

        Args:
            name: under which ``piggybacked()`` will have the mean.
            tensor: float32, of any shape, on any device.

        Raises:
            ValueError: it is no float32 tensor.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"tensor: {name!r} has to be a float32 tensor, got {got}; use tensor.float()")
        self._engine.ride(name, tensor)

    def piggybacked(self) -> dict[str, Tensor]:
        """Returns the means over the ranks of what the newest sync carried, float32, on the gradients' device."""
        return self._engine.riders()

    def set_weight(self, weight: float) -> None:
        """Has this rank's gradients count so much, from the next sync on: ``.grad`` becomes ``sum(w * g) / sum(w)``.

        Where ranks have different numbers of tokens or samples, and each takes the mean loss over its own, those
        numbers make it the mean over all. With ``op="sum"`` it becomes ``sum(w * g)``. The weights are added up, in one
        small collective a step, before the first gradients are sent. Call it before ``backward()``, for the first time
        on every rank before the same sync; it holds until it is set again. A CUDA graph cannot hold it.

        Args:
            weight: 0 or more. With 0 gradients here count for nothing, even if they are nan; where all ranks have 0,
                the result is zeros, and what error feedback has kept.

        Raises:
            ValueError: it is no number from 0 to 1e300.
        """
        try:
            number = float(weight)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 <= number <= LARGEST_WEIGHT:
            raise ValueError(f"weight: expected a number that is 0 or more, up to {LARGEST_WEIGHT:g}, got {weight!r}")
        self._weight = number
        self._engine.set_weight(number)

    def use_group(self, process_group: dist.ProcessGroup | DeviceMesh | None, *, init_sync: bool = True) -> None:
        """Averages over another process group from now on, such as that of the ranks that are left.

        Every rank of the new group must call it, between steps, each with a synchronizer of the same parameters: one
        that comes new attaches to a group of its own first, as of ``dist.new_group([rank])``. The step and the fp16
        scales are those of the group's rank 0; what error feedback has not sent yet goes on on the rank that has it,
        and adds as much to the mean, or the sum, as it would have. ``stats()`` begin anew.

        Args:
            process_group: as in ``attach``.
            init_sync: first give every rank the parameters and buffers of the group's rank 0.

        Raises:
            ValueError: the group is none, or its ranks hold different parameters or settings.
            RuntimeError: ``detach()`` was called, or this is inside of ``join``.
        """
        check_outside_join(self, "use_group()")
        if not is_attached(self):
            raise RuntimeError("fastsync: use_group() was called after detach(); attach to the new group")
        group, ranks_per_node = resolve_nodes(process_group)
        check_group(group, self._named)
        move_to_group(self, group, ranks_per_node)
        if init_sync:
            self._broadcast()

    def detach(self) -> None:
        """Takes the hooks off: from now on ``backward()`` averages nothing, and the model is as it was before.

        Raises:
            RuntimeError: it was called inside of ``join``, or of a backward.
        """
        check_outside_join(self, "detach()")
        if self._uneven is not None:
            self._uneven.end()
        self._engine.detach()
        let_go(self)

    def parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are averaged."""
        return [parameter for parameter in self._named.values() if parameter.requires_grad]

    def claim_norm(self) -> Tensor:
        """As ``GradientHandle.claim_norm``; also refuses where the gradients are not those the sync left.

        Their version counters tell. ``GradScaler.unscale_`` does not count itself as a change.
        """
        num_steps = self._engine.num_steps()
        if num_steps in (0, self._claimed_step):  # else gradients came
            check_that_the_model_has(self)
        if (
            num_steps > 0
            and not self._engine.is_captured()  # a replay of a CUDA graph writes gradients and counts nothing
            and not self._engine.gradients_are_unchanged()
        ):
            raise RuntimeError(
                "fastsync.clip_grad_norm_: the gradients have been changed since they were synchronised (by zero_grad, "
                "clipping, or a backward under no_sync), so their norm is not known; clip right after the synchronised "
                "backward, or use torch.nn.utils.clip_grad_norm_"
            )
        return super().claim_norm()

    def check_synchronized(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError where ``synchronize()`` was forgotten before an optimizer's step, not under no_sync."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = {name: p.grad for name, p in self._named.items() if id(p) in stepped and p.grad is not None}
        if not gradients or not self._is_enabled:
            return
        if self._forgotten.is_forgotten(optimizer, gradients) and not self._engine.is_captured():
            raise RuntimeError(
                f"fastsync.attach(overlap=False): {type(optimizer).__name__} was about to step with gradients that no "
                f"rank has averaged, of {next(iter(gradients))} for one; call synchronize() after backward() and "
                "before the step, on every rank. A step that is meant to be this rank's own belongs inside no_sync()"
            )
        self._forgotten.note_step(optimizer, gradients)

    def check_backward_synchronised(self) -> None:
        """As ``GradientHandle.check_backward_synchronised``."""
        if self._engine.num_steps() == self._called_step:
            raise RuntimeError(
                "fastsync.clip_grad_norm_: nothing tells whether unscale_ came before or after synchronize(), so the "
                "norm is not known; call it before unscale_, which makes no difference to what it does, or use "
                "torch.nn.utils.clip_grad_norm_"
            )

    def _broadcast(self, root: int = 0) -> None:
        """Gives all ranks of the group the parameters and buffers of one."""
        self._engine.agree()
        others = {f"parameter {name}": p for name, p in self._without_gradients.items()}
        if self._buffers is not None:
            others |= {f"buffer {name}": buffer for name, buffer in self._buffers.named().items()}
        broadcast(self._named, others, self._group, root)

    def _follow_buffers(self) -> None:
        if self._broadcast_buffers and self._buffers is not None:
            self._engine.set_buffers(self._buffers.tensors, self._broadcast_buffers == "mean")

    def _named_parameters(self) -> Mapping[str, Tensor]:
        return self._named

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError, for who takes it for the model, as what DDP returns is one."""
        raise TypeError("fastsync.attach returns no model; call the one that you gave it, which stays as it was")

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
    broadcast_buffers: BroadcastBuffers = False,
) -> GradientSynchronizer:
    """Makes a trainer data-parallel: from now on, when ``backward()`` returns, every ``.grad`` is the mean over ranks.

    The model stays as it is: no wrapper, the same state dict. Buckets of gradients are sent while backward goes on, in
    the order in which the first backward finished them, from C++ that does not hold the GIL. Call it on every rank, in
    the same order where there are several, once the model is on its device and of its dtype.

    Every rank must run the same number of backwards that reach any of the parameters. They may reach different ones: a
    parameter without a gradient here counts as zeros where another rank has one, and keeps ``grad is None`` where none
    has.

    Args:
        module_or_params: a model, or some parameters. A module stays attached as long as it lives, even if the return
            value is dropped; loose parameters until ``detach()``.
        compression: a wire's name (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``), ``"auto"``, which measures the
            group and chooses, or a ``Compression``, an ``Auto`` or a ``Schedule``.
        bucket_cap_mb: how large a bucket gets before the next one begins, in MiB. Smaller ones start earlier and cost
            more latency. Where one is not enough for all, the first is full with 1 MiB, as DDP's is.
        process_group: the group to average over, or a one-dimensional ``DeviceMesh``; None for the default group. A
            ``DeviceMesh`` of two dimensions, ("nodes", "local") if they are named, is the default group as (nodes,
            ranks of a node), in order: only between nodes do gradients travel as ``compression`` says, see
            ``Compression.ranks_per_node``; what an all-reduce would add, the ranks then add in float32. Several
            attached to one group send one after the other, and only the first during backward. On CPUs each overlaps if
            it has a group of its own. On GPUs that helps nothing: NCCL asks for one order of all groups' calls.
        overlap: send during ``backward()``. If false nothing happens there: call ``synchronize()`` after it, or, for
            the stage of a pipeline, after ``schedule.step()``. An optimizer that steps without it raises RuntimeError,
            except inside ``no_sync()``.
        init_sync: first give every rank the parameters and buffers of the group's rank 0.
        op: what ``.grad`` becomes: the ``"mean"`` over the ranks, or the ``"sum"``, for a loss that is divided by the
            number of samples of all ranks. Weights: see ``GradientSynchronizer.set_weight``.
        broadcast_buffers: with each sync, beside the gradients and so before the next forward, give every rank the
            module's buffers, such as BatchNorm's running statistics: True rank 0's, as DDP does before each forward, or
            ``"mean"`` the mean in float32 of those that are floating, and rank 0's of the rest. False leaves them
            to each rank. They travel whole each time, constant ones too, and are looked up by module and name as
            backward ends: the module may put other tensors in their places. What it registers later stays each
            rank's. A graph that needs their values from before goes backward no more, as with ``retain_graph``
            or after several forwards: put all its backwards but the last inside ``no_sync()``.

    Raises:
        ValueError: an argument is not what it should be, a parameter is attached already, is averaged by
            ``register_comm_hook`` or is of a kind that fastsync does not handle, the module is or contains a
            DistributedDataParallel; or, with ``init_sync``, the ranks hold different parameters or settings, on every
            rank.
    """
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb!r}")
    if op not in ("mean", "sum"):
        raise ValueError(f"op: expected 'mean' or 'sum', got {op!r}")
    if broadcast_buffers not in (True, False, "mean"):
        raise ValueError(f"broadcast_buffers: expected True, False or 'mean', got {broadcast_buffers!r}")
    if broadcast_buffers and not isinstance(module_or_params, nn.Module):
        raise ValueError("broadcast_buffers: loose parameters have no buffers; pass their module")
    given = named_parameters(module_or_params, "module_or_params")
    named = with_gradients(given, "module_or_params")
    check_unattached(named, "module_or_params")
    check_unhooked(named, "module_or_params")
    check_no_optimizer_in_backward(named, "module_or_params")
    if overlap:
        check_no_stage(named.values())
    group, ranks_per_node = resolve_nodes(process_group)
    check_group(group, named)
    owner = module_or_params if isinstance(module_or_params, nn.Module) else None
    buffers = None if owner is None else Buffers(owner)
    if buffers is not None and (init_sync or broadcast_buffers):
        buffers.check_can_be_sent("module_or_params")
    sync = GradientSynchronizer(named, compression, group, ranks_per_node, bucket_cap_mb, op, overlap)
    sync._without_gradients = {name: p for name, p in given.items() if name not in named}
    sync._buffers = buffers
    sync._broadcast_buffers = broadcast_buffers
    sync._follow_buffers()
    if init_sync:
        sync._broadcast()
    if overlap:
        sync._engine.attach(list(named.values()))
    keep(sync, owner)
    return sync
