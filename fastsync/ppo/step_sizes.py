"""The sizes of steps: the learning rate and the clipping range over a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsync.ppo.config import LrScaling, Settings

_ADAPTIVE_LIMITS = (1e-5, 1e-2)  # as RSL-RL has them
_ADAPTIVE_FACTOR = 1.5


class StepSizes:
    """Sets the learning rate of an optimizer, which must have it as a 0-dim tensor, and tells the clipping range."""

    def __init__(self, settings: Settings, world_size: int, device: torch.device) -> None:
        self._settings = settings
        # With the batch of all ranks linear keeps the change per row (Goyal et al., 2017), sqrt the noise of a step
        # (Krizhevsky, 2014).
        factors: dict[LrScaling, float] = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": world_size}
        self._peak = settings.learning_rate * factors[settings.lr_scaling]
        self._adaptive = torch.tensor(self._peak, dtype=torch.float64, device=device)
        self.clip_coef = settings.clip_coef

    def start_update(self, optimizer: Optimizer, *, step: int, update: int) -> None:
        """Sets both for the update number ``update``, from 0, after ``step`` environment steps."""
        remaining = max(0.0, 1 - step / self._settings.total_steps)
        if self._settings.anneal_clip:
            self.clip_coef = self._settings.clip_coef * remaining
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
