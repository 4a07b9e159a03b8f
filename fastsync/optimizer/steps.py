"""Step hooks of optimizers: which optimizer runs them, and which of their calls belong to a step of the training."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.optim import Optimizer

# The code of the function that PyTorch puts around ``step`` of each optimizer class. It calls the hooks.
_CALLS_HOOKS = Optimizer.profile_hook_step(lambda self: None).__code__
_MOST_WRAPPERS = 8  # around one another; one that is in its own .optimizer has no end


def unwrapped(given: object) -> Optimizer | None:
    """Returns the given optimizer, or the one in the ``.optimizer`` of a wrapper that is none itself; None without one.

    A wrapper has ``step`` and ``zero_grad``, too. A scheduler has no ``zero_grad``, and is taken for a mistake.
    """
    for _ in range(_MOST_WRAPPERS):
        if isinstance(given, Optimizer):
            return given
        if not all(callable(getattr(given, name, None)) for name in ("step", "zero_grad")):
            return None
        given = getattr(given, "optimizer", None)
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that a wrapper, such as Accelerate's, shares its groups with; else the optimizer itself.

    Only the inner one is sure to run step hooks.
    """
    return from_outside_in(optimizer)[-1]


def from_outside_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizer, the one inside that shares its groups, the one inside that, and so on."""
    inside = (each for each in vars(optimizer).values() if isinstance(each, Optimizer) and each is not optimizer)
    wrapped = next((each for each in inside if each.param_groups is optimizer.param_groups), None)
    return [optimizer] if wrapped is None else [optimizer, *from_outside_in(wrapped)]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors that the optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_training_step(optimizer: Optimizer) -> bool:
    """Tells, in a step hook, whether the outermost ``step`` of a training step has called it.

    Two other calls reach the hooks: a step that calls ``super().step()``, and ``torch.distributed.checkpoint``, which
    steps a new optimizer with zeros to make its state. PyTorch calls the hooks with the same arguments then, so the
    call stack is the only difference. A counter of nested calls would be wrong after a step that has failed.
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
