"""What is attached, for how long, and whether its gradients still come: noticed before an optimizer steps."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from .checks import is_sharded_by_fsdp1, is_wrapper
from .handle import forget_handle, remember
from .optimizer_steps import before_each_step, forget, watch
from .pipelines import check_no_stage

if TYPE_CHECKING:
    from .synchronizer import GradientSynchronizer

# One thread may attach while another steps.
_lock = threading.RLock()

# Those of a module live as long as it does, those of loose parameters until detach().
_attached: weakref.WeakSet[GradientSynchronizer] = weakref.WeakSet()
_owned_by_module: weakref.WeakKeyDictionary[nn.Module, list[GradientSynchronizer]] = weakref.WeakKeyDictionary()
_owned_by_nobody: set[GradientSynchronizer] = set()

# Nobody knows yet whether their parameters get gradients, and from whom. Where they are not used any more, or belong to
# a pipeline's stage, their hooks may not be called, so it is noticed before an optimizer steps.
_unproven: weakref.WeakSet[GradientSynchronizer] = weakref.WeakSet()

# Those that have stepped. With another all is asked anew: load_state_dict(assign=True) brings other parameters, too.
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def keep(sync: GradientSynchronizer, owner: nn.Module | None) -> None:
    """It is attached from now on, for as long as its owner lives; None: until ``let_go``."""
    watch(sync)
    with _lock:
        _attached.add(sync)
        _unproven.add(sync)
        if owner is None:
            _owned_by_nobody.add(sync)
            return
        # Each that has parameters, for the module itself may be a container made for this call alone.
        for module in owner.modules():
            if module is owner or next(module.parameters(recurse=False), None) is not None:
                _owned_by_module.setdefault(module, []).append(sync)
                remember(module, sync)


def let_go(sync: GradientSynchronizer) -> None:
    """Ends that."""
    forget(sync)
    forget_handle(sync)
    with _lock:
        _attached.discard(sync)
        _owned_by_nobody.discard(sync)
        _unproven.discard(sync)
        for owned in _owned_by_module.values():
            if sync in owned:
                owned.remove(sync)


def is_attached(sync: GradientSynchronizer) -> bool:
    """Whether it is."""
    return sync in _attached


def check_unattached(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError where one of these parameters is attached already."""
    with _lock:
        attached = {id(p): name for sync in _attached for name, p in sync._named.items()}
    for name, parameter in named.items():
        if id(parameter) in attached:
            raise ValueError(
                f"{argument}: parameter {name} is attached already (as {attached[id(parameter)]}); call detach() "
                "of what attach() returned, or set its .compression to change what travels"
            )


def check_that_the_model_has(sync: GradientSynchronizer) -> None:
    """Raises RuntimeError where none of the attached parameters is the model's any more: none gets a gradient then."""
    owners = _owners(sync)
    attached = {id(parameter) for parameter in sync._named.values()}
    present = (p for owner in owners for p in owner.parameters() if id(p) in attached and not is_sharded_by_fsdp1(p))
    if owners and next(present, None) is None:
        raise RuntimeError(
            "fastsync.attach: the model has other parameters by now than those that were attached, so nothing was "
            "averaged. After load_state_dict(assign=True) call detach(), and attach anew; fully_shard and "
            "FullyShardedDataParallel average gradients themselves: call fully_shard first, and attach only to what it "
            "leaves whole, or call detach()"
        )


def _owners(sync: GradientSynchronizer) -> list[nn.Module]:
    with _lock:
        return [module for module, syncs in _owned_by_module.items() if sync in syncs]


def _warn_of_later_parameters(optimizer: Optimizer) -> None:
    """Names those that attached modules got since, as adapters and new heads are: nobody averages their gradients."""
    with _lock:
        known = {id(parameter) for sync in _attached for parameter in sync._named.values()}
        owners = [module for module, syncs in _owned_by_module.items() if syncs]
    owned = {p: name for owner in reversed(owners) for name, p in owner.named_parameters()}  # the outermost's name
    stepped = (p for group in optimizer.param_groups for p in group["params"] if id(p) not in known)
    later = [owned[p] for p in stepped if p in owned and p.requires_grad and not _is_sharded(p)]
    if later:
        warnings.warn(
            f"fastsync.attach: {len(later)} of the optimizer's parameters are not averaged, for the attached model got "
            f"them later: {', '.join(later[:3])}{', ...' if len(later) > 3 else ''}; call detach(), and attach anew",
            stacklevel=5,  # where step() is called
        )


def _is_sharded(parameter: Tensor) -> bool:
    """Whether FSDP averages its gradients."""
    return is_wrapper(parameter) or is_sharded_by_fsdp1(parameter)


@before_each_step
def _check_attached(optimizer: Optimizer) -> None:
    with _lock:
        attached, unproven, is_new = list(_attached), list(_unproven), optimizer not in _optimizers
    for sync in attached:
        if not sync._overlaps:
            sync.check_synchronized(optimizer)
    if is_new:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        unproven += [sync for sync in attached if any(id(p) in stepped for m in _owners(sync) for p in m.parameters())]
    for sync in unproven:
        check_that_the_model_has(sync)
        # The engine, which knows, must not be asked: it may be waiting for its ranks in another thread.
        if any(parameter.grad is not None for parameter in sync._named.values()):
            if sync._overlaps:
                check_no_stage(sync._named.values())
            with _lock:
                _unproven.discard(sync)
    if is_new:
        _warn_of_later_parameters(optimizer)
        with _lock:
            _optimizers.add(optimizer)
