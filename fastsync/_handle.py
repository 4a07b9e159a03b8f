"""The handles that every entry point returns, which of them are in use, and what optimizers and scalers do to them."""

from __future__ import annotations

import gc
import inspect
import math
import os
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from . import _C
from .autotune.choose import Candidate, explain, in_engine
from .autotune.measure import candidates_of
from .compression import AnyCompression, Auto, Compression, as_compression, on_nodes
from .doctor import cuda_left_out
from .stats import GradStats, SyncStats

MAX_SCALE_EXPONENT = 118
"""The engine's fp16 scales lie within 2**±118."""


def own_rank() -> int:
    """Returns this rank's number; 0 where there is no default group, so that it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


class SyncHandle(ABC):
    """Statistics of an engine, and its state for checkpoints."""

    _engine: _C.HookState | _C.Synchronizer | _C.ShardedState

    @abstractmethod
    def _named_parameters(self) -> Mapping[str, Tensor]: ...

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised. Raises RuntimeError before the first."""
        return GradStats(self._engine.grad_stats())

    def stats(self) -> SyncStats:
        """Returns what synchronisation has cost so far; on a GPU with an estimate for steps that are under way."""
        return SyncStats.from_totals(self._engine.totals())

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped.

        The step and each parameter's fp16 scale are equal on all ranks. What error feedback has not sent yet is each
        rank's own, and has its rank in its name, such as ``layer.weight of rank 1``: with it, save the states of all
        ranks, each to a file of its own or all with ``torch.distributed.checkpoint``. Zeros are left out, except before
        the first sync, for that to load into; scales are not there by then, and begin anew where that loads them. Waits
        for the device.
        """
        named = self._named_parameters()
        scale_of = {id(parameter): scale for parameter, scale in self._engine.scales()}
        residual_of = {id(parameter): residual for parameter, residual in self._engine.residuals() if residual.any()}
        return {
            "step": self._engine.step(),
            "scales": {name: scale_of[id(p)] for name, p in named.items() if id(p) in scale_of},
            "residuals": {self._own(name): residual_of[id(p)] for name, p in named.items() if id(p) in residual_of},
        }

    def _own(self, name: str) -> str:
        """What this rank's part of a state is called that each rank has one of."""
        return f"{name} of rank {own_rank()}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` returned. Call it on every rank, with the states of one step.

        Of what error feedback has not sent a rank takes its own. Where there is only that of other ranks it warns, and
        begins without. With another number of ranks leave all of it out: ``state_dict["residuals"] = {}``.

        Raises:
            ValueError: it is no state of an engine, a name is no parameter of the model, the step is no number of
                steps, a scale is not a power of two within ``2**±118``, or a residual is not
                of its parameter's size.
        """
        named = self._named_parameters()
        scales = state_dict.get("scales") if isinstance(state_dict, dict) else None
        if not isinstance(scales, dict):
            got = f"keys {list(state_dict)[:3]}" if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"state_dict: expected what state_dict() returns, a dict with 'scales', got {got}")
        residuals, step = state_dict.get("residuals", {}), state_dict.get("step", 0)
        if not isinstance(residuals, dict):
            raise ValueError(f"state_dict: expected 'residuals' to be a dict by name, got {residuals!r}")
        names = {self._own(name): name for name in named}  # residuals of older checkpoints have no rank
        residuals = {names.get(name, name): residual for name, residual in residuals.items()}
        others = [name for name in residuals if name not in named and re.sub(r" of rank \d+$", "", name) in named]
        for name in (*scales, *residuals):
            if name not in named and name not in others:
                raise ValueError(f"state_dict: the model has no parameter named {name!r}; is it another model's state?")
        residuals = {name: residual for name, residual in residuals.items() if name in named}
        if others and not residuals:
            warnings.warn(
                f"fastsync: of what error feedback had not sent, the state has that of other ranks ({others[0]!r}) and "
                f"nothing of rank {own_rank()}, which begins without; to keep it, save the state of every rank",
                stacklevel=2,
            )
        for name, scale in scales.items():
            if not _is_scale(scale):
                raise ValueError(
                    f"state_dict: the scale of {name!r} is {scale!r}, not a power of two from 2**-{MAX_SCALE_EXPONENT} "
                    f"to 2**{MAX_SCALE_EXPONENT}"
                )
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"state_dict: its step has to be a number of steps, got {step!r}")
        for name, residual in residuals.items():
            if not _is_residual(residual, named[name]):
                raise ValueError(
                    f"state_dict: the residual of {name!r} is not of the parameter's {named[name].numel()} values and "
                    "precision; is it another model's state?"
                )
        self._engine.set_step(step)
        self._engine.set_scales([(named[name], scale) for name, scale in scales.items()])
        self._engine.set_residuals([(named[name], residual) for name, residual in residuals.items()])


class GradientHandle(SyncHandle):
    """A handle that knows whose gradients it averages, what they travel with, and why."""

    _argument: ClassVar[str]
    """The argument of the public function that the parameters come from, for errors."""
    _group: dist.ProcessGroup
    _ranks_per_node: int | None = None
    """As the caller's DeviceMesh says; None where all links are alike."""
    _asked: Compression | Auto
    """The compression, without what a DeviceMesh says."""
    _compression: Compression | Auto
    _candidates: tuple[Candidate, ...]
    """What buckets may travel with. Equal on all ranks."""
    _taken_by: ClassVar[str] = ""
    """Ends the sentence that a parameter is averaged already: by what, and the way out."""

    def __repr__(self) -> str:
        # Asks nothing of the engine, which may be waiting for other ranks in another thread.
        numels = [parameter.numel() for parameter in self.parameters()]
        return (
            f"{type(self).__name__}({len(numels)} parameters with {sum(numels):,} values, "
            f"compression: {self._compression}, {self._group.size()} ranks)"
        )

    def state_dict(self) -> dict[str, Any]:
        """As ``SyncHandle.state_dict``."""
        state = super().state_dict()
        chosen = (candidate.compression for candidate in self._candidates)
        is_new = self._engine.num_steps() == self._engine.step() == 0
        if is_new and not state["residuals"] and any(each.error_feedback for each in chosen):
            trained = {name: p for name, p in self._named_parameters().items() if p.requires_grad and p.numel() > 0}
            state["residuals"] = {self._own(name): _no_residual(parameter) for name, parameter in trained.items()}
        return state

    @property
    def compression(self) -> Compression | Auto:
        """The compression. May be set, also to a shorthand, between steps: at the same one on all ranks."""
        return self._compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        self._asked = as_compression(compression)
        self._follow(on_nodes(self._asked, self._ranks_per_node))

    def explain(self) -> str:
        """Tells what each bucket of the next step travels with, how it gets to other ranks, and why, in a table.

        Raises:
            RuntimeError: no step was synchronised yet, which is when buckets are made.
        """
        stats = self.stats()
        if not stats.buckets:
            raise RuntimeError(
                "explain: buckets are made when the first backward is synchronised; before it, "
                "fastsync.measure_group().choose(numel) tells what a bucket of so many values travels with"
            )
        return explain(self._candidates, [bucket.numel for bucket in stats.buckets], stats.describe_transport())

    def remeasure(self) -> None:
        """Measures the process group again where ``compression`` is chosen by measurement: now that links are others.

        Every rank must call it, between steps. Profiles that were loaded are not used any more.
        """
        compression = self._compression
        if isinstance(compression, Auto):
            compression = replace(compression, profile=None)
        self._follow(compression, remeasure=True)

    def _follow(self, compression: Compression | Auto, *, remeasure: bool = False) -> None:
        named = self._planned_parameters()
        warn_of_generic_kernels(self._group, (parameter.device for parameter in named.values()))
        candidates = candidates_of(compression, self._group, named, self._argument, remeasure=remeasure)
        self._engine.set_compressions(in_engine(candidates))
        self._candidates, self._compression = candidates, compression

    def _planned_parameters(self) -> Mapping[str, Tensor]:
        """Those whose gradients have to travel."""
        return self._named_parameters()

    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """Returns the parameters whose gradients are averaged."""

    def taken(self) -> Iterable[Tensor]:
        """Returns the parameters that nothing else may average."""
        return self.parameters()

    def follow_scaler(self, scaler: GradScaler) -> None:
        """Lets what error feedback keeps change with the scale of the loss, as gradients do, from the next sync on.

        ``clip_grad_norm_(scaler=...)`` and ``scaler.step(optimizer)`` do so, too. Call it after
        ``scaler.scale(loss)``, on every rank.

        Raises:
            RuntimeError: it has scaled no loss yet.
        """
        if scaler.is_enabled():
            self._engine.follow_loss_scale(loss_scale(scaler))


class ClippableHandle(GradientHandle):
    """A handle of whole gradients: the norm that their unpack found out is the one that clipping needs."""

    _claimed_step = -1

    def claim_norm(self) -> Tensor:
        """Returns the newest ``GradStats.grad_norm`` for clipping, once: clipping changes it.

        Raises:
            RuntimeError: it has been used up, and no backward was synchronised since.
        """
        if self.is_norm_used_up():
            raise RuntimeError(
                "fastsync.clip_grad_norm_: no backward was synchronised since these gradients were clipped, so their "
                "norm is not known; clip once after each synchronised backward (the norm before clipping stays in "
                "grad_stats), or use torch.nn.utils.clip_grad_norm_"
            )
        grad_norm = self.grad_stats().grad_norm
        self.use_up_norm()
        return grad_norm

    def is_norm_used_up(self) -> bool:
        """Tells whether the gradients have been clipped since they were synchronised."""
        return self._engine.num_steps() == self._claimed_step and not self._engine.is_captured()

    def use_up_norm(self) -> None:
        """They are about to be clipped."""
        self._claimed_step = self._engine.num_steps()

    def check_not_unscaled(self, optimizer: Optimizer | None) -> None:
        """Raises RuntimeError where a GradScaler is known to have unscaled the optimizer's gradients; None: anybody's.

        One that was never handed over is known once it has stepped an optimizer.
        """
        if _some_scaler_has_unscaled(optimizer):
            raise RuntimeError(
                "fastsync.clip_grad_norm_: a GradScaler has unscaled gradients since they were synchronised, so that "
                "the norm that is known is too large by its scale; pass optimizer= and scaler=, or use "
                "torch.nn.utils.clip_grad_norm_"
            )

    def check_backward_synchronised(self) -> None:
        """Raises RuntimeError where not a backward but the user had the gradients synchronised."""


def _is_scale(scale: object) -> bool:
    if not isinstance(scale, float):
        return False
    fraction, exponent = math.frexp(scale)
    return fraction == 0.5 and abs(exponent - 1) <= MAX_SCALE_EXPONENT


def _no_residual(parameter: Tensor) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)


def _is_residual(residual: object, parameter: Tensor) -> bool:
    none = _no_residual(parameter)
    return isinstance(residual, Tensor) and residual.dtype == none.dtype and residual.shape == none.shape


_seen: set[str] = set()


def warn_of_generic_kernels(group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
    """Warns, once for a type of device, where torch's own operations go over its gradients and nobody has chosen that.

    Gradients that the group sums on the host are a CPU's. Raises ValueError where FASTSYNC_KERNELS is neither "auto"
    nor "aten".
    """
    for kind in {_C.device_of_sums(group, device).type for device in set(devices)} - _seen:
        if _C.kernels(kind) == "generic" and os.environ.get("FASTSYNC_KERNELS") != "aten":
            is_nvidia = kind == "cuda" and torch.version.hip is None
            reason = cuda_left_out() if is_nvidia else "fastsync has some for CPUs and for NVIDIA GPUs"
            warnings.warn(
                f"fastsync: gradients on {kind} are packed by torch's own operations, which take more launches and "
                f"more memory than fused kernels do: none were built for it{f' ({reason})' if reason else ''}",
                stacklevel=5,  # where attach was called
            )
        _seen.add(kind)


# ---- which handles are in use ---------------------------------------------------------------------------------------

# One thread may attach while another steps, or detaches; and a handle may be collected while this is held.
_lock = threading.RLock()
_handles: WeakKeyDictionary[nn.Module, WeakSet[GradientHandle]] = WeakKeyDictionary()
"""By the module that they were made for, or that they look after. None keeps the other alive."""
_watched: WeakSet[ClippableHandle] = WeakSet()
"""Those whose optimizers are watched."""
_hooks: list[RemovableHandle] = []
"""Of all optimizers, while one of them is watched."""
_checks: list[Callable[[Optimizer], None]] = []


def remember(handle: GradientHandle, modules: Iterable[nn.Module]) -> None:
    """Lets ``handle_of`` find the handle."""
    with _lock:
        for module in modules:
            _handles.setdefault(module, WeakSet()).add(handle)


def watch(handle: ClippableHandle) -> None:
    """From now on its parameters are taken, and its engine hears of optimizers' steps. One inside backward raises.

    Of each step the engine is told, for version counters are left as they are by a fused one and by what writes to
    ``.data``.
    """
    with _lock:
        _watched.add(handle)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
    finalize(handle, _let_optimizers_be).atexit = False


def forget(handle: GradientHandle) -> None:
    """Ends what ``remember`` and ``watch`` began."""
    with _lock:
        if isinstance(handle, ClippableHandle):
            _watched.discard(handle)
        for handles in _handles.values():
            handles.discard(handle)
        _let_optimizers_be()


def watched() -> list[ClippableHandle]:
    """Returns those that are watched, in a list of its own: another thread may attach meanwhile."""
    with _lock:
        return list(_watched)


def modules_of(handle: GradientHandle) -> list[nn.Module]:
    """Returns the modules that it was remembered for, the outermost first."""
    with _lock:
        return [module for module, handles in _handles.items() if handle in handles]


def check_free(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError where a handle in use averages one of these parameters already."""
    if _first_taken(named) is not None:
        gc.collect()  # DDP is part of reference cycles, and that one may be in use no more
    if (taken := _first_taken(named)) is not None:
        name, handle = taken
        raise ValueError(f"{argument}: parameter {name} is averaged already, {handle._taken_by}")


def _first_taken(named: Mapping[str, Tensor]) -> tuple[str, ClippableHandle] | None:
    taken = {id(p): handle for handle in watched() for p in handle.taken()}
    return next(((name, taken[id(p)]) for name, p in named.items() if id(p) in taken), None)


def handle_of(module: nn.Module) -> GradientHandle:
    """Finds the handle that averages a module's gradients, where what made it is out of reach.

    Args:
        module: what ``attach``, ``register_comm_hook``, ``register_reduce_scatter`` or ``register_all_reduce_hook`` was
            given, or of an attached model a part with parameters of its own.

    Raises:
        ValueError: it is no module, there is none, or there are several.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    with _lock:
        handles = list(_handles.get(module, WeakSet()))
    if len(handles) != 1:
        raise ValueError(
            f"module: {len(handles) or 'no'} handles of fastsync look after this {type(module).__name__}; pass the "
            "module that attach() or register_comm_hook() was given, or keep what they return"
        )
    return handles[0]


# ---- optimizers -----------------------------------------------------------------------------------------------------

_WAY_OUT = (
    "so it would use this rank's own gradients and ranks would drift apart; let one optimizer step after backward() "
    "has returned, or do not attach these parameters"
)


def before_each_step(check: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Has it called before each step of any optimizer, while something is watched."""
    _checks.append(check)
    return check


def check_no_optimizer_in_backward(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError for parameters that torch's ``_apply_optimizer_in_backward`` was called with."""
    for name, parameter in named.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{argument}: parameter {name} has an optimizer that steps inside backward() "
                f"(_apply_optimizer_in_backward), {_WAY_OUT}"
            )


def _let_optimizers_be() -> None:
    """Where nothing is watched any more."""
    with _lock:
        if not list(_watched):
            while _hooks:
                _hooks.pop().remove()


def _before_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for check in _checks:
        check(optimizer)


@before_each_step
def _check_not_in_backward(optimizer: Optimizer) -> None:
    if torch._C._current_graph_task_id() == -1:
        return
    averaged = {id(parameter) for handle in watched() for parameter in handle.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in averaged:
                raise RuntimeError(
                    f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                    f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, {_WAY_OUT}"
                )


def _after_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    scaler = _scaler_that_steps()
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for handle in watched():
        if not stepped.isdisjoint(map(id, handle.parameters())):
            handle._engine.note_update()  # type: ignore[union-attr]  # sharded models are not watched
            if scaler is not None:
                handle.follow_scaler(scaler)


# ---- GradScalers, asked without waiting for the device --------------------------------------------------------------

_scalers: WeakSet[GradScaler] = WeakSet()


def note_scaler(scaler: GradScaler) -> None:
    """It is known from now on."""
    with _lock:
        _scalers.add(scaler)


def loss_scale(scaler: GradScaler) -> Tensor:
    """The tensor that ``update()`` writes the scale to, on its own device.

    Raises:
        RuntimeError: it has scaled no loss yet.
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
    stage = _stages(scaler).get(id(optimizer), OptState.READY)
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "scaler: it has stepped with these gradients already; clip between backward() and scaler.step(optimizer)"
        )
    return stage is OptState.UNSCALED


def _some_scaler_has_unscaled(optimizer: Optimizer | None) -> bool:
    """Tells whether a GradScaler that is known has unscaled the optimizer's gradients; None: any optimizer's.

    Unscaling leaves no trace in the gradients: their version counters do not count it.
    """
    with _lock:
        stages = [_stages(scaler) for scaler in _scalers]
    return any(
        OptState.UNSCALED in (each.values() if optimizer is None else [each.get(id(optimizer))]) for each in stages
    )


def _scaler_that_steps() -> GradScaler | None:
    """Called as an optimizer steps, notices the GradScaler that has called it: nothing but the stack tells."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    scaler: GradScaler = frame.f_locals["self"]
    note_scaler(scaler)
    return scaler


def _stages(scaler: GradScaler) -> dict[int, Any]:
    """The stage of each optimizer by its id; of those that have been unscaled or stepped since the last update."""
    if not scaler.is_enabled():
        return {}
    return {key: state["stage"] for key, state in scaler._per_optimizer_states.items()}
