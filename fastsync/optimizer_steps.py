"""Watches what optimizers do with the parameters of an engine.

One that steps inside backward, with gradients that nobody has averaged yet, is refused, or ranks would drift apart. Of
each step the engine is told, for version counters are left as they are by a fused one and by what writes to ``.data``.
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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


_watched: "weakref.WeakSet[GradientHandle]" = weakref.WeakSet()


def watch(handle: GradientHandle) -> None:
    """From now on the handle's engine hears of optimizer steps; one inside backward raises RuntimeError instead."""
    _watched.add(handle)


def forget(handle: GradientHandle) -> None:
    """Ends ``watch``."""
    _watched.discard(handle)


def _before_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    if torch._C._current_graph_task_id() == -1:
        return
    averaged = {id(parameter) for handle in _watched for parameter in handle.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in averaged:
                raise RuntimeError(
                    f"fastsync: {type(optimizer).__name__} stepped inside backward() with a parameter of shape "
                    f"{list(parameter.shape)} whose gradients are averaged over ranks when backward() ends, {_WAY_OUT}"
                )


def _after_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for handle in list(_watched):
        if not stepped.isdisjoint(map(id, handle.parameters())):
            handle._engine.note_update()  # type: ignore[union-attr]  # sharded models are not watched


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
