"""Asks a GradScaler about the gradients that it has scaled, without waiting for the device."""

import inspect
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """The scale on ``device``, 0-dim float32. The newest ``update()`` of the scaler is in it.

    Raises:
        RuntimeError: it has scaled no loss yet.
    """
    return loss_scale(scaler).to(device, non_blocking=True)


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


def some_scaler_has_unscaled(optimizer: Optimizer | None) -> bool:
    """Tells whether a GradScaler that is known has unscaled the optimizer's gradients; None: any optimizer's.

    Unscaling leaves no trace in the gradients: their version counters do not count it.
    """
    with _lock:
        known = list(_known)
    for scaler in known:
        stages = _stages(scaler)
        if OptState.UNSCALED in (stages.values() if optimizer is None else [stages.get(id(optimizer))]):
            return True
    return False


_known: "weakref.WeakSet[GradScaler]" = weakref.WeakSet()
_lock = threading.Lock()


def note_scaler(scaler: GradScaler) -> None:
    """It is known from now on."""
    with _lock:
        _known.add(scaler)


def note_scaler_that_steps() -> GradScaler | None:
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
