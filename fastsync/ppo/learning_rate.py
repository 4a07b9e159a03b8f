"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ADAPTIVE_LIMITS = (1e-5, 1e-2)  # as in RSL-RL
_ADAPTIVE_FACTOR = 1.5


class LearningRate:
    """Sets the learning rate of an optimizer, whose ``lr`` must be a 0-dim tensor, by ``ppo.Settings``."""

    def __init__(self, settings: Any, world_size: int, optimizer: Optimizer) -> None:
        self._settings, self._optimizer, self._warmup = settings, optimizer, 1.0
        # The batch grows with the number of ranks. linear keeps the change per row (Goyal et al., 2017), and sqrt keeps
        # the noise of a step (Krizhevsky, 2014).
        factors = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": world_size}
        self._peak = settings.learning_rate * factors[settings.lr_scaling]
        device = optimizer.param_groups[0]["lr"].device
        self._adaptive = torch.tensor(self._peak, dtype=torch.float64, device=device)

    def start_update(self, *, remaining: float, update: int) -> None:
        """Sets the rate for an update, counted from 0. ``remaining`` goes from 1 to 0 over the run."""
        self._warmup = min(1.0, (update + 1) / (self._settings.warmup_updates + 1))
        if self._settings.lr_schedule == "adaptive":
            self._set(self._adaptive)
        else:
            self._set(self._peak * (remaining if self._settings.lr_schedule == "linear" else 1.0))

    def adapt(self, kl: Tensor) -> None:
        """Changes an adaptive rate by the KL divergence over all ranks, a 0-dim tensor. The host does not read it."""
        target = self._settings.target_kl
        smaller = (kl > 2 * target).double()
        larger = ((kl < 0.5 * target) & (kl > 0)).double()
        self._adaptive.mul_(_ADAPTIVE_FACTOR ** (larger - smaller)).clamp_(*_ADAPTIVE_LIMITS)
        self._set(self._adaptive)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the adaptive rate, and the learning rate that it started from."""
        return {"adaptive": self._adaptive, "peak": torch.tensor(self._peak, dtype=torch.float64, device="cpu")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores ``state_dict()``, unless the settings now ask for another learning rate."""
        if state["peak"] == self._peak:
            self._adaptive.copy_(state["adaptive"])

    def _set(self, learning_rate: Tensor | float) -> None:
        if not isinstance(learning_rate, Tensor):
            learning_rate = torch.tensor(learning_rate, dtype=torch.float32, device="cpu")
        for group in self._optimizer.param_groups:
            group["lr"].copy_(learning_rate * self._warmup)
