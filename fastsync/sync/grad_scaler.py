"""Asks a GradScaler about gradients, without waiting for the device."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .._torch_compat import scale_of_scaler, states_of_scaler
from .optimizer_steps import innermost, register_when_watched


def loss_scale(scaler: GradScaler) -> Tensor:
    """Returns the tensor that ``update()`` writes the scale to, on its own device.

    Raises:
        RuntimeError: the scaler has scaled no loss yet.
    """
    scale = scale_of_scaler(scaler)
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
    states = states_of_scaler(scaler)
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "scaler: it has stepped with these gradients already; clip between backward() and scaler.step(optimizer)"
        )
    return stage is OptState.UNSCALED


def skip_unless_finite(scaler: GradScaler, optimizer: Optimizer, norm: Tensor) -> None:
    """Has the scaler skip the optimizer's step if the norm is not finite, where ``unscale_`` has looked already."""
    if has_unscaled(scaler, optimizer):
        for found in states_of_scaler(scaler)[id(optimizer)]["found_inf_per_device"].values():
            is_bad = norm.isfinite().logical_not().to(found.device, found.dtype)
            found.copy_(torch.maximum(found, is_bad))  # fused optimizers skip where it is exactly 1


class _Steps(threading.local):
    """The calls of ``GradScaler.step`` that a thread is inside, from outside in: the scaler, and what it was given."""

    def __init__(self) -> None:
        self.under_way: list[tuple[GradScaler, Any]] = []


_steps = _Steps()


def _note_steps() -> None:
    """Lets ``GradScaler.step`` note its calls. A scaler leaves no trace on an optimizer that is not fused."""
    step = GradScaler.step

    @wraps(step)
    def noted(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        _steps.under_way.append((self, optimizer))
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:
            _steps.under_way.pop()

    GradScaler.step = noted  # type: ignore[method-assign]


register_when_watched(_note_steps)  # see Note [Hooks of all optimizers]


def scaler_of_step(optimizer: Optimizer) -> tuple[GradScaler, Optimizer] | None:
    """Returns the enabled GradScaler that takes this optimizer's step, and what it was given; None without one.

    Call it inside the step. The optimizer itself, or a wrapper around it, was given.
    """
    for scaler, given in reversed(_steps.under_way):
        if not scaler.is_enabled():
            return None
        if given is optimizer or (isinstance(given, Optimizer) and innermost(given) is innermost(optimizer)):
            return scaler, given
    return None


def scale_of_step(optimizer: Optimizer) -> Tensor | None:
    """Returns the scale of the GradScaler that takes this optimizer's step; None after ``unscale_``.

    Raises:
        RuntimeError: no GradScaler takes it.
    """
    found = scaler_of_step(optimizer)
    if found is None:
        forget_scale(optimizer)
        raise RuntimeError(
            f"fastsync: {type(optimizer).__name__} has found_inf, and no GradScaler takes this step. So the loss scale "
            "cannot be told from the clip of an earlier step that was left out. Step by scaler.step(optimizer); or "
            "call fastsync.clip_grad_norm_ without optimizer="
        )
    return None if has_unscaled(*found) else loss_scale(found[0])


def forget_step(scaler: GradScaler, optimizers: Iterable[Optimizer]) -> None:
    """Lets the scaler take new gradients of these optimizers, in place of those of a step that has failed."""
    for optimizer in optimizers:
        states_of_scaler(scaler).pop(id(optimizer), None)
        forget_scale(optimizer)


def forget_scale(optimizer: Optimizer) -> None:
    """Takes a scaler's attributes off a fused optimizer whose step has failed: the next step would multiply by them."""
    if vars(optimizer).pop("found_inf", None) is not None:
        vars(optimizer).pop("grad_scale", None)
