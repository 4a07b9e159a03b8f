"""Adam, as fused as PyTorch has it, for models so small that what surrounds the kernel takes longer than the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Columns(NamedTuple):
    """What the kernel is given, a tensor for each parameter."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    all_steps: Tensor
    """The steps in one vector, of which ``steps`` are views: one operation counts them all."""


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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's, which it leaves the first step to, and any without some of the gradients."""
        (group,) = self.param_groups
        grads = [parameter.grad for parameter in group["params"]]
        if closure is not None or any(grad is None for grad in grads):
            return super().step(closure)
        if self._columns is None:
            if len(self.state) < len(grads):
                return super().step()
            self._columns = self._look_up(group["params"])
        params, exp_avgs, exp_avg_sqs, steps, all_steps = self._columns
        found_inf = getattr(self, "found_inf", None)
        all_steps += 1
        torch._fused_adam_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
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
        if found_inf is not None:
            all_steps -= found_inf  # a step that was refused does not count
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._columns = None  # the state is in other tensors now

    def _look_up(self, params: list[Tensor]) -> _Columns:
        states = [self.state[parameter] for parameter in params]
        all_steps = torch.stack([state["step"] for state in states])
        steps = list(all_steps.unbind())
        for state, step in zip(states, steps, strict=True):
            state["step"] = step
        exp_avgs, exp_avg_sqs = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        return _Columns(params, exp_avgs, exp_avg_sqs, steps, all_steps)
