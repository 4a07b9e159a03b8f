"""The handles that hook and attach return: statistics, state for checkpoints, compression, the norm for clipping."""

import math
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from . import _C
from .autotune.candidates import Explanation, engine_schedule
from .autotune.plan import Plan, make_plan
from .compression import AnyCompression, Auto, Compression, Schedule, as_compression, on_nodes
from .grad_scaler import loss_scale, some_scaler_has_unscaled
from .kernels import look_at_kernels
from .reference import MAX_SCALE_EXPONENT
from .stats import GradStats, SyncStats, describe_transport


def own_rank() -> int:
    """Returns this rank's number; 0 where there is no default group, so that it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


class SyncHandle(ABC):
    """Statistics of an engine, and its state for checkpoints."""

    _engine: "_C.HookState | _C.Synchronizer | _C.ShardedState"

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
        residual_of = {
            id(p): {"own": own, "of_sums": of_sums}
            for p, own, of_sums in self._engine.residuals()
            if own.any() or (of_sums is not None and of_sums.any())
        }
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
                steps, a scale is not a power of two within ``2**±reference.MAX_SCALE_EXPONENT``, or a residual is not
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
        parts = [(named[name], residual["own"], residual["of_sums"]) for name, residual in residuals.items()]
        self._engine.set_residuals(parts)


class GradientHandle(SyncHandle):
    """A handle that knows whose gradients it averages: what they travel with, why, and their norm for clipping."""

    _argument: ClassVar[str]
    """The argument of the public function that the parameters come from, for errors."""
    _group: dist.ProcessGroup
    _ranks_per_node: int | None = None
    """As the caller's DeviceMesh says; None where all links are alike."""
    _asked: Compression | Auto | Schedule
    """The compression, without what a DeviceMesh says."""
    _compression: Compression | Auto | Schedule
    _plan: Plan
    _claimed_step = -1

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
        chosen = (candidate.compression for _, candidates in self._plan.phases for candidate in candidates)
        is_new = self._engine.num_steps() == self._engine.step() == 0
        if is_new and not state["residuals"] and any(each.error_feedback for each in chosen):
            trained = {name: p for name, p in self._named_parameters().items() if p.requires_grad and p.numel() > 0}
            state["residuals"] = {self._own(name): _no_residual(parameter) for name, parameter in trained.items()}
        return state

    @property
    def compression(self) -> Compression | Auto | Schedule:
        """The compression. May be set, also to a shorthand, between steps: at the same one on all ranks."""
        return self._compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        self._asked = as_compression(compression)
        self._follow(on_nodes(self._asked, self._ranks_per_node))

    def explain(self) -> Explanation:
        """Tells what each bucket of the next step travels with, how it gets to other ranks, and why: to be printed.

        Raises:
            RuntimeError: no step was synchronised yet, which is when buckets are made.
        """
        stats = self.stats()
        if not stats.buckets:
            raise RuntimeError(
                "explain: buckets are made when the first backward is synchronised; before it, "
                "fastsync.measure_group().choose(numel) tells what a bucket of so many values travels with"
            )
        numels = [bucket.numel for bucket in stats.buckets]
        return self._plan.explain(self._engine.step(), numels, describe_transport(stats))

    def remeasure(self) -> None:
        """Measures the process group again where ``compression`` is chosen by measurement: now that links are others.

        Every rank must call it, between steps. Profiles that were loaded are not used any more.
        """
        self._follow(_without_profiles(self._compression), remeasure=True)

    def _follow(self, compression: Compression | Auto | Schedule, *, remeasure: bool = False) -> None:
        named = self._planned_parameters()
        look_at_kernels(self._group, (parameter.device for parameter in named.values()))
        plan = make_plan(compression, self._group, named, self._argument, remeasure=remeasure)
        self._engine.set_schedule(engine_schedule(plan.phases))
        self._plan, self._compression = plan, compression

    def _planned_parameters(self) -> Mapping[str, Tensor]:
        """Those whose gradients have to travel."""
        return self._named_parameters()

    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """Returns the parameters whose gradients are averaged."""

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

    def follow_scaler(self, scaler: GradScaler) -> None:
        """Lets what error feedback keeps change with the scale of the loss, as gradients do, from the next sync on.

        ``clip_grad_norm_(scaler=...)`` and ``scaler.step(optimizer)`` do so, too. Call it after
        ``scaler.scale(loss)``, on every rank.

        Raises:
            RuntimeError: it has scaled no loss yet.
        """
        if scaler.is_enabled():
            self._engine.follow_loss_scale(loss_scale(scaler))

    def check_not_unscaled(self, optimizer: Optimizer | None) -> None:
        """Raises RuntimeError where a GradScaler is known to have unscaled the optimizer's gradients; None: anybody's.

        One that was never handed over is known once it has stepped an optimizer.
        """
        if some_scaler_has_unscaled(optimizer):
            raise RuntimeError(
                "fastsync.clip_grad_norm_: a GradScaler has unscaled gradients since they were synchronised, so that "
                "the norm that is known is too large by its scale; pass optimizer= and scaler=, or use "
                "torch.nn.utils.clip_grad_norm_"
            )

    def check_backward_synchronised(self) -> None:
        """Raises RuntimeError where not a backward but the user had the gradients synchronised."""


def _without_profiles(compression: Compression | Auto | Schedule) -> Compression | Auto | Schedule:
    if isinstance(compression, Schedule):
        phases = {step: _without_profiles(each) for step, each in compression.phases}
        return Schedule(phases)  # type: ignore[arg-type]  # no Schedule in a Schedule
    return replace(compression, profile=None) if isinstance(compression, Auto) else compression


def _is_scale(scale: object) -> bool:
    if not isinstance(scale, float):
        return False
    fraction, exponent = math.frexp(scale)
    return fraction == 0.5 and abs(exponent - 1) <= MAX_SCALE_EXPONENT


def _no_residual(parameter: Tensor) -> dict[str, Tensor]:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return {part: torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device) for part in ("own", "of_sums")}


def _is_residual(residual: object, parameter: Tensor) -> bool:
    if not isinstance(residual, dict) or residual.keys() != {"own", "of_sums"}:
        return False
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    parts = [residual["own"]] + ([] if residual["of_sums"] is None else [residual["of_sums"]])
    return all(isinstance(p, Tensor) and p.dtype == dtype and p.shape == (parameter.numel(),) for p in parts)


# In use, by the module that they were made for, or that they look after. None keeps the other alive.
_handles: "WeakKeyDictionary[nn.Module, WeakSet[GradientHandle]]" = WeakKeyDictionary()
_lock = threading.RLock()  # for _handles: one thread may attach while another detaches


def remember(module: nn.Module, handle: GradientHandle) -> None:
    """Lets ``handle_of`` find the handle."""
    with _lock:
        _handles.setdefault(module, WeakSet()).add(handle)


def forget_handle(handle: GradientHandle) -> None:
    """Ends that, for one that is in use no more."""
    with _lock:
        for handles in _handles.values():
            handles.discard(handle)


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
