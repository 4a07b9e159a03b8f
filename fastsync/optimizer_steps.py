"""Watches what optimizers do with the parameters of an engine, for as long as there is one.

One that steps inside backward, with gradients that nobody has averaged yet, is refused, or ranks would drift apart. Of
each step the engine is told, for version counters are left as they are by a fused one and by what writes to ``.data``.
"""

import threading
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .grad_scaler import note_scaler_that_steps
from .handle import GradientHandle

_WAY_OUT = (
    "so it would use this rank's own gradients and ranks would drift apart; let one optimizer step after backward() "
    "has returned, or do not attach these parameters"
)


def check_no_optimizer_in_backward(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError for parameters that torch's ``_apply_optimizer_in_backward`` was called with."""
    for name, parameter in named.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{argument}: parameter {name} has an optimizer that steps inside backward() "
                f"(_apply_optimizer_in_backward), {_WAY_OUT}"
            )


_lock = threading.RLock()  # a handle may be collected while it is held
_watched: "weakref.WeakSet[GradientHandle]" = weakref.WeakSet()
_hooks: list[RemovableHandle] = []  # of all optimizers, while something is watched
_checks: list[Callable[[Optimizer], None]] = []


def before_each_step(check: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Has it called before each step of any optimizer, while something is watched."""
    _checks.append(check)
    return check


def watch(handle: GradientHandle) -> None:
    """From now on the handle's engine hears of optimizer steps; one inside backward raises RuntimeError instead."""
    with _lock:
        _watched.add(handle)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
    weakref.finalize(handle, _let_optimizers_be).atexit = False


def forget(handle: GradientHandle) -> None:
    """Ends ``watch``."""
    with _lock:
        _watched.discard(handle)
        _let_optimizers_be()


def _let_optimizers_be() -> None:
    """Where nothing is watched any more."""
    with _lock:
        if not _in_use():
            while _hooks:
                _hooks.pop().remove()


def _in_use() -> list[GradientHandle]:
    """What is watched, in a list of its own: another thread may attach meanwhile."""
    with _lock:
        return list(_watched)


def _before_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for check in _checks:
        check(optimizer)


@before_each_step
def _check_not_in_backward(optimizer: Optimizer) -> None:
    if torch._C._current_graph_task_id() == -1:
        return
    averaged = {id(parameter) for handle in _in_use() for parameter in handle.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in averaged:
                raise RuntimeError(
                    f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                    f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, {_WAY_OUT}"
                )


def _after_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    scaler = note_scaler_that_steps()
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for handle in _in_use():
        if not stepped.isdisjoint(map(id, handle.parameters())):
            handle._engine.note_update()  # type: ignore[union-attr]  # sharded models are not watched
            if scaler is not None:
                handle.follow_scaler(scaler)
