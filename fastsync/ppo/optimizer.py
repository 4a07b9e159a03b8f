"""How far the optimizer steps over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        optimizer: whose it is.
    """

    def __init__(self, settings: Any, world_size: int, optimizer: Optimizer) -> None:
        self._settings, self._optimizer, self._warmup = settings, optimizer, 1.0
        # With the batch of all ranks linear keeps the change per row (Goyal et al., 2017), sqrt the noise of a step
        # (Krizhevsky, 2014).
        factors = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": world_size}
        self._peak = settings.learning_rate * factors[settings.lr_scaling]
        device = optimizer.param_groups[0]["lr"].device
        self._adaptive = torch.tensor(self._peak, dtype=torch.float64, device=device)

    def start_update(self, *, remaining: float, update: int) -> None:
        """Sets it for the update number ``update``, from 0; ``remaining`` goes from 1 to 0 over a run."""
        self._warmup = min(1.0, (update + 1) / (self._settings.warmup_updates + 1))
        if self._settings.lr_schedule == "adaptive":
            self._set(self._adaptive)
        else:
            self._set(self._peak * (remaining if self._settings.lr_schedule == "linear" else 1.0))

    def adapt(self, kl: Tensor) -> None:
        """With lr_schedule=adaptive: follows the KL divergence over all ranks, a 0-dim tensor, without reading it."""
        target = self._settings.target_kl
        smaller = (kl > 2 * target).double()
        larger = ((kl < 0.5 * target) & (kl > 0)).double()
        self._adaptive.mul_(_ADAPTIVE_FACTOR ** (larger - smaller)).clamp_(*_ADAPTIVE_LIMITS)
        self._set(self._adaptive)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the past of a run has decided, and from which learning rate on."""
        return {"adaptive": self._adaptive, "peak": torch.tensor(self._peak, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on from ``state_dict()``, unless the settings ask for another learning rate now."""
        if state["peak"] == self._peak:
            self._adaptive.copy_(state["adaptive"])

    def _set(self, learning_rate: Tensor | float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"].copy_(torch.as_tensor(learning_rate) * self._warmup)
