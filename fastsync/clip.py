"""Gradient clipping with the norm that the engine already has."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .handle import ClippableHandle, SyncHandle


def clip_grad_norm_(
    sync_or_params: ClippableHandle | Iterable[Tensor] | Tensor,
    max_norm: float | Tensor,
    *,
    optimizer: Optimizer | None = None,
) -> Tensor:
    """Scales the gradients so that their 2-norm is at most ``max_norm``.

    Given what ``attach`` or ``register_comm_hook`` returned, the norm is the one its unpack found out, so clipping
    reads the gradients no more than once. It is the norm of what ``backward()`` left: call this once after each
    backward that was synchronised, before anything else changes the gradients, so not after ``GradScaler.unscale_``.
    Given parameters, it is ``torch.nn.utils.clip_grad_norm_``. The gradients are always multiplied by the coefficient,
    clamped to 1, so that the host never waits to find out whether they need be.

    Args:
        sync_or_params: what ``attach`` or ``register_comm_hook`` returned, or parameters (one or many).
        max_norm: the largest norm allowed, positive. With a handle it may be a 0-dim tensor on the gradients' device,
            which is not read on the host: for gradients that a GradScaler has scaled it is the norm allowed times
            its scale.
        optimizer: the one that will step with these gradients and no others. Where it is fused and takes a
            ``grad_scale`` (Adam, AdamW, SGD with ``fused=True``), the coefficient goes into its next step, and clipping
            makes no pass at all: until then the gradients stay as they are. Any other is as good as None.

    Returns:
        The norm before clipping, a 0-dim float32 tensor on the gradients' device. Where it is inf or nan the gradients
        are of no use afterwards, as with torch's function: an optimizer step must be skipped.

    Raises:
        ValueError: ``max_norm`` is not positive, the first argument is neither a handle nor parameters, parameters came
            with an optimizer, or the optimizer steps other gradients too.
        RuntimeError: the norm is not known: no backward was synchronised since the gradients were last clipped, or,
            with ``attach``, their version counters tell that something changed them. What bypasses those counters, such
            as ``GradScaler.unscale_`` or ``.data``, goes unnoticed, and then they are clipped by a wrong norm.
    """
    if not isinstance(max_norm, Tensor) and not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, got {max_norm!r}")
    if isinstance(sync_or_params, ClippableHandle):
        if optimizer is not None:
            _check_covered(optimizer, sync_or_params)
        grad_norm = sync_or_params.claim_norm()
        divisor = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0)
        if optimizer is not None and _takes_grad_scale(optimizer):
            _scale_next_step(optimizer, divisor)
        else:
            _multiply([p.grad for p in sync_or_params.parameters() if p.grad is not None], divisor.reciprocal())
        return grad_norm
    if isinstance(sync_or_params, nn.Module | SyncHandle):
        raise ValueError(
            "sync_or_params: expected what attach or register_comm_hook returned, or parameters, got "
            f"{type(sync_or_params).__name__}; model.parameters() always works"
        )
    if optimizer is not None:
        raise ValueError("optimizer: serves only with what attach or register_comm_hook returned, not with parameters")
    return torch.nn.utils.clip_grad_norm_(sync_or_params, float(max_norm), foreach=None)


def _takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether its step divides the gradients by ``optimizer.grad_scale``, as GradScaler makes use of."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _check_covered(optimizer: Optimizer, sync: ClippableHandle) -> None:
    clipped = {id(parameter) for parameter in sync.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and id(parameter) not in clipped:
                raise ValueError(
                    f"optimizer: it also steps a parameter of shape {list(parameter.shape)} that is not clipped here; "
                    "leave optimizer out, or clip all of its parameters together"
                )


def _scale_next_step(optimizer: Optimizer, divisor: Tensor) -> None:
    """For one step: the attribute would stay for the steps after. GradScaler multiplies its own scale into it."""
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]

    def forget(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not hasattr(optimizer, "found_inf"):  # GradScaler, which sets it, deletes both itself
            vars(optimizer).pop("grad_scale", None)
        handle.remove()

    handle = optimizer.register_step_post_hook(forget)


def _multiply(grads: list[Tensor], coefficient: Tensor) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for same in groups.values():
        torch._foreach_mul_(same, coefficient.to(same[0].device))
