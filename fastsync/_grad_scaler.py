"""Asks a GradScaler about gradients, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ._checks import instances_of


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


def skip_unless_finite(scaler: GradScaler, optimizer: Optimizer, norm: Tensor) -> None:
    """Has the scaler skip the optimizer's step if the norm is not finite, where ``unscale_`` has looked already."""
    if has_unscaled(scaler, optimizer):
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            is_bad = norm.isfinite().logical_not().to(found.device, found.dtype)
            found.copy_(torch.maximum(found, is_bad))  # fused optimizers skip where it is exactly 1


def scale_of_step(optimizer: Optimizer) -> Tensor | None:
    """Returns the scale of the GradScaler that takes this optimizer's step; None after ``unscale_``.

    It searches all objects for the scaler.
    """
    for scaler in instances_of(GradScaler):
        state = scaler._per_optimizer_states.get(id(optimizer))
        if scaler.is_enabled() and state is not None and state["found_inf_per_device"]:
            return None if state["stage"] is OptState.UNSCALED else loss_scale(scaler)
    return None


def forget_step(scaler: GradScaler, optimizers: Iterable[Optimizer]) -> None:
    """Lets the scaler take new gradients of these optimizers, in place of those of a step that has failed."""
    for optimizer in optimizers:
        scaler._per_optimizer_states.pop(id(optimizer), None)
        forget_scale(optimizer)


def forget_scale(optimizer: Optimizer) -> None:
    """Takes a scaler's attributes off a fused optimizer whose step has failed: the next step would multiply by them."""
    if vars(optimizer).pop("found_inf", None) is not None:
        vars(optimizer).pop("grad_scale", None)
