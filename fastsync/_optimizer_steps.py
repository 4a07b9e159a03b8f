"""Whose ``Optimizer.step`` runs hooks, and which of their calls are for a step of the training."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

# PyTorch wraps the step of each class that has an instance in such a function, which calls the hooks.
_CALLS_HOOKS = Optimizer.profile_hook_step(lambda self: None).__code__


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that steps for another one, which shares its groups, such as Accelerate's; else itself.

    Wrappers need not have hooks, and a GradScaler may know the inner one alone.
    """
    inside = (each for each in vars(optimizer).values() if isinstance(each, Optimizer) and each is not optimizer)
    wrapped = next((each for each in inside if each.param_groups is optimizer.param_groups), None)
    return optimizer if wrapped is None else innermost(wrapped)


def is_training_step(optimizer: Optimizer) -> bool:
    """Tells, in a step hook, whether it is called for a step of the training, and by the outermost ``step``.

    A step that calls ``super().step()`` may run the hooks again. ``torch.distributed.checkpoint`` steps a new optimizer
    with zeros, for its state to load into. Nothing but the stack tells; it is right also after a step that has failed.
    """
    checkpoint = sys.modules.get("torch.distributed.checkpoint.state_dict")
    makes_state = getattr(getattr(checkpoint, "_init_optim_state", None), "__code__", None)
    num_calls = 0
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is makes_state:
            return False
        num_calls += frame.f_code is _CALLS_HOOKS and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return num_calls <= 1
