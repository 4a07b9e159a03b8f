"""Gradient clipping with the norm that the engine already has."""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .. import _C
from .._checks import is_positive, resolve_group
from .._torch_compat import foreach_mul_, known_ranks, states_of_scaler, takes_grad_scale
from ..distributed import every_rank_calls
from .grad_scaler import has_unscaled, loss_scale, scale_of_step, skip_unless_finite
from .handle import GradientHandle
from .optimizer_steps import from_outside_in, unwrapped
from .optimizer_watch import WatchedHandle
from .stats import GradStats
from .stats_in_order import stats_in_order


def clip_grad_norm_(
    sync: GradientHandle | Sequence[GradientHandle],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Scales the gradients so that their norm is at most ``max_norm``; the host never waits to find out.

    The norm is the one that unpacking has found, if nothing has touched the gradients since: nothing in Python has read
    a ``.grad``, and no other backward has added to one. Otherwise it takes a pass over them. So it is right after any
    change of the gradients, by ``unscale_``, a division by the number of tokens, or a write to ``.data``.

    With several handles it is one norm, that of all parameters of all ranks of ``process_group``. Each counts once: the
    ranks of a handle's group hold the same parameters, and other groups hold others. So experts, or the stages of a
    pipeline, are clipped with the rest of the model. All these ranks must make the call, each with all its handles. One
    number is reduced.

    Args:
        sync: what ``attach`` or ``register_comm_hook`` returned, or a list of such handles.
        max_norm: positive, for gradients without a scaler's scale. It may be a 0-dim tensor on their device.
        norm_type: the p of the p-norm. Any other than 2 takes a pass over the gradients.
        error_if_nonfinite: raise if the norm is inf or nan, before anything is scaled. On a GPU the host waits.
        optimizer: the one that steps with these gradients, or Accelerate's wrapper of it. A fused one that steps these
            and no others takes the coefficient into its next step, unless another sync comes before that.
        scaler: the one that has scaled the loss. It needs ``optimizer``.
        process_group: the ranks whose parameters count, a group or a one-dimensional ``DeviceMesh``. Handles' groups
            lie within it. None means the handles' common group, the one of theirs that has all the others. Pass it
            where there is none, and for the stages of a pipeline.

    Returns:
        The norm before clipping, without the scaler's scale, a 0-dim float32 tensor on the gradients' device.

    Raises:
        ValueError: an argument is refused, or does not go with another one.
        RuntimeError: no backward was synchronised yet. Or the gradients were clipped already in the optimizer's next
            step. Or the norm is not finite, with ``error_if_nonfinite``.
    """
    if not isinstance(max_norm, Tensor) and not is_positive(max_norm) and max_norm != math.inf:
        raise ValueError(f"max_norm: expected a positive number, got {max_norm!r}")
    handles = _listed(sync)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None and optimizer is None:
        raise ValueError(
            "scaler: pass optimizer= too, the one that scaler.step() gets: a scaler knows for each optimizer "
            "whether its gradients are scaled"
        )
    for handle in handles:
        if handle._deferred_clip_step == handle._engine.num_steps() and not handle._engine.is_captured():
            or_else = "" if handle._optimizer_shards is not None else ", or leave optimizer out both times"
            raise RuntimeError(
                "fastsync.clip_grad_norm_: the gradients have been clipped already, in the optimizer's next step; clip "
                f"once after each synchronised backward{or_else}"
            )
        handle._check_may_be_clipped()
    known_to_scaler = optimizer
    if optimizer is not None:
        all_of_it = from_outside_in(_checked(optimizer))
        states = {} if scaler is None else states_of_scaler(scaler)
        # A wrapper or the one inside: whichever unscale_() got.
        known_to_scaler = next((each for each in (optimizer, *all_of_it) if id(each) in states), all_of_it[-1])
        optimizer = all_of_it[-1]
        if optimizer in _clipped_steps:
            _clipped_steps[optimizer].drop(optimizer)
    is_joint = not isinstance(sync, GradientHandle) or process_group is not None
    if is_joint:
        group = _common_group(handles) if process_group is None else resolve_group(process_group)
        _check_may_be_joint(handles, norm_type, scaler, group)
    norms = [_norm(handle, norm_type, known_to_scaler, scaler) for handle in handles]
    grad_norm = _joint_norm(handles, norms, norm_type, group) if is_joint else norms[0]
    if error_if_nonfinite and not grad_norm.isfinite():
        raise RuntimeError(
            f"fastsync.clip_grad_norm_: the norm of the gradients is {grad_norm.item()}; skip this step, or leave out "
            "error_if_nonfinite"
        )
    divisor = (grad_norm + 1e-6).div_(max_norm).clamp_(min=1.0)
    if is_joint and scaler is not None and known_to_scaler is not None:
        # A scaler looks at this rank's gradients alone, and other ranks may have other ones. All must skip a step.
        divisor = torch.where(grad_norm.isfinite(), divisor, math.nan)
        skip_unless_finite(scaler, known_to_scaler, grad_norm)
        optimizer = None  # the gradients have to be divided now, for the scaler to see it
    _divide(handles, divisor, optimizer)
    return grad_norm


def _checked(optimizer: object) -> Optimizer:
    """Returns the optimizer, or the one inside a wrapper that is none itself. Raises ValueError without one."""
    inside = unwrapped(optimizer)
    if inside is None:
        raise ValueError(
            f"optimizer: expected the torch.optim.Optimizer that steps with these gradients, got "
            f"{type(optimizer).__name__}; if several step with them, leave optimizer out"
        )
    return inside


def _divide(handles: Sequence[WatchedHandle], divisor: Tensor, optimizer: Optimizer | None) -> None:
    """Divides the gradients by a number, in the optimizer's next step if it can."""
    for handle in handles:
        if handle._optimizer_shards is not None:
            handle._deferred_clip_step = handle._engine.num_steps()
            handle._optimizer_shards.clip(divisor)
    others = [handle for handle in handles if handle._optimizer_shards is None]
    if others and optimizer is not None and _takes_grad_scale(optimizer, others):
        if optimizer not in _clipped_steps:
            _clipped_steps[optimizer] = _ClippedSteps(optimizer)
        _clipped_steps[optimizer].divide_next(optimizer, divisor, others)
    else:
        _multiply([grad for handle in others for grad in _gradients(handle)], divisor.reciprocal())


def _listed(sync: GradientHandle | Sequence[GradientHandle]) -> list[WatchedHandle]:
    """Returns the handles. Raises ValueError if one of them is none, or is there twice."""
    handles: list[WatchedHandle] = []
    for each in sync if isinstance(sync, list | tuple) else [sync]:
        if not isinstance(each, WatchedHandle):
            raise ValueError(
                f"sync: expected what attach or register_comm_hook returned, got {type(each).__name__}; for parameters "
                "and models under fully_shard use torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
            )
        if each in handles:
            raise ValueError("sync: a handle is there twice, and its gradients count once; leave one of them out")
        handles.append(each)
    if not handles:
        raise ValueError("sync: the list has no handle; pass what attach or register_comm_hook returned")
    return handles


def _common_group(handles: Sequence[WatchedHandle]) -> dist.ProcessGroup:
    """Returns the handles' group that has the ranks of all of them. Raises ValueError if there is none."""
    first = handles[0]._group
    if all(handle._group is first for handle in handles):
        return first
    by_handle = [known_ranks(handle._group) for handle in handles]
    everyone = set().union(*by_handle)
    for handle, ranks in zip(handles, by_handle, strict=True):
        if ranks == everyone and all(by_handle):
            return handle._group
    over = ", ".join(str(sorted(ranks)) for ranks in by_handle)
    raise ValueError(
        f"process_group: the handles average over several groups, {over}, and none of these has all of the "
        "ranks; pass the group of all ranks whose parameters count"
    )


def _check_may_be_joint(
    handles: Sequence[WatchedHandle], norm_type: float, scaler: GradScaler | None, group: dist.ProcessGroup
) -> None:
    """Raises ValueError, before any rank waits, if there is no joint norm of these handles over the group."""
    if not norm_type > 0:
        raise ValueError(f"norm_type: over several groups expected a positive number or inf, got {norm_type!r}")
    for handle in handles:
        if handle._micro_batches is not None:
            raise ValueError(
                "sync: in a list of handles none may have micro_batches, because a joint norm depends on the number of "
                "ranks; clip each handle by itself"
            )
        if outside := known_ranks(handle._group) - known_ranks(group):
            raise ValueError(
                f"process_group: a handle averages over ranks {sorted(outside)} as well, which are not in it; pass a "
                "group of all ranks whose parameters count"
            )
        if handle._optimizer_shards is not None and scaler is not None:
            raise ValueError(
                "scaler: in a list of handles none may be of shard_optimizer, because a scaler looks at .grad, and "
                "that stays this rank's own there; leave out one of the two"
            )


def _joint_norm(
    handles: Sequence[WatchedHandle], norms: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup
) -> Tensor:
    """Returns the norm of the parameters of all ranks of the group, each counted once.

    The ranks of a handle's group have the same gradients, so each adds its part of their norm's power.
    """
    device = norms[0].device
    _C.check_device(group, device)
    wide = [norm.to(device, torch.float64) for norm in norms]
    is_maximum = norm_type == math.inf
    if not is_maximum:
        wide = [norm.pow(norm_type) / handle._group.size() for norm, handle in zip(wide, handles, strict=True)]
    total = torch.stack(wide).max() if is_maximum else torch.stack(wide).sum()
    with every_rank_calls("clip_grad_norm_", group):
        dist.all_reduce(total, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group=group)
    return (total if is_maximum else total.pow(1.0 / norm_type)).float()


def _norm(sync: WatchedHandle, norm_type: float, optimizer: Optimizer | None, scaler: GradScaler | None) -> Tensor:
    """Returns the norm of the gradients, without the scaler's scale."""
    is_unscaled = False
    if scaler is not None:
        assert optimizer is not None
        is_unscaled = has_unscaled(scaler, optimizer)
    if sync._optimizer_shards is not None:
        if norm_type != 2.0 or is_unscaled:
            what = "unscale_() has divided only this rank's own gradients" if is_unscaled else f"norm_type {norm_type}"
            raise ValueError(
                f"fastsync.clip_grad_norm_: with shard_optimizer the norm is the 2-norm of the means, got: {what}. "
                "Leave out unscale_(), and norm_type; or leave shard_optimizer out, on every rank"
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

    They are if Python has read no ``.grad`` since backward, and no later backward has added to one. With micro-batches
    it is the norm of what ``.grad`` has, because the order in which unpacking adds up depends on the number of ranks.
    """
    if sync._micro_batches is not None:
        return GradStats(stats_in_order(_gradients(sync))).grad_norm
    has_none = sync._engine.num_steps() == 0 and all(parameter.grad is None for parameter in sync.parameters())
    is_known = has_none or sync._engine.gradients_are_unchanged()
    return sync.grad_stats().grad_norm if is_known else None


def _gradients(sync: WatchedHandle) -> list[Tensor]:
    """Returns the gradients, dense: of a sparse one its values, each row's once."""
    grads = []
    for parameter in sync.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse and not parameter.grad.is_coalesced():
            parameter.grad = parameter.grad.coalesce()
        if parameter.grad is not None:
            grads.append(parameter.grad.values().detach() if parameter.grad.is_sparse else parameter.grad)
    return grads


def _takes_grad_scale(optimizer: Optimizer, handles: Sequence[WatchedHandle]) -> bool:
    """Tells whether the optimizer's step divides exactly the handles' gradients by ``optimizer.grad_scale``.

    Fused optimizers have this attribute for GradScaler.
    """
    clipped = {id(p) for handle in handles for p in handle.parameters() if p.grad is not None}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    return (
        takes_grad_scale(optimizer)
        and all(group.get("fused") for group in optimizer.param_groups)
        and stepped == clipped
    )


class _ClippedSteps:
    """Lets steps of an optimizer divide the gradients, each those of one sync.

    The hooks stay for the optimizer's life: torch raises an error if hooks go while it calls them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._steps: dict[WatchedHandle, int] = {}  # whose gradients the next step divides, and of which sync
        optimizer.register_step_pre_hook(self._check)
        optimizer.register_step_post_hook(self._forget)

    def divide_next(self, optimizer: Optimizer, divisor: Tensor, handles: Sequence[WatchedHandle]) -> None:
        """Lets the next step divide. GradScaler multiplies its own scale into the attribute."""
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._steps = {handle: handle._engine.num_steps() for handle in handles}
        for handle, step in self._steps.items():
            handle._deferred_clip_step = step

    def drop(self, optimizer: Optimizer) -> None:
        """Forgets a clip whose step was left out."""
        if self._steps:
            self._forget(optimizer)

    def _check(self, optimizer: Optimizer, *_: object) -> None:
        if all(handle._engine.num_steps() == step for handle, step in self._steps.items()):
            return
        if hasattr(optimizer, "found_inf"):  # a GradScaler has multiplied its scale into that of a left out step
            optimizer.grad_scale = scale_of_step(optimizer)  # type: ignore[attr-defined]
        self.drop(optimizer)

    def _forget(self, optimizer: Optimizer, *_: object) -> None:
        if self._steps and not hasattr(optimizer, "found_inf"):  # else GradScaler deletes both attributes itself
            vars(optimizer).pop("grad_scale", None)
        for handle in self._steps:
            handle._deferred_clip_step = -1
        self._steps = {}


_clipped_steps: WeakKeyDictionary[Optimizer, _ClippedSteps] = WeakKeyDictionary()


def _multiply(grads: list[Tensor], coefficient: Tensor) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for same in groups.values():
        foreach_mul_(same, coefficient.to(same[0].device))
