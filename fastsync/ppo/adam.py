"""Adam, as fused as PyTorch has it, for models so small that what surrounds the kernel takes longer than the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class _Columns(NamedTuple):
    """The arguments of the kernel, a tensor for each parameter."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    counters: list[Tensor]
    """What counts the steps: one vector, of which ``steps`` are views, so that one operation counts them all."""


class Adam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, which looks its tensors up once and not in every step: the same numbers.

    Args:
        params: of one group, on one device.
        lr: 0-dim, on that device.
        eps: see ``torch.optim.Adam``.
    """

    def __init__(self, params: Iterable[Tensor], *, lr: Tensor, eps: float) -> None:
        super().__init__(params, lr=lr, eps=eps, fused=True)
        self._columns: _Columns | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without its entry in a profile."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As torch's, without a closure and its entry in a profile. Parameters without a gradient stay as they are."""
        for before in (*_global_optimizer_pre_hooks.values(), *self._optimizer_step_pre_hooks.values()):
            before(self, (), {})
        # Not by torch's own step, which, once wrapped by a plain Adam somewhere, would run the hooks again.
        self._update()
        for after in (*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            after(self, (), {})

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it, for hooks and profile

    def _update(self) -> None:
        (group,) = self.param_groups
        if self._columns is None:
            self._columns = self._look_up(group["params"])
        columns = self._columns
        grads = [parameter.grad for parameter in columns.params if parameter.grad is not None]
        if len(grads) < len(columns.params):
            columns = _those_with_gradient(columns)
        found_inf = getattr(self, "found_inf", None)
        torch._foreach_add_(columns.counters, 1)
        torch._fused_adam_(
            columns.params,
            grads,
            columns.exp_avgs,
            columns.exp_avg_sqs,
            [],
            columns.steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        if found_inf is not None:  # a step that was refused does not count
            torch._foreach_sub_(columns.counters, [found_inf] * len(columns.counters))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._columns = None  # the state is in other tensors now

    def _look_up(self, params: list[Tensor]) -> _Columns:
        """The state of each parameter; zeros where there is none yet."""
        for parameter in params:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        states = [self.state[parameter] for parameter in params]
        all_steps = torch.stack([state["step"] for state in states])
        steps = list(all_steps.unbind())
        for state, step in zip(states, steps, strict=True):
            state["step"] = step
        exp_avgs, exp_avg_sqs = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        return _Columns(params, exp_avgs, exp_avg_sqs, steps, [all_steps])


def _those_with_gradient(columns: _Columns) -> _Columns:
    """The columns of parameters that have one, whose steps are counted one by one."""
    present = [index for index, parameter in enumerate(columns.params) if parameter.grad is not None]
    params, exp_avgs, exp_avg_sqs, steps = ([column[index] for index in present] for column in columns[:4])
    return _Columns(params, exp_avgs, exp_avg_sqs, steps, steps)
