"""Gradient clipping with the norm that the engine already has."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .ddp import CommHook, HookState


def clip_grad_norm_(sync_or_params: CommHook | Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scales the gradients in place so that their 2-norm is at most ``max_norm``.

    Given a hook, the norm is the one its unpack found out, so clipping reads the gradients no more than once. It is the
    norm of what ``backward()`` left: call this once after each backward that was synchronised, before anything else
    changes the gradients, so not after ``GradScaler.unscale_``. Given parameters, it is
    ``torch.nn.utils.clip_grad_norm_``. Either way the gradients are always multiplied by the coefficient, clamped to 1,
    so that the host never waits to find out whether they need be.

    Args:
        sync_or_params: what ``register_comm_hook`` returned, or parameters (one or many).
        max_norm: the largest norm allowed, positive.

    Returns:
        The norm before clipping, a 0-dim float32 tensor on the gradients' device. Where it is inf or nan the gradients
        are of no use afterwards, as with torch's function: an optimizer step must be skipped.

    Raises:
        ValueError: ``max_norm`` is not positive, or the first argument is neither a hook nor parameters.
        RuntimeError: no backward was synchronised since the hook's gradients were last clipped.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, got {max_norm!r}")
    if isinstance(sync_or_params, nn.Module) or type(sync_or_params) is HookState:
        raise ValueError(
            f"sync_or_params: expected what register_comm_hook returned, or parameters, got "
            f"{type(sync_or_params).__name__}; model.parameters() always works"
        )
    if not isinstance(sync_or_params, CommHook):
        return torch.nn.utils.clip_grad_norm_(sync_or_params, max_norm, foreach=None)
    sync_or_params.claim_norm()
    grads = [p.grad for p in sync_or_params.parameters() if p.grad is not None]
    grad_norm = sync_or_params.grad_stats.grad_norm
    coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    for same in _by_device_and_dtype(grads):
        torch._foreach_mul_(same, coefficient.to(same[0].device))
    return grad_norm


def _by_device_and_dtype(grads: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())
