"""The handles that entry points return, which of them are in use, and what optimizers and GradScalers do to them."""

from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _C
from ._late_parameters import LateParameters
from ._optimizer_steps import is_training_step
from .autotune.choose import UNTRIED, Candidate, explain, in_engine
from .autotune.measure import candidates_of
from .compression import AnyCompression, Auto, Compression, as_compression
from .stats import BucketStats, GradStats, SyncStats


def own_rank() -> int:
    """Returns this rank's number; 0 where there is no default group, so that it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


class SyncHandle:
    """Statistics of an engine."""

    _engine: _C.HookState | _C.Synchronizer | _C.ShardedState

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised. Raises RuntimeError before the first."""
        return GradStats(self._engine.grad_stats())

    def stats(self) -> SyncStats:
        """Returns what synchronisation has cost so far; on a GPU with an estimate for steps that are under way."""
        stats = self._engine.stats()
        return SyncStats(**stats | {"buckets": tuple(BucketStats(**bucket) for bucket in stats["buckets"])})


class GradientHandle(SyncHandle, ABC):
    """A handle that knows whose gradients it averages, what they travel with, and why."""

    _group: dist.ProcessGroup
    _compression: Compression | Auto
    _candidates: tuple[Candidate, ...]
    """The compressions that buckets may travel with. Equal on all ranks."""
    _modules: Sequence[ref[nn.Module]] = ()
    """The modules that ``handle_of`` finds the handle by."""

    def __repr__(self) -> str:
        # Asks nothing of the engine, which may be waiting for other ranks in another thread.
        numels = [parameter.numel() for parameter in self.parameters()]
        return (
            f"{type(self).__name__}({len(numels)} parameters with {sum(numels):,} values, "
            f"compression: {self._compression}, {self._group.size()} ranks)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped.

        The step and each parameter's fp16 scale are equal on all ranks. What error feedback has not sent yet is each
        rank's own, under a name such as ``layer.weight of rank 1``: with error feedback, save the states of all ranks,
        each to a file of its own or all with ``torch.distributed.checkpoint``. Residuals of zeros are left out, except
        before the first sync, so that it has tensors to load into; scales then begin anew. Waits for the device.
        """
        named = self._named_parameters()
        rows = self._engine.saved()
        scale_of = {id(p): scale for p, scale, _ in rows if scale is not None}
        residual_of = {id(p): residual for p, _, residual in rows if residual is not None and residual.any()}
        is_new = self._engine.num_steps() == self._engine.step() == 0
        if is_new and not residual_of and any(each.compression.error_feedback for each in self._candidates):
            trained = (parameter for parameter in named.values() if parameter.requires_grad and parameter.numel() > 0)
            residual_of = {id(parameter): _no_residual(parameter) for parameter in trained}
        return {
            "step": self._engine.step(),
            "scales": {name: scale_of[id(p)] for name, p in named.items() if id(p) in scale_of},
            "residuals": {self._own(name): residual_of[id(p)] for name, p in named.items() if id(p) in residual_of},
        }

    def _own(self, name: str) -> str:
        """Names this rank's part of a state that each rank has a part of."""
        return f"{name} of rank {own_rank()}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` returned. Call it on every rank, with the states of one step.

        Each rank takes its own residuals. If the state has residuals of other ranks only, it warns and begins without.
        With another number of ranks leave them out: ``state_dict["residuals"] = {}``.

        Raises:
            ValueError: the state is not an engine's, or not this model's.
        """
        named = self._named_parameters()
        scales = state_dict.get("scales") if isinstance(state_dict, dict) else None
        if not isinstance(scales, dict):
            raise ValueError(
                f"state_dict: expected what state_dict() returns, a dict with 'scales', got {state_dict!r:.80}"
            )
        given, own = state_dict.get("residuals") or {}, {self._own(name): name for name in named}
        for name in (*scales, *given):
            if name not in own and re.sub(r" of rank \d+$", "", name) not in named:
                raise ValueError(f"state_dict: the model has no parameter named {name!r}; is it another model's state?")
        residuals = {own[key]: residual for key, residual in given.items() if key in own}
        if given and not residuals:
            warnings.warn(
                f"fastsync: the state has residuals of other ranks (such as {next(iter(given))!r}) and none of rank "
                f"{own_rank()}, which begins with zeros; to keep them, save the state of every rank",
                stacklevel=2,
            )
        for name, residual in residuals.items():
            if not _is_residual(residual, named[name]):
                raise ValueError(
                    f"state_dict: the residual of {name!r} has another size or dtype than the parameter, which has "
                    f"{named[name].numel()} values; is it another model's state?"
                )
        self._engine.set_step(state_dict.get("step", 0))
        saved = dict.fromkeys((*scales, *residuals))
        self._engine.set_saved([(named[name], scales.get(name), residuals.get(name)) for name in saved])

    @property
    def compression(self) -> Compression | Auto:
        """The compression. May be set, also to a shorthand, between steps: at the same one on all ranks.

        If one rank sets it alone, the next step raises ``RuntimeError`` on every rank.
        """
        return self._compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        self._follow(as_compression(compression))

    def explain(self) -> str:
        """Returns a line for each run of equal buckets: what they travel with in the next step, and why.

        Raises:
            RuntimeError: no step was synchronised yet. The first one makes the buckets.
        """
        stats = self.stats()
        if not stats.buckets:
            raise RuntimeError(
                "explain: buckets are made when the first backward is synchronised; until then, "
                "fastsync.measure_group().choose(numel) says which compression a bucket of numel values would get"
            )
        text = explain(self._candidates, [bucket.numel for bucket in stats.buckets], stats.describe_transport())
        on_gpu = any(parameter.is_cuda for parameter in self._planned_parameters().values())
        is_untried = len(self._candidates) > 1 and on_gpu
        return f"{text}\n{UNTRIED}" if is_untried else text

    def _follow(self, compression: Compression | Auto) -> None:
        named = self._planned_parameters()
        for device in {parameter.device for parameter in named.values()}:
            _C.check_device(self._group, device)
            warn_of_generic_kernels(device.type)
        candidates = candidates_of(compression, self._group, named)
        self._engine.set_compressions(in_engine(candidates))
        self._candidates, self._compression = candidates, compression

    @abstractmethod
    def _named_parameters(self) -> Mapping[str, Tensor]: ...

    def _planned_parameters(self) -> Mapping[str, Tensor]:
        """Returns the parameters whose gradients have to travel."""
        return self._named_parameters()

    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """Returns the parameters whose gradients are averaged."""


class ClippableHandle(GradientHandle):
    """A handle of whole gradients: clipping uses the norm that unpacking them has found, and optimizers are watched."""

    _clipped_step = -1  # the newest whose gradients were clipped
    clips_in_next_step = False
    _taken_by: ClassVar[str]
    """Ends the sentence that a parameter is averaged already: by what, and the way out."""
    _late_reason: ClassVar[str]
    """Ends the sentence that a parameter of the model is not averaged: why, and the way out."""
    _ids: frozenset[int]
    """The ids of the parameters whose gradients are averaged, or would be if they were not frozen."""

    def taken(self) -> Iterable[Tensor]:
        """Returns the parameters that no other handle may average."""
        return self.parameters()

    def known_norm(self) -> Tensor | None:
        """Returns the newest ``GradStats.grad_norm``, if the gradients are proven to be those that it is of.

        They are where Python has seen none of them since backward made them, and no later backward has added to them.
        """
        engine = self._engine
        is_known = engine.num_steps() == 0 or engine.gradients_are_unchanged()  # type: ignore[union-attr]
        return self.grad_stats().grad_norm if is_known else None

    def is_clipped(self) -> bool:
        """Tells whether the gradients have been clipped since they were synchronised."""
        return self._engine.num_steps() == self._clipped_step and not self._engine.is_captured()

    def note_clip(self, in_next_step: bool) -> None:
        """Notes that the gradients are clipped: now, or in the optimizer's next step."""
        self._clipped_step, self.clips_in_next_step = self._engine.num_steps(), in_next_step

    def stepped_by(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yields the parameters of an optimizer whose gradients are averaged."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._ids and parameter.requires_grad:
                    yield parameter

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step inside backward."""
        if torch._C._current_graph_task_id() == -1:
            return
        for parameter in self.stepped_by(optimizer):
            raise RuntimeError(
                f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, so it "
                "would use this rank's own gradients and ranks would drift apart; let one optimizer step after "
                "backward() has returned, or do not attach these parameters"
            )

    @abstractmethod
    def _parameters_of_model(self) -> Iterable[tuple[str, Tensor]]:
        """Returns what the model has by now, with names, but for what is meant to be each rank's own."""

    @cached_property
    def _late(self) -> LateParameters:
        return LateParameters(self._ids)

    def check_nothing_is_late(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step a parameter of the model that nobody averages."""
        for name, parameter in self._late.stepped_by(optimizer, self._parameters_of_model):
            if not any(each is parameter for handle in _clippable() for each in handle.taken()):
                raise RuntimeError(
                    f"fastsync: {type(optimizer).__name__} was about to step {name}, whose gradient no rank has "
                    f"averaged, because {self._late_reason}"
                )

    def note_step(self, optimizer: Optimizer) -> None:
        """Tells the engine of an optimizer's step: fused ones and writes to ``.data`` change no version counter."""
        if any(True for _ in self.stepped_by(optimizer)):
            self._engine.note_update()  # type: ignore[union-attr]  # sharded models have no such handle


def _no_residual(parameter: Tensor) -> Tensor:
    is_wide = (parameter.grad_dtype or parameter.dtype) == torch.float64
    dtype = torch.float64 if is_wide else torch.float32
    return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)


def _is_residual(residual: object, parameter: Tensor) -> bool:
    none = _no_residual(parameter)
    return isinstance(residual, Tensor) and residual.dtype == none.dtype and residual.shape == none.shape


@cache
def warn_of_generic_kernels(kind: str) -> None:
    """Warns, once for a type of device, where torch's own operations go over its gradients and nobody has chosen that.

    Raises ValueError where FASTSYNC_KERNELS is neither "auto" nor "aten".
    """
    if _C.kernels(kind) == "generic" and os.environ.get("FASTSYNC_KERNELS") != "aten":
        warnings.warn(
            f"fastsync: gradients on {kind} are packed by torch's own operations, which take more launches and more "
            "memory than fused kernels; `fastsync doctor` tells for which devices kernels are built",
            stacklevel=5,  # where attach was called
        )


# ---- which handles are in use ---------------------------------------------------------------------------------------

# One thread may attach while another steps, or detaches; and a handle may be collected while this is held.
_lock = threading.RLock()
_in_use: set[ref[GradientHandle]] = set()  # not a WeakSet, which is slow to iterate over: every step does
_kept: WeakKeyDictionary[nn.Module, list[GradientHandle]] = WeakKeyDictionary()
"""Keeps handles alive for as long as one of these modules lives."""
NOBODY = nn.Module()
"""Keeps handles of loose parameters alive until ``detach()``."""


def begin_use(handle: GradientHandle, modules: Sequence[nn.Module], kept_by: Iterable[nn.Module] = ()) -> None:
    """Lets ``handle_of`` find the handle by its modules, and watches optimizers' steps.

    The handle must not keep the modules of ``kept_by`` alive, which keep it alive.
    """
    handle._modules = [ref(module) for module in modules]
    with _lock:
        _in_use.add(ref(handle, _in_use.discard))
        for module in kept_by:
            _kept.setdefault(module, []).append(handle)
    _watch_optimizers()


def end_use(handle: GradientHandle) -> None:
    """Ends what ``begin_use`` began."""
    with _lock:
        _in_use.discard(ref(handle))
        for handles in _kept.values():
            if handle in handles:
                handles.remove(handle)


def _clippable() -> list[ClippableHandle]:
    """Returns those in use, in a list of its own: another thread may attach meanwhile."""
    with _lock:
        return [handle for known in _in_use.copy() if isinstance(handle := known(), ClippableHandle)]


def check_free(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError where a handle in use averages one of these parameters already."""
    names = {id(parameter): name for name, parameter in named.items()}
    if any(id(parameter) in names for handle in _clippable() for parameter in handle.taken()):
        gc.collect()  # DDP is part of reference cycles, and that one may be in use no more
    for handle in _clippable():
        for parameter in handle.taken():
            if id(parameter) in names:
                name = names[id(parameter)]
                raise ValueError(f"{argument}: parameter {name} is averaged already, {handle._taken_by}")


def groups_of(parameters: Iterable[Tensor]) -> set[dist.ProcessGroup]:
    """Returns the groups over which handles in use average gradients of these parameters."""
    ids = set(map(id, parameters))
    return {handle._group for handle in _clippable() if any(id(each) in ids for each in handle.taken())}


def handles_of(module: nn.Module) -> list[GradientHandle]:
    """Returns the handles that ``begin_use`` was called with for this module."""
    with _lock:
        alive = [handle for known in _in_use.copy() if (handle := known()) is not None]
    return [handle for handle in alive if any(known() is module for known in handle._modules)]


def handle_of(module: nn.Module) -> GradientHandle:
    """Finds the handle that averages a module's gradients.

    Args:
        module: what ``attach``, ``register_comm_hook``, ``register_reduce_scatter`` or ``register_all_reduce_hook`` was
            given, or a part of an attached model that has parameters of its own.

    Raises:
        ValueError: the argument is not a module, or it has no handle or several.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    handles = handles_of(module)
    if len(handles) != 1:
        raise ValueError(
            f"module: {len(handles) or 'no'} handles of fastsync belong to this {type(module).__name__}; pass the "
            "module that attach() or register_comm_hook() was given, or keep what they return"
        )
    return handles[0]


# ---- optimizers -----------------------------------------------------------------------------------------------------


@cache  # once a process: without handles the hooks do nothing
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    handles = _clippable()
    if handles and is_training_step(optimizer):
        for handle in handles:
            handle.check_before_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    handles = _clippable()
    if handles and is_training_step(optimizer):
        for handle in handles:
            handle.note_step(optimizer)


# ---- GradScalers, asked without waiting for the device --------------------------------------------------------------


def loss_scale(scaler: GradScaler) -> Tensor:
    """Returns the tensor that ``update()`` writes the scale to, on its own device.

    Raises:
        RuntimeError: the scaler has scaled no loss yet.
    """
    scale: Tensor | None = scaler._scale
    if scale is None:
        raise RuntimeError(
            "scaler: it has scaled no loss yet, so these gradients are not its; call scaler.scale(loss).backward(), "
            "or leave scaler out"
        )
    return scale


def has_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Tells whether ``unscale_`` has divided the optimizer's gradients by the scale.

    Raises:
        RuntimeError: the optimizer has stepped since the scaler's last ``update()``.
    """
    states: Mapping[int, dict[str, Any]] = scaler._per_optimizer_states
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "scaler: it has stepped with these gradients already; clip between backward() and scaler.step(optimizer)"
        )
    return stage is OptState.UNSCALED
