"""Learning from a rollout: epochs of minibatches through the clipped objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastsync.ppo.config import Settings
from fastsync.ppo.gradient_sync import GradientSync
from fastsync.ppo.policy import log_prob

LOGGED = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""What ``update`` returns, in this order."""


@dataclass(frozen=True)
class Batch:
    """The rows to learn from, B of them, in any order."""

    observations: Tensor
    """[B, observation_size] float32."""
    actions: Tensor
    """[B] int64."""
    log_probs: Tensor
    """[B] float32: log-probability of the actions when they were taken."""
    advantages: Tensor
    """[B] float32: normalised."""
    returns: Tensor
    """[B] float32: what the critic should have said."""
    weights: Tensor
    """[B] float32: the share of a row in the mean over its minibatch, 0 for rows that are no step of an episode."""

    def shuffled(self, generator: torch.Generator) -> Batch:
        """The same rows in random order."""
        order = torch.randperm(len(self.actions), generator=generator, device=generator.device)
        return Batch(*(column[order] for column in vars(self).values()))

    def split(self, num_parts: int) -> list[Batch]:
        """Equal parts, as views."""
        columns = [column.chunk(num_parts) for column in vars(self).values()]
        return [Batch(*part) for part in zip(*columns, strict=True)]


def row_weights(valid: Tensor, num_valid: Tensor, *, world_size: int, num_minibatches: int) -> Tensor:
    """The weight of each row in the sum that is its minibatch's loss: the mean, but with one divisor everywhere.

    Every valid row of every rank weighs the same, whichever minibatch it falls into, so that ranks with more restarts
    do not count for more; a minibatch has on average ``num_valid / (world_size * num_minibatches)`` valid rows.

    Args:
        valid: bool, of any shape.
        num_valid: 0-dim, the number of valid rows over all ranks.
        world_size: number of ranks.
        num_minibatches: minibatches that each rank cuts its rows into.

    Returns:
        float32, shaped as ``valid``.
    """
    return valid * (world_size * num_minibatches / num_valid).float()


def ppo_loss(model: nn.Module, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """The clipped surrogate objective with value loss and entropy bonus (Schulman et al., 2017, equation 9), negated.

    Returns:
        The loss, 0-dim, and all of LOGGED but the gradient norm, [5], detached.
    """
    logits, values = model(batch.observations)
    log_ratio = log_prob(logits, batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_coef, 1 + settings.clip_coef)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    row_entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)

    policy_loss = -(batch.weights * surrogate).sum()
    value_loss = 0.5 * (batch.weights * (values - batch.returns).square()).sum()
    entropy = (batch.weights * row_entropy).sum()
    loss = policy_loss + settings.vf_coef * value_loss - settings.ent_coef * entropy
    with torch.no_grad():
        # (r - 1) - log r: never negative and of low variance (Schulman, "Approximating KL Divergence", 2020).
        approx_kl = (batch.weights * (ratio - 1 - log_ratio)).sum()
        clip_fraction = (batch.weights * ((ratio - 1).abs() > settings.clip_coef)).sum()
        logged = torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])
    return loss, logged


def update(
    sync: GradientSync, optimizer: Optimizer, batch: Batch, settings: Settings, generator: torch.Generator
) -> Tensor:
    """Takes ``num_epochs * num_minibatches`` optimizer steps, the same number on every rank, without a host sync.

    Returns:
        The means of LOGGED over the steps, on the device. The gradient norm is that before clipping.
    """
    logged = []
    for _ in range(settings.num_epochs):
        for minibatch in batch.shuffled(generator).split(settings.num_minibatches):
            loss, losses = ppo_loss(sync.model, minibatch, settings)
            optimizer.zero_grad()
            loss.backward()
            sync.reduce()
            grad_norm = sync.clip_grad_norm_(settings.max_grad_norm)
            optimizer.step()
            logged.append(torch.cat([losses, grad_norm.detach().reshape(1)]))
    return torch.stack(logged).mean(0)
