"""``attach``, for trainers without DistributedDataParallel: one line, and every backward averages its gradients."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from . import _C
from ._checks import (
    check_group,
    check_no_stage,
    is_sharded_by_fsdp1,
    is_wrapper,
    named_parameters,
    resolve_nodes,
    shares_memory,
    with_gradients,
)
from ._handle import (
    ClippableHandle,
    before_each_step,
    check_free,
    check_no_optimizer_in_backward,
    forget,
    modules_of,
    remember,
    watch,
    watched,
)
from .compression import AnyCompression
from .distributed import broadcast_tensors

BUCKET_CAP_MB = 25.0
LARGEST_WEIGHT = 1e300  # whose sum over any number of ranks is finite


class GradientSynchronizer(ClippableHandle):
    """Averages the gradients of some parameters whenever a backward ends: what ``attach`` returns.

    A copy or a pickle of it is None: a copied model is a plain one.
    """

    _argument = "module_or_params"
    _taken_by = "by attach(); call detach() of what that returned, or set its .compression to change what travels"

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
        self._named = dict(named)
        self._without_gradients: dict[str, Tensor] = {}
        self._bucket_cap_bytes = int(bucket_cap_mb * 2**20)
        self._op = op
        self._overlaps = overlap
        self._buffers: _Buffers | None = None
        self._weight: float | None = None
        self._is_enabled = True
        self._is_attached = False
        self._is_proven = False  # that its parameters get gradients, and from no pipeline's stage
        self._called_step = -1  # the newest that synchronize() was called for
        self._num_calls = 0  # of synchronize()
        self._calls_before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._begin(group, ranks_per_node, compression)

    def _begin(self, group: dist.ProcessGroup, ranks_per_node: int | None, compression: AnyCompression) -> None:
        self._group = group
        self._ranks_per_node = ranks_per_node
        self._engine: _C.Synchronizer = _C.Synchronizer(
            list(self._named.values()), list(self._named), group, self._bucket_cap_bytes, self._op == "sum"
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
        self._check_that_the_model_has_them()
        self._num_calls += 1
        self._engine.synchronize()
        self._called_step = self._engine.num_steps()

    # ---- ranks that run out of batches at different times -----------------------------------------------------------

    @contextmanager
    def join(self) -> Iterator[None]:
        """Lets ranks run out of batches at different times: put the training loop inside, on every rank.

        A rank whose loop has ended goes on taking part in the syncs of the others, with gradients that count for
        nothing, until all loops have ended. The mean is over the ranks that still have batches, as with DDP's
        ``divide_by_initial_world_size=False``, and so is what ``piggyback`` sends, by names that every rank has sent
        before. ``broadcast_buffers`` takes rank 0's from the first of these ranks. At the end all ranks get the
        parameters and buffers of one that has taken the most steps; optimizers' state stays what it is on each rank.

        Raises:
            RuntimeError: it is inside another ``join``; or as ``synchronize()``: no longer than the process group's
                time-out a rank waits for others.
        """
        if _thread.joining is not None:
            raise RuntimeError(
                "fastsync: join() was called inside another join(), so that ranks that have run out of batches would "
                "wait for each other; attach one nn.ModuleList of all models in place of several engines"
            )
        self._engine.set_joining(True)
        _thread.joining = self
        try:
            yield
            self._sync_without_batches()
            is_last = self._engine.num_active() == 0
            while self._engine.num_active() != 0:  # nan where a rank has failed, which may go on
                self._sync_without_batches()
        finally:
            self._engine.set_joining(False)
            _thread.joining = None
        # The parameters and buffers of the first of those that ran out last go to all ranks.
        size, rank = self._group.size(), self._group.rank()
        first = torch.tensor(size - rank if is_last else 0, device=next(iter(self._named.values())).device)
        dist.all_reduce(first, dist.ReduceOp.MAX, group=self._group)
        self._init_sync(root=size - int(first))

    def _sync_without_batches(self) -> None:
        """Takes part in one sync with gradients that count for nothing."""
        self._engine.run_out()
        for parameter in self.parameters():
            parameter.grad = None
        self.synchronize()

    def _check_outside_join(self, call: str) -> None:
        """Raises RuntimeError inside of ``join()``, whose end is for the engine that began it."""
        if _thread.joining is self:
            raise RuntimeError(f"fastsync: {call} was called inside join(); call it after, on every rank")

    # ---- beside the gradients ---------------------------------------------------------------------------------------

    def piggyback(self, name: str, tensor: Tensor) -> None:
        """Sends a small tensor along with the next sync, to be averaged over the ranks in float32, at any compression.

        With it, ranks agree on control flow (a KL divergence, a stop flag) without a collective of its own. Its value
        is taken now; once the sync is over, its mean is in ``piggybacked()``. A second one of the same name takes its
        place. All ranks must send the same names and shapes.

        Args:
            name: under which ``piggybacked()`` will have the mean.
            tensor: float32, of any shape, on any device.

        Raises:
            ValueError: it is no float32 tensor.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"tensor: {name!r} has to be a float32 tensor, got {got}; use tensor.float()")
        self._engine.piggyback(name, tensor)

    def piggybacked(self) -> dict[str, Tensor]:
        """Returns the means over the ranks of what the newest sync carried, float32, on the gradients' device."""
        return self._engine.piggybacked()

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

    # ---- from one group to another, and the end ---------------------------------------------------------------------

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
        self._check_outside_join("use_group()")
        if not self._is_attached:
            raise RuntimeError("fastsync: use_group() was called after detach(); attach to the new group")
        group, ranks_per_node = resolve_nodes(process_group)
        check_group(group, self._named)
        state, growth = self.state_dict(), group.size() / self._group.size()
        before = self._engine, self._group, self._ranks_per_node
        try:
            self._begin(group, ranks_per_node, self._asked)
        except BaseException:  # the group is too small for the compression, or could not be measured
            self._engine, self._group, self._ranks_per_node = before
            raise
        before[0].detach()
        self._called_step = self._claimed_step = -1
        self._engine.set_enabled(self._is_enabled)
        if self._overlaps:
            self._engine.attach(list(self._named.values()))
        if self._weight is not None:
            self._engine.set_weight(self._weight)
        self._send_buffers()
        if self._op == "mean":  # what is not sent yet adds as much to it as it would have in the group before
            for residual in state["residuals"].values():
                residual *= growth
        self.load_state_dict(state)  # first, so that nothing is lost where rank 0 does not answer
        of_rank_0 = [(state["step"], state["scales"])]
        dist.broadcast_object_list(of_rank_0, group=group, group_src=0)
        step, scales = of_rank_0[0]
        self._engine.set_step(step)
        # Others than ours are told to all ranks at the next sync.
        self._engine.set_scales([(self._named[name], scale) for name, scale in scales.items() if name in self._named])
        if init_sync:
            self._init_sync()

    def detach(self) -> None:
        """Takes the hooks off: from now on ``backward()`` averages nothing, and the model is as it was before.

        Raises:
            RuntimeError: it was called inside of ``join``, or of a backward.
        """
        self._check_outside_join("detach()")
        self._engine.detach()
        self._is_attached = False
        forget(self)
        with _lock:
            _owned_by_nobody.discard(self)
            for owned in _owned_by_module.values():
                if self in owned:
                    owned.remove(self)

    def _init_sync(self, root: int = 0) -> None:
        """Gives all ranks of the group the parameters and buffers of one. Every rank must call it."""
        self._engine.agree()
        others = {f"parameter {name}": p for name, p in self._without_gradients.items()}
        if self._buffers is not None:
            others |= {f"buffer {name}": buffer for name, buffer in self._buffers.named().items()}
        broadcast_tensors(self._named, others, self._group, root)

    def _keep(self, owner: nn.Module | None) -> None:
        """Stays attached from now on, for as long as the owner lives; without one until ``detach``."""
        watch(self)
        self._is_attached = True
        with _lock:
            if owner is None:
                _owned_by_nobody.add(self)
                return
            # Each that has parameters, for the module itself may be a container made for this call alone.
            modules = [
                module
                for module in owner.modules()
                if module is owner or next(module.parameters(recurse=False), None) is not None
            ]
            for module in modules:
                _owned_by_module.setdefault(module, []).append(self)
        remember(self, modules)

    def _send_buffers(self) -> None:
        """With each sync from now on, where that was asked for."""
        if self._buffers is not None and self._buffers.are_sent and self._buffers.named():
            self._engine.set_buffers(self._buffers.description, self._buffers.values, self._buffers.arrive)

    # ---- what clipping and optimizers ask ---------------------------------------------------------------------------

    def parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are averaged."""
        return [parameter for parameter in self._named.values() if parameter.requires_grad]

    def taken(self) -> Iterable[Tensor]:
        """As ``GradientHandle.taken``: those that are frozen may not stay so."""
        return self._named.values()

    def claim_norm(self) -> Tensor:
        """As ``ClippableHandle.claim_norm``; also refuses where the gradients are not those the sync left.

        Their version counters tell. ``GradScaler.unscale_`` does not count itself as a change.
        """
        num_steps = self._engine.num_steps()
        if num_steps in (0, self._claimed_step):  # else gradients came
            self._check_that_the_model_has_them()
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

    def check_backward_synchronised(self) -> None:
        """As ``ClippableHandle.check_backward_synchronised``."""
        if self._engine.num_steps() == self._called_step:
            raise RuntimeError(
                "fastsync.clip_grad_norm_: nothing tells whether unscale_ came before or after synchronize(), so the "
                "norm is not known; call it before unscale_, which makes no difference to what it does, or use "
                "torch.nn.utils.clip_grad_norm_"
            )

    def check_before_step(self, optimizer: Optimizer, is_new: bool) -> None:
        """Raises RuntimeError where an optimizer is about to step with gradients that nobody has averaged."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not self._overlaps:
            self._check_called(optimizer, stepped)
        # With a new optimizer all is asked anew: load_state_dict(assign=True) brings other parameters, too.
        is_asked_anew = is_new and any(id(p) in stepped for module in modules_of(self) for p in module.parameters())
        if is_asked_anew or not self._is_proven:
            self._check_that_the_model_has_them()
            # The engine, which knows, must not be asked: it may be waiting for its ranks in another thread.
            if any(parameter.grad is not None for parameter in self._named.values()):
                if self._overlaps:
                    check_no_stage(self._named.values())
                self._is_proven = True

    def _check_called(self, optimizer: Optimizer, stepped: set[int]) -> None:
        """Raises RuntimeError where no ``synchronize()`` was called since the optimizer's step before."""
        gradients = [name for name, p in self._named.items() if id(p) in stepped and p.grad is not None]
        if not gradients or not self._is_enabled:
            return
        if self._calls_before.get(optimizer, 0) == self._num_calls and not self._engine.is_captured():
            raise RuntimeError(
                f"fastsync.attach(overlap=False): {type(optimizer).__name__} was about to step with gradients that no "
                f"rank has averaged, of {gradients[0]} for one; call synchronize() after backward() and before the "
                "step, on every rank. A step that is meant to be this rank's own belongs inside no_sync()"
            )
        self._calls_before[optimizer] = self._num_calls

    def _check_that_the_model_has_them(self) -> None:
        """Raises RuntimeError where none of the parameters is the model's any more: none gets a gradient then."""
        owners = modules_of(self)
        attached = {id(parameter) for parameter in self._named.values()}
        present = (
            p for owner in owners for p in owner.parameters() if id(p) in attached and not is_sharded_by_fsdp1(p)
        )
        if owners and next(present, None) is None:
            raise RuntimeError(
                "fastsync.attach: the model has other parameters by now than those that were attached, so nothing was "
                "averaged. After load_state_dict(assign=True) call detach(), and attach anew; fully_shard and "
                "FullyShardedDataParallel average gradients themselves: call fully_shard first, and attach only to "
                "what it leaves whole, or call detach()"
            )

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
    broadcast_buffers: bool | Literal["mean"] = False,
) -> GradientSynchronizer:
    """Makes a trainer data-parallel: from now on, when ``backward()`` returns, every ``.grad`` is the mean over ranks.

    The model stays as it is. Call it on every rank, in the same order where there are several, once the model is on its
    device. Every rank must run the same number of backwards that reach any of the parameters. A parameter without a
    gradient here counts as zeros where another rank has one, and keeps ``grad is None`` where none has.

    Args:
        module_or_params: a model, which stays attached as long as it lives, or some parameters, until ``detach()``.
        compression: a wire (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``), ``"auto"``, which measures the
            group and chooses, or a ``Compression`` or an ``Auto``.
        bucket_cap_mb: how large a bucket gets, in MiB. Smaller ones start earlier and cost more latency.
        process_group: the group to average over, or a ``DeviceMesh`` of one dimension, or of two: (nodes, local).
        overlap: send during ``backward()``. If false, call ``synchronize()`` after it, or after a pipeline's step.
        init_sync: first give every rank the parameters and buffers of the group's rank 0.
        op: ``"mean"``, or ``"sum"`` for a loss that is divided by the number of samples of all ranks.
        broadcast_buffers: with each sync give every rank rank 0's buffers, or with ``"mean"`` the mean in float32 of
            those that are floating. They are looked up by module and name.

    Raises:
        ValueError: an argument is not what it should be, a parameter is averaged already or of a kind that fastsync
            does not handle, or the ranks hold different parameters or settings.
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
    check_free(named, "module_or_params")
    check_no_optimizer_in_backward(named, "module_or_params")
    if overlap:
        check_no_stage(named.values())
    group, ranks_per_node = resolve_nodes(process_group)
    check_group(group, named)
    owner = module_or_params if isinstance(module_or_params, nn.Module) else None
    buffers = None if owner is None else _Buffers(owner, broadcast_buffers)
    if buffers is not None and (init_sync or broadcast_buffers):
        buffers.check_can_be_sent()
    sync = GradientSynchronizer(named, compression, group, ranks_per_node, bucket_cap_mb, op, overlap)
    sync._without_gradients = {name: p for name, p in given.items() if name not in named}
    sync._buffers = buffers
    sync._send_buffers()
    if init_sync:
        sync._init_sync()
    if overlap:
        sync._engine.attach(list(named.values()))
    sync._keep(owner)
    return sync


# One thread may attach while another steps.
_lock = threading.RLock()
# Those of a module live as long as it does, those of loose parameters until detach().
_owned_by_module: weakref.WeakKeyDictionary[nn.Module, list[GradientSynchronizer]] = weakref.WeakKeyDictionary()
_owned_by_nobody: set[GradientSynchronizer] = set()
# Those that have stepped.
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@before_each_step
def _check_attached(optimizer: Optimizer) -> None:
    with _lock:
        is_new = optimizer not in _optimizers
    for handle in watched():
        if isinstance(handle, GradientSynchronizer):
            handle.check_before_step(optimizer, is_new)
    if is_new:
        _warn_of_later_parameters(optimizer)
        with _lock:
            _optimizers.add(optimizer)


def _warn_of_later_parameters(optimizer: Optimizer) -> None:
    """Names those that attached modules got since, as adapters and new heads are: nobody averages their gradients."""
    attached = [handle for handle in watched() if isinstance(handle, GradientSynchronizer)]
    known = {id(parameter) for sync in attached for parameter in sync._named.values()}
    owners = [module for sync in attached for module in modules_of(sync)]
    owned = {p: name for owner in reversed(owners) for name, p in owner.named_parameters()}  # the outermost's name
    stepped = (p for group in optimizer.param_groups for p in group["params"] if id(p) not in known)
    later = [
        owned[p]
        for p in stepped
        if p in owned and p.requires_grad and not is_wrapper(p) and not is_sharded_by_fsdp1(p)  # which FSDP averages
    ]
    if later:
        warnings.warn(
            f"fastsync.attach: {len(later)} of the optimizer's parameters are not averaged, for the attached model got "
            f"them later: {', '.join(later[:3])}{', ...' if len(later) > 3 else ''}; call detach(), and attach anew",
            stacklevel=5,  # where step() is called
        )


class _Buffers:
    """A module's buffers, looked up where they are, for it may put another tensor in one's place; it is not kept alive.

    With ``"mean"`` floating ones become their mean over the ranks, the rest what rank 0 has, and else all do. They
    travel beside the gradients, as float32. While ranks join, those that still have batches count alone, and the first
    of them is rank 0.
    """

    def __init__(self, owner: nn.Module, broadcast: bool | Literal["mean"]) -> None:
        self.are_sent = bool(broadcast)
        self._means = broadcast == "mean"
        self._sent: list[tuple[Tensor, int]] = []  # and as how many values
        self._places: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        seen: set[int] = set()
        for prefix, module in owner.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places[f"{prefix}.{name}" if prefix else name] = weakref.ref(module), name

    def named(self) -> dict[str, Tensor]:
        """Returns what is there by now, by name."""
        found: dict[str, Tensor] = {}
        for full_name, (module_ref, name) in self._places.items():
            module = module_ref()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None:
                found[full_name] = buffer
        return found

    def description(self) -> str:
        """On which the ranks have to agree."""
        lines = [f"buffer of shape {list(buffer.shape)}, {buffer.dtype}" for buffer in self.named().values()]
        return "\n".join([f"broadcast_buffers {'mean' if self._means else True}", *lines, ""])

    def values(self, is_first: Tensor) -> Tensor:
        """Returns what travels: where they become what rank 0 has, zeros on the other ranks. Behind them is a 1."""
        all_values = []
        self._sent = []
        for buffer in self.named().values():
            flat = (torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer).reshape(-1)
            # What float32 does not hold travels as bytes.
            values = (flat.contiguous().view(torch.uint8) if self._travels_as_bytes(buffer) else flat).float()
            values = values.to(is_first.device, non_blocking=True)
            all_values.append(values if self._is_mean(buffer) else torch.where(is_first, values, 0.0))
            self._sent.append((buffer, values.numel()))
        return torch.cat([*all_values, torch.ones(1, device=is_first.device)])

    def arrive(self, sums: Tensor, means: Tensor) -> None:
        """Where a rank has failed, or none has batches, the buffers stay what they are."""
        have_come = sums[-1] > 0
        lengths = [length for _, length in self._sent]
        arrived = zip(self._sent, sums[:-1].split(lengths), means[:-1].split(lengths), strict=True)
        for (buffer, _), of_first, mean in arrived:
            values = mean if self._is_mean(buffer) else of_first
            dtype = buffer.dtype.to_real()
            flat = values.to(torch.uint8).view(dtype) if self._travels_as_bytes(buffer) else values.to(dtype)
            if buffer.is_complex():  # begins at an even offset, which what was split need not have
                flat = torch.view_as_complex(flat.clone().view(-1, 2))
            buffer.copy_(torch.where(have_come, flat.view(buffer.shape), buffer.to(flat.device)))
        self._sent = []

    def _is_mean(self, buffer: Tensor) -> bool:
        return self._means and (buffer.is_floating_point() or buffer.is_complex())

    def _travels_as_bytes(self, buffer: Tensor) -> bool:
        held = (torch.float32, torch.float16, torch.bfloat16)
        return not self._is_mean(buffer) and buffer.dtype.to_real() not in held

    def check_can_be_sent(self) -> None:
        """Raises ValueError where one cannot be written element by element, so that it cannot become rank 0's."""
        for name, buffer in self.named().items():
            if buffer.layout != torch.strided:
                what, way_out = f"buffer {name} is {buffer.layout}, which fastsync does not send", ""
            elif shares_memory(buffer):
                what, way_out = f"elements of buffer {name} share memory", "register a clone() of it, or "
            else:
                continue
            raise ValueError(
                f"module_or_params: {what}; {way_out}leave it to each rank, with init_sync=False and "
                "broadcast_buffers=False"
            )


class _Thread(threading.local):
    joining: GradientSynchronizer | None = None
    """Whose ``join()`` it is inside of."""


_thread = _Thread()
