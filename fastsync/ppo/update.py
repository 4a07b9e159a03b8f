"""Learning from a rollout: epochs of minibatches through the clipped objective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastsync.ppo.actions import ActionDistribution
from fastsync.ppo.config import Precision, Settings
from fastsync.ppo.gradient_sync import GradientSync
from fastsync.ppo.minibatches import Batch, Shuffler
from fastsync.ppo.objective import LOSSES, ppo_objective
from fastsync.ppo.step_sizes import StepSizes

_KL = LOSSES.index("approx_kl")
KL_TOLERANCE = 1.5
"""By how much a minibatch may exceed target_kl before learning from its rollout ends, as in Stable-Baselines3."""


def row_weights(valid: Tensor, num_valid: Tensor, *, world_size: int, num_minibatches: int) -> Tensor:
    """The weight of each row in the sum that is its minibatch's loss: the mean, but with one divisor everywhere.

    Every valid row of every rank weighs the same, whichever minibatch it falls into, so that ranks with more restarts
    do not count for more; a minibatch has on average ``num_valid / (world_size * num_minibatches)`` valid rows.

    Args:
        valid: bool, of any shape.
        num_valid: 0-dim fp64, the number of valid rows over all ranks.
        world_size: number of ranks.
        num_minibatches: minibatches that each rank cuts its rows into.

    Returns:
        fp64, shaped as ``valid``.
    """
    return valid * (world_size * num_minibatches / num_valid)


def ppo_loss(
    model: nn.Module, distribution: ActionDistribution, batch: Batch, settings: Settings, clip_coef: float
) -> tuple[Tensor, Tensor]:
    """The loss of a minibatch, 0-dim, and LOSSES, [5], detached."""
    with autocast(settings.precision, batch.log_probs.device):  # the model alone: sums of 16 bits would be coarse
        outputs, values, _ = model(batch.observations, batch.memory, batch.starts)
    log_prob, entropy = distribution.log_prob_and_entropy(outputs, batch.actions)
    return ppo_objective(
        log_prob, entropy, values, batch.log_probs, batch.advantages, batch.values, batch.returns, batch.weights,
        clip_coef, settings.vf_coef, settings.ent_coef, settings.clip_value_loss,
    )  # fmt: skip


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

    def _before(self, optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        of_scaler: Tensor | None = getattr(optimizer, "found_inf", None)
        self._is_alone = of_scaler is None
        self.refused = self.closed.clone() if of_scaler is None else torch.maximum(of_scaler, self.closed)
        optimizer.found_inf = self.refused

    def _after(self, optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._is_alone:  # GradScaler deletes its own
            del optimizer.found_inf


@dataclass(kw_only=True, eq=False)
class Updater:
    """Takes optimizer steps on batches: the same number on every rank, and on a GPU without waiting for any."""

    settings: Settings
    sync: GradientSync
    """Averages the gradients of the policy."""
    distribution: ActionDistribution
    """Of the policy's actions."""
    optimizer: Optimizer
    """A fused one, with its learning rate as a tensor."""
    scaler: GradScaler
    """Of the loss; disabled where the precision does without."""
    step_sizes: StepSizes
    shuffler: Shuffler
    """Cuts batches into minibatches."""
    device: torch.device
    """Of the policy."""

    def __post_init__(self) -> None:
        can_refuse = self.settings.target_kl is not None or self.scaler.is_enabled()
        self._gate = StepGate(self.optimizer, self.device, can_refuse=can_refuse)

    def update(self, batch: Batch) -> dict[str, float]:
        """Learns from a rollout whose columns are [T, N, ...].

        Returns:
            The means over the steps taken of LOSSES and of the gradient's norm before clipping, and how many they were.
            If none was, the means are NaN.
        """
        self._gate.closed.zero_()
        losses, norms, refused = [], [], []
        for minibatch in self._minibatches(batch):
            losses_of_step, norm = self._step(minibatch)
            losses.append(losses_of_step)
            norms.append(norm)
            refused.append(self._gate.refused)
        was_taken = torch.stack(refused) == 0
        num_taken = was_taken.sum()
        logged = torch.cat([torch.stack(losses), torch.stack(norms).unsqueeze(1)], dim=1).float()
        # Not a product: what was refused may be inf.
        mean = torch.where(was_taken.unsqueeze(1), logged, 0).sum(0) / num_taken
        names = (*LOSSES, "grad_norm", "optimizer_steps")
        return dict(zip(names, [*mean.tolist(), num_taken.item()], strict=True))

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Yields those of all epochs; on the CPU, where looking costs nothing, only until a step was refused."""
        for minibatch in self.shuffler.minibatches(batch, self.settings.num_epochs):
            if self.device.type == "cpu" and self._gate.closed:
                return
            yield minibatch

    def _step(self, minibatch: Batch) -> tuple[Tensor, Tensor]:
        """One optimizer step; LOSSES and the norm of the gradient, 0-dim."""
        self.optimizer.zero_grad()
        losses, kl = self._backward(minibatch)
        if kl is not None:
            self._decide(kl)
        grad_norm = self.sync.clip(self.settings.max_grad_norm, self.optimizer, self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return losses, grad_norm

    def _backward(self, minibatch: Batch) -> tuple[Tensor, Tensor | None]:
        """LOSSES of the minibatch on this rank, and where the settings ask for it the KL divergence over all ranks."""
        *first, last = Shuffler.cut(minibatch, self.settings.num_micro_batches)
        of_parts = []
        for part in first:
            with self.sync.no_sync():
                loss, losses = self._loss(part)
                self.scaler.scale(loss).backward()
            of_parts.append(losses)
        loss, losses = self._loss(last)
        losses = reduce(torch.add, [*of_parts, losses])
        rider = losses[_KL].float() if self.settings.target_kl is not None else None
        return losses, self.sync.backward(self.scaler.scale(loss), rider)

    def _loss(self, part: Batch) -> tuple[Tensor, Tensor]:
        return ppo_loss(self.sync.model, self.distribution, part, self.settings, self.step_sizes.clip_coef)

    def _decide(self, kl: Tensor) -> None:
        """Adapts the learning rate, or refuses this and all further steps: on every rank alike, for ``kl`` is alike."""
        if self.settings.lr_schedule == "adaptive":
            self.step_sizes.adapt(self.optimizer, kl)
        else:
            assert self.settings.target_kl is not None
            self._gate.closed.copy_(
                torch.maximum(self._gate.closed, (kl > KL_TOLERANCE * self.settings.target_kl).float())
            )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The context of forward passes: their matrix products in 16 bits, or nothing special."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        return nullcontext()
    return torch.autocast(device.type, dtypes[precision])
