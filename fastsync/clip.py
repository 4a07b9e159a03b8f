"""Gradient clipping with the norm that the engine already has."""

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ._grad_scaler import has_unscaled, loss_scale
from ._handle import GradientHandle
from ._optimizer_steps import innermost
from ._optimizer_watch import WatchedHandle


def clip_grad_norm_(
    sync: GradientHandle,
    max_norm: float | Tensor,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients so that their norm is at most ``max_norm``; the host never waits to find out.

    The norm is the one that unpacking has found, if nothing has touched the gradients since: nothing in Python has read
    a ``.grad``, and no other backward has added to one. Otherwise it takes a pass over them. So it is right after any
    change of the gradients, by ``unscale_``, a division by the number of tokens, or a write to ``.data``.

    Args:
        sync: what ``attach`` or ``register_comm_hook`` returned.
        max_norm: positive, for gradients without a scaler's scale. It may be a 0-dim tensor on their device.
        optimizer: the one that steps with these gradients, or Accelerate's wrapper of it. A fused one that steps these
            and no others takes the coefficient into its next step.
        scaler: the one that has scaled the loss. It needs ``optimizer``.
        norm_type: the p of the p-norm. Any other than 2 takes a pass over the gradients.
        error_if_nonfinite: raise if the norm is inf or nan, before anything is scaled. On a GPU the host waits.

    Returns:
        The norm before clipping, without the scaler's scale, a 0-dim float32 tensor on the gradients' device.

    Raises:
        ValueError: an argument is refused, or does not go with another one.
        RuntimeError: no backward was synchronised yet. Or the gradients were clipped already in the optimizer's next
            step. Or the norm is not finite, with ``error_if_nonfinite``.
    """
    if not isinstance(max_norm, Tensor) and not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, got {max_norm!r}")
    if not isinstance(sync, WatchedHandle):
        raise ValueError(
            f"sync: expected what attach or register_comm_hook returned, got {type(sync).__name__}; for parameters and "
            "models under fully_shard use torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None and optimizer is None:
        raise ValueError(
            "scaler: pass optimizer= too, the one that scaler.step() gets: a scaler knows for each optimizer "
            "whether its gradients are scaled"
        )
    if sync._deferred_clip_step == sync._engine.num_steps() and not sync._engine.is_captured():
        raise RuntimeError(
            "fastsync.clip_grad_norm_: the gradients have been clipped already, in the optimizer's next step; clip "
            "once after each synchronised backward, or leave optimizer out both times"
        )
    optimizer = None if optimizer is None else innermost(optimizer)
    grad_norm = _norm(sync, norm_type, optimizer, scaler)
    if error_if_nonfinite and not grad_norm.isfinite():
        raise RuntimeError(
            f"fastsync.clip_grad_norm_: the norm of the gradients is {grad_norm.item()}; skip this step, or leave out "
            "error_if_nonfinite"
        )
    divisor = (grad_norm + 1e-6).div_(max_norm).clamp_(min=1.0)
    if sync._host_optimizer is not None:
        sync._deferred_clip_step = sync._engine.num_steps()
        sync._host_optimizer.clip(divisor)
    elif optimizer is not None and _takes_grad_scale(optimizer, sync):
        sync._deferred_clip_step = sync._engine.num_steps()
        _scale_next_step(optimizer, divisor, sync)
    else:
        _multiply(_gradients(sync), divisor.reciprocal())
    return grad_norm


def _norm(sync: WatchedHandle, norm_type: float, optimizer: Optimizer | None, scaler: GradScaler | None) -> Tensor:
    """Returns the norm of the gradients, without the scaler's scale."""
    is_unscaled = False
    if scaler is not None:
        assert optimizer is not None
        is_unscaled = has_unscaled(scaler, optimizer)
    if sync._host_optimizer is not None:
        if norm_type != 2.0 or is_unscaled:
            what = "unscale_() has divided only this rank's own gradients" if is_unscaled else f"norm_type {norm_type}"
            raise ValueError(
                f"fastsync.clip_grad_norm_: with attach(optimizer=) the norm is the 2-norm of the means, got: {what}. "
                "Leave out unscale_(), and norm_type; or leave optimizer= out of attach(), on every rank"
            )
        norm = sync.grad_stats().grad_norm
        return norm if scaler is None else norm / loss_scale(scaler)
    known = _known_norm(sync) if norm_type == 2.0 else None  # None after unscale_
    norm = torch.nn.utils.get_total_norm(_gradients(sync), norm_type).float() if known is None else known
    if scaler is None or is_unscaled:
        return norm
    return norm / loss_scale(scaler).to(norm.device, non_blocking=True)


def _known_norm(sync: WatchedHandle) -> Tensor | None:
    """Returns the newest ``GradStats.grad_norm`` if the gradients are still those that unpacking has written.

    They are if Python has read no ``.grad`` since backward, and no later backward has added to one.
    """
    is_known = sync._engine.num_steps() == 0 or sync._engine.gradients_are_unchanged()
    return sync.grad_stats().grad_norm if is_known else None


def _gradients(sync: WatchedHandle) -> list[Tensor]:
    return [parameter.grad for parameter in sync.parameters() if parameter.grad is not None]


def _takes_grad_scale(optimizer: Optimizer, sync: WatchedHandle) -> bool:
    """Tells whether the optimizer's step divides exactly the handle's gradients by ``optimizer.grad_scale``.

    Fused optimizers have this attribute for GradScaler.
    """
    clipped = {id(parameter) for parameter in sync.parameters() if parameter.grad is not None}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and stepped == clipped
    )


def _scale_next_step(optimizer: Optimizer, divisor: Tensor, sync: WatchedHandle) -> None:
    """Lets the optimizer's next step divide the gradients. GradScaler multiplies its own scale into the attribute."""
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]

    def forget(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not hasattr(optimizer, "found_inf"):  # else GradScaler has set it, and deletes both attributes itself
            vars(optimizer).pop("grad_scale", None)
        sync._deferred_clip_step = -1
        handle.remove()

    handle = optimizer.register_step_post_hook(forget)


def _multiply(grads: list[Tensor], coefficient: Tensor) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for same in groups.values():
        torch._foreach_mul_(same, coefficient.to(same[0].device))
