"""The optimizer, what keeps it from stepping, and how far it steps over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


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
        """As torch's, without a closure. Parameters without a gradient stay as they are."""
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


class StepGate:
    """Keeps an optimizer from stepping, by a decision that is made on the device and never read on the host.

    Fused optimizers look at ``found_inf`` before they change anything, as GradScaler makes use of.

    Args:
        optimizer: a fused one.
        device: its own.
        can_refuse: whether anything ever will.

    Attributes:
        closed: 0-dim float32, 1 for no steps.
        refused: 0-dim float32, 1 if the last step was none, because of this or of a GradScaler.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, can_refuse: bool = True) -> None:
        self.closed = torch.zeros((), device=device)
        self.refused = torch.zeros((), device=device)
        if can_refuse:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def close_if(self, condition: Tensor) -> None:
        """Refuses all further steps where the condition, 0-dim bool, holds."""
        self.closed.copy_(torch.maximum(self.closed, condition.float()))

    def _before(self, optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        of_scaler: Tensor | None = getattr(optimizer, "found_inf", None)
        self._is_alone = of_scaler is None
        self.refused = self.closed.clone() if of_scaler is None else torch.maximum(of_scaler, self.closed)
        optimizer.found_inf = self.refused

    def _after(self, optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._is_alone:  # GradScaler deletes its own
            del optimizer.found_inf


_ADAPTIVE_LIMITS = (1e-5, 1e-2)  # as RSL-RL has them
_ADAPTIVE_FACTOR = 1.5


def kl_of(figures: Mapping[str, Tensor], target_kl: float | None) -> Tensor | None:
    """The KL divergence that a loss has told, float32; None where nobody aims at one.

    Raises:
        ValueError: it has told none.
    """
    if target_kl is None:
        return None
    if "approx_kl" not in figures:
        said = f"got {list(figures)}"
        raise ValueError(f"target_kl={target_kl} needs the loss to return a figure called approx_kl, {said}")
    return figures["approx_kl"].detach().float()


class LearningRate:
    """Sets the learning rate of an optimizer, which must have it as a 0-dim tensor.

    Args:
        settings: ``ppo.Settings``.
        world_size: number of ranks.
        device: of the optimizer.
    """

    def __init__(self, settings: Any, world_size: int, device: torch.device) -> None:
        self._settings = settings
        # With the batch of all ranks linear keeps the change per row (Goyal et al., 2017), sqrt the noise of a step
        # (Krizhevsky, 2014).
        factors = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": world_size}
        self._peak = settings.learning_rate * factors[settings.lr_scaling]
        self._adaptive = torch.tensor(self._peak, dtype=torch.float64, device=device)

    def start_update(self, optimizer: Optimizer, *, remaining: float, update: int) -> None:
        """Sets it for the update number ``update``, from 0; ``remaining`` goes from 1 to 0 over a run."""
        self._warmup = min(1.0, (update + 1) / (self._settings.warmup_updates + 1))
        if self._settings.lr_schedule == "adaptive":
            self._set(optimizer, self._adaptive)
        else:
            self._set(optimizer, self._peak * (remaining if self._settings.lr_schedule == "linear" else 1.0))

    def adapt(self, optimizer: Optimizer, kl: Tensor) -> None:
        """With lr_schedule=adaptive: follows the KL divergence over all ranks, a 0-dim tensor, without reading it."""
        target = self._settings.target_kl
        assert target is not None
        smaller = (kl > 2 * target).double()
        larger = ((kl < 0.5 * target) & (kl > 0)).double()
        self._adaptive.mul_(_ADAPTIVE_FACTOR ** (larger - smaller)).clamp_(*_ADAPTIVE_LIMITS)
        self._set(optimizer, self._adaptive)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the past of a run has decided, and from which learning rate on."""
        return {"adaptive": self._adaptive, "peak": torch.tensor(self._peak, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on from ``state_dict()``, unless the settings ask for another learning rate now."""
        if state["peak"] == self._peak:
            self._adaptive.copy_(state["adaptive"])

    def _set(self, optimizer: Optimizer, learning_rate: Tensor | float) -> None:
        for group in optimizer.param_groups:
            group["lr"].copy_(torch.as_tensor(learning_rate) * self._warmup)
