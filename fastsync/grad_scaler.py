"""Asks a GradScaler about the gradients that it has scaled, without waiting for the device."""

import gc
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
    scale: Tensor | None = scaler._scale
    if scale is None:
        raise RuntimeError(
            "scaler: it has scaled no loss yet, so these gradients are not its; call scaler.scale(loss).backward(), "
            "or leave scaler out"
        )
    return scale.to(device, non_blocking=True)


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
    """Tells whether a GradScaler that ``look_for_scalers`` found has unscaled the optimizer's gradients; None: any.

    Unscaling leaves no trace in the gradients: their version counters do not count it.
    """
    for scaler in _known:
        stages = _stages(scaler)
        if OptState.UNSCALED in (stages.values() if optimizer is None else [stages.get(id(optimizer))]):
            return True
    return False


_known: "weakref.WeakSet[GradScaler]" = weakref.WeakSet()


def look_for_scalers() -> None:
    """Finds the GradScalers of this process among all its objects, which takes tens of milliseconds."""
    _known.update(thing for thing in gc.get_objects() if issubclass(type(thing), GradScaler))


def _stages(scaler: GradScaler) -> dict[int, Any]:
    """The stage of each optimizer by its id; of those that have been unscaled or stepped since the last update."""
    if not scaler.is_enabled():
        return {}
    return {key: state["stage"] for key, state in scaler._per_optimizer_states.items()}
