"""``attach``, for trainers without DistributedDataParallel: one line, and every backward averages its gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C
from .autotune.request import AnyCompression
from .checks import check_dense, check_group, check_not_sharded, is_sharded_by_fsdp1, resolve_nodes
from .handle import GradientHandle, forget_handle, remember
from .optimizer_steps import check_no_optimizer_in_backward, forget, watch
from .pipelines import check_no_stage

BUCKET_CAP_MB = 25.0
_BROADCAST_BYTES = 250 * 2**20  # of a flat buffer of several tensors


class GradientSynchronizer(GradientHandle):
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
        gradient_as_bucket_view: bool = False,
        op: str = "mean",
    ) -> None:
        self._named = dict(named)
        self._options = (int(bucket_cap_mb * 2**20), gradient_as_bucket_view)
        self._op = op
        self._others: dict[str, Tensor] = {}  # what has no gradient, by what it is called
        self._weight: float | None = None
        self._synced_buffers: tuple[list[Tensor], bool] | None = None
        self._is_enabled = True
        self._called_step = -1  # the newest that synchronize() was called for
        self._num_calls = 0  # of synchronize()
        self._seen_calls: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._begin(group, ranks_per_node, compression)

    def _begin(self, group: dist.ProcessGroup, ranks_per_node: int | None, compression: AnyCompression) -> None:
        self._group = group
        self._ranks_per_node = ranks_per_node
        named = self._named
        self._engine: _C.Synchronizer = _C.Synchronizer(
            list(named.values()), list(named), group, *self._options, self._op == "sum"
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
        _check_that_the_model_has(self)
        self._num_calls += 1
        self._engine.synchronize()
        self._called_step = self._engine.num_steps()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Lets ranks run out of batches at different times: put the training loop inside, on every rank.

        A rank whose loop has ended goes on taking part in the syncs of the others, with gradients that count for
        nothing, until all loops have ended. The mean is over the ranks that still have batches (or over their weights):
        what DDP does with ``divide_by_initial_world_size=False``. So is what ``ride`` sends, by names that have ridden
        on every rank before. ``sync_buffers`` brings together those of these ranks, rank 0's being those of the first
        of them. At the end all ranks get the parameters and buffers of one that has taken the most steps; optimizers'
        state stays what it is on each rank. One engine at a time.

        Raises:
            RuntimeError: as ``synchronize()``: no longer than the process group's time-out a rank waits for others.
        """
        self._engine.set_joining(True)
        try:
            before = self._engine.num_steps()
            yield
            num_steps = self._engine.num_steps() - before
            self._engine.run_out()
            while True:
                for parameter in self.parameters():
                    parameter.grad = None
                self.synchronize()
                if self._engine.num_active() == 0:
                    break
        finally:
            self._engine.set_joining(False)
        _broadcast(self, root=self._rank_of_most(num_steps))

    def _rank_of_most(self, number: int) -> int:
        """The first of the ranks whose number is the largest."""
        size = self._group.size()
        device = next(iter(self._named.values())).device
        newest = torch.tensor(number * size + size - 1 - self._group.rank(), device=device)
        dist.all_reduce(newest, dist.ReduceOp.MAX, group=self._group)
        return size - 1 - int(newest) % size

    def ride(self, name: str, tensor: Tensor) -> None:
        """Sends a small tensor along with the next sync, to be averaged over the ranks in float32, at any compression.

        With it, ranks agree on control flow (a KL divergence, a stop flag) without a collective of its own. Its value
        is taken now; once the sync is over, its mean is in ``riders``. A second one of the same name takes its place.
        All ranks must send the same names and shapes.

        Args:
            name: under which ``riders`` will have the mean.
            tensor: float32, of any shape, on any device.

        Raises:
            ValueError: it is no float32 tensor.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"tensor: rider {name!r} has to be a float32 tensor, got {got}; use tensor.float()")
        self._engine.ride(name, tensor)

    @property
    def riders(self) -> dict[str, Tensor]:
        """The means over the ranks of what rode on the newest sync, float32, on the gradients' device."""
        return self._engine.riders()

    def set_weight(self, weight: float) -> None:
        """Has this rank's gradients count so much, from the next sync on: ``.grad`` becomes ``sum(w * g) / sum(w)``.

        Where ranks have different numbers of tokens or samples, and each takes the mean loss over its own, those
        numbers make it the mean over all. With ``op="sum"`` it becomes ``sum(w * g)``. No collective of its own: the
        weight travels beside the gradients. Call it before ``backward()``, for the first time on every rank before the
        same sync; it holds until it is set again. Parameters of 16 bits want weights around 1, by which their gradients
        are multiplied.

        Args:
            weight: 0 or more. With 0 gradients here count for nothing, even if they are nan; where all ranks have 0,
                the result is zeros.

        Raises:
            ValueError: it is no finite number, or less than 0.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight: expected a number that is 0 or more, got {weight!r}")
        self._weight = float(weight)
        self._engine.set_weight(self._weight)

    def use_group(self, process_group: dist.ProcessGroup | DeviceMesh | None, *, broadcast: bool = True) -> None:
        """Averages over another process group from now on, such as that of the ranks that are left.

        Every rank of the new group must call it, between steps, each with a synchronizer of the same parameters: one
        that comes new attaches to a group of its own first, as of ``dist.new_group([rank])``. The step and the fp16
        scales are those of the group's rank 0; what error feedback has not sent yet goes on on the rank that has it,
        and adds as much to the mean, or the sum, as it would have. ``stats()`` begin anew.

        Args:
            process_group: as in ``attach``.
            broadcast: first give every rank the parameters and buffers of the group's rank 0.

        Raises:
            ValueError: the group is none, or its ranks hold different parameters or settings.
            RuntimeError: ``detach()`` was called.
        """
        if self not in _attached:
            raise RuntimeError("fastsync: use_group() was called after detach(); attach to the new group")
        group, ranks_per_node = resolve_nodes(process_group)
        check_group(group, self._named)
        state, share = self.state_dict(), group.size() / self._group.size()
        for residual in state["residuals"].values():
            if self._op == "mean":
                residual["own"] *= share
            elif residual["of_sums"] is not None:
                residual["of_sums"] /= share  # the engine keeps it of means
        self._engine.detach()
        self._begin(group, ranks_per_node, self._asked)
        self._called_step = self._claimed_step = -1
        self._engine.set_enabled(self._is_enabled)
        if self not in _without_hooks:
            self._engine.attach(list(self._named.values()))
        if self._weight is not None:
            self._engine.set_weight(self._weight)
        if self._synced_buffers is not None:
            self._engine.set_buffers(*self._synced_buffers)
        of_rank_0 = [(state["step"], state["scales"])]
        dist.broadcast_object_list(of_rank_0, group=group, group_src=0)
        step, scales = of_rank_0[0]
        ours = {name: scale for name, scale in scales.items() if name in self._named}  # others are told to all below
        self.load_state_dict({"step": step, "scales": ours, "residuals": state["residuals"]})
        if broadcast:
            _broadcast(self)

    def detach(self) -> None:
        """Takes the hooks off: from now on ``backward()`` averages nothing, and the model is as it was before."""
        self._engine.detach()
        _attached.discard(self)
        forget(self)
        forget_handle(self)
        _owned_by_nobody.discard(self)
        _unproven.discard(self)
        _without_hooks.discard(self)
        for owned in _owned_by_module.values():
            if self in owned:
                owned.remove(self)

    def parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are averaged."""
        return [parameter for parameter in self._named.values() if parameter.requires_grad]

    def claim_norm(self) -> Tensor:
        """As ``GradientHandle.claim_norm``; also refuses where the gradients are not those the sync left.

        Their version counters tell. ``GradScaler.unscale_`` does not count itself as a change.
        """
        num_steps = self._engine.num_steps()
        if num_steps in (0, self._claimed_step):  # else gradients came
            _check_that_the_model_has(self)
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
        with_gradients = (name for name, p in self._named.items() if id(p) in stepped and p.grad is not None)
        name = next(with_gradients, None)
        if name is None or not self._is_enabled:
            return
        if self._seen_calls.get(optimizer, 0) == self._num_calls and not self._engine.is_captured():
            raise RuntimeError(
                f"fastsync.attach(overlap=False): {type(optimizer).__name__} was about to step with gradients that no "
                f"rank has averaged, of {name} for one; call synchronize() after backward() and before the step, on "
                "every rank. A step that is meant to be this rank's own belongs inside no_sync()"
            )
        self._seen_calls[optimizer] = self._num_calls

    def check_backward_synchronised(self) -> None:
        """As ``GradientHandle.check_backward_synchronised``."""
        if self._engine.num_steps() == self._called_step:
            raise RuntimeError(
                "fastsync.clip_grad_norm_: nothing tells whether unscale_ came before or after synchronize(), so the "
                "norm is not known; call it before unscale_, which makes no difference to what it does, or use "
                "torch.nn.utils.clip_grad_norm_"
            )

    def _named_parameters(self) -> Mapping[str, Tensor]:
        return self._named

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


# Whose hooks are on; those of a module live as long as it does, those of loose parameters until detach().
_attached: weakref.WeakSet[GradientSynchronizer] = weakref.WeakSet()
_owned_by_module: weakref.WeakKeyDictionary[nn.Module, list[GradientSynchronizer]] = weakref.WeakKeyDictionary()
_owned_by_nobody: set[GradientSynchronizer] = set()


def _check_that_the_model_has(sync: GradientSynchronizer) -> None:
    """Raises RuntimeError where none of the attached parameters is the model's any more: none gets a gradient then."""
    owners = [module for module, syncs in _owned_by_module.items() if sync in syncs]
    attached = {id(parameter) for parameter in sync._named.values()}
    present = (p for owner in owners for p in owner.parameters() if id(p) in attached and not is_sharded_by_fsdp1(p))
    if owners and next(present, None) is None:
        raise RuntimeError(
            "fastsync.attach: the model has other parameters by now than those that were attached, as after "
            "fully_shard or FullyShardedDataParallel, so nothing was averaged; those average gradients themselves: "
            "call fully_shard first, and attach only to what it leaves whole, or call detach()"
        )


# Nobody knows yet whether their parameters get gradients, and from whom. Where they are not used any more, or belong to
# a pipeline's stage, their hooks may not be called, so it is noticed before an optimizer steps.
_unproven: weakref.WeakSet[GradientSynchronizer] = weakref.WeakSet()


# Attached without hooks, so that only what the user calls averages gradients.
_without_hooks: weakref.WeakSet[GradientSynchronizer] = weakref.WeakSet()


def _before_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for sync in list(_without_hooks):
        sync.check_synchronized(optimizer)
    for sync in list(_unproven):
        _check_that_the_model_has(sync)
        # The engine, which knows, must not be asked: it may be waiting for its ranks in another thread.
        if any(parameter.grad is not None for parameter in sync._named.values()):
            if sync not in _without_hooks:
                check_no_stage(sync._named.values())
            _unproven.discard(sync)


register_optimizer_step_pre_hook(_before_step)


def attach(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    overlap: bool = True,
    broadcast: bool = True,
    gradient_as_bucket_view: bool = False,
    op: str = "mean",
    sync_buffers: str | None = None,
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
        compression: what travels: a ``Compression`` or its shorthand, such as ``"none"``, ``"fp16"`` or ``"int8+ef"``;
            an ``Auto`` or its shorthand ``"auto"``, which measures the group and chooses; or a mapping of first steps
            to these.
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
        broadcast: first give every rank the parameters and buffers of the group's rank 0.
        gradient_as_bucket_view: on CPUs, where all ranks are on one host and gradients travel at full width, keep every
            ``.grad`` in memory that the ranks share, and average it there. With
            ``optimizer.zero_grad(set_to_none=False)`` nothing is copied then, and it pays where you keep gradients
            anyway; one that was set to None, or lies otherwise than its parameter, is copied there, takes memory of its
            own besides, and is another tensor after the sync. Later syncs write to the same memory: clone what you
            keep, and do not read ``.grad`` in other backward hooks. After a backward that failed gradients hold
            anything: call ``zero_grad()``. In a forked child they are not there: call ``detach()``, which sets them to
            None. Elsewhere, with a compression, with ``ranks_per_node`` and with weights it changes nothing.
        op: what ``.grad`` becomes: the ``"mean"`` over the ranks, or the ``"sum"``, for a loss that is divided by the
            number of samples of all ranks. Weights: see ``GradientSynchronizer.set_weight``.
        sync_buffers: with each sync, beside the gradients and so before the next forward, give every rank the module's
            buffers, such as BatchNorm's running statistics: ``"broadcast"`` rank 0's, as DDP does before each forward,
            or ``"mean"`` the mean in float32 of those that are floating, and rank 0's of the rest. None leaves them to
            each rank. They travel whole each time, constant ones too.

    Raises:
        ValueError: an argument is not what it should be, a parameter is attached already or is of a kind that fastsync
            does not handle, the module is or contains a DistributedDataParallel; or, with ``broadcast``, the ranks hold
            different parameters or settings, on every rank.
    """
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb!r}")
    if not isinstance(gradient_as_bucket_view, bool):
        raise ValueError(f"gradient_as_bucket_view: expected True or False, got {gradient_as_bucket_view!r}")
    if op not in ("mean", "sum"):
        raise ValueError(f"op: expected 'mean' or 'sum', got {op!r}")
    if sync_buffers not in (None, "broadcast", "mean"):
        raise ValueError(f"sync_buffers: expected 'broadcast', 'mean' or None, got {sync_buffers!r}")
    if sync_buffers and not isinstance(module_or_params, nn.Module):
        raise ValueError(f"sync_buffers: loose parameters have no buffers to {sync_buffers}; pass their module")
    given = _named_parameters(module_or_params, "module_or_params")
    named = _able(given, "module_or_params")
    _check_unattached(named)
    check_no_optimizer_in_backward(named, "module_or_params")
    if overlap:
        check_no_stage(named.values())
    group, ranks_per_node = resolve_nodes(process_group)
    check_group(group, named)
    sync = GradientSynchronizer(named, compression, group, ranks_per_node, bucket_cap_mb, gradient_as_bucket_view, op)
    buffers = dict(module_or_params.named_buffers()) if isinstance(module_or_params, nn.Module) else {}
    sync._others = {f"parameter {name}": p for name, p in given.items() if name not in named}
    sync._others |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    if sync_buffers:
        sync._synced_buffers = (list(buffers.values()), sync_buffers == "mean")
        sync._engine.set_buffers(*sync._synced_buffers)
    if broadcast:
        _broadcast(sync)
    if overlap:
        sync._engine.attach(list(named.values()))
    else:
        _without_hooks.add(sync)
    _attached.add(sync)
    _unproven.add(sync)
    watch(sync)
    if isinstance(module_or_params, nn.Module):
        # Each that has parameters, for the module itself may be a container made for this call alone.
        for owner in module_or_params.modules():
            if owner is module_or_params or next(owner.parameters(recurse=False), None) is not None:
                _owned_by_module.setdefault(owner, []).append(sync)
                remember(owner, sync)
    else:
        _owned_by_nobody.add(sync)
    return sync


def trainable_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Picks those that can have gradients, by name, loose ones by index. Raises ValueError if there are none.

    Args:
        argument: what the caller calls them, for errors.
    """
    return _able(_named_parameters(module_or_params, argument), argument)


def _able(named: Mapping[str, Tensor], argument: str) -> dict[str, Tensor]:
    able: dict[str, Tensor] = {name: p for name, p in named.items() if p.is_floating_point() or p.is_complex()}
    if not any(parameter.requires_grad for parameter in able.values()):
        raise ValueError(f"{argument}: none of its {len(named)} parameters requires a gradient; nothing to synchronise")
    return able


def _named_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    if isinstance(module_or_params, nn.Module):
        _check_unwrapped(module_or_params, argument)
        check_dense(module_or_params, argument)
        # torch.compile's wrapper must not show in the names, for checkpoints come from models with and without it.
        named: dict[str, Tensor] = {
            name.replace("_orig_mod.", ""): p for name, p in module_or_params.named_parameters()
        }
    else:
        given = [module_or_params] if isinstance(module_or_params, Tensor) else list(module_or_params)
        for index, parameter in enumerate(given):
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"{argument}: expected a module or tensors, but number {index} is a {type(parameter).__name__}"
                    + ("; pass the module or its parameters, not names" if isinstance(parameter, str | tuple) else "")
                    + ("; pass its parameters()" if isinstance(parameter, nn.Module) else "")
                )
        unique = {id(parameter): (str(index), parameter) for index, parameter in reversed(list(enumerate(given)))}
        named = dict(reversed(list(unique.values())))
    for name, parameter in named.items():
        _check_parameter(name, parameter, argument)
    check_not_sharded(named, argument)
    return named


def _check_unwrapped(module: nn.Module, argument: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{argument}: {name or 'the module'} is wrapped in DistributedDataParallel, which averages gradients "
                "itself; use fastsync.register_comm_hook(ddp_model), or attach to the model without the wrapper"
            )


def _check_parameter(name: str, parameter: Tensor, argument: str) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"{argument}: parameter {name} is not initialised yet; run a forward first")
    if not parameter.is_leaf:
        raise ValueError(
            f"{argument}: tensor {name} is no leaf of the graph (it came from {parameter.grad_fn}), so it has no "
            ".grad; pass the parameters it was computed from"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"{argument}: elements of parameter {name} share memory (shape {list(parameter.shape)}, strides "
            f"{list(parameter.stride())}), so no optimizer can step it; attach what it was expanded from"
        )


def _check_unattached(named: Mapping[str, Tensor]) -> None:
    attached = {id(p): name for sync in _attached for name, p in sync._named.items()}
    for name, parameter in named.items():
        if id(parameter) in attached:
            raise ValueError(
                f"module_or_params: parameter {name} is attached already (as {attached[id(parameter)]}); call detach() "
                "of what the first attach() returned, or set its .compression to change what travels"
            )


def _as_vector(tensor: Tensor) -> Tensor:
    """Its elements as they lie in memory, where they fill a block of it; else the tensor.

    Strides of dimensions of size 1 may be anything, and torch takes some for elements that overlap.
    """
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor


@torch.no_grad()
def _broadcast(sync: GradientSynchronizer, root: int = 0) -> None:
    """Parameters and buffers of one rank of the group for all, once they know that they have the same tensors."""
    named, others, group = sync._named, sync._others, sync._group
    sync._engine.agree()
    if others:
        lines = [f"{name} of shape {list(tensor.shape)}, {tensor.dtype}" for name, tensor in others.items()]
        _C.check_agreement(group, "\n".join(lines), next(iter(named.values())).device)
    tensors = [tensor.detach() for tensor in (*named.values(), *others.values())]
    sent = [_as_vector(tensor) if tensor.dtype in _BROADCAST_DTYPES else _as_bytes(tensor) for tensor in tensors]
    dist._broadcast_coalesced(group, sent, _BROADCAST_BYTES, root)  # type: ignore[attr-defined]  # as DDP does
    for tensor, values in zip(tensors, sent, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


# Gloo knows these, but no other integers and no float8: those go as bytes.
_BROADCAST_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
