"""PPO's objective: what a minibatch of steps says about the policy, and which way to change it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastsync._ppo  # noqa: F401 registers torch.ops.fastsync.ppo_objective

LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def in_plain_pytorch(
    log_prob: Tensor,
    entropy: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    clip_coef: float,
    vf_coef: float,
    ent_coef: float,
    clip_value_loss: bool,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate objective with value loss and entropy bonus (Schulman et al., 2017, equation 9), negated.

    The specification of torch.ops.fastsync.ppo_objective, and what a GPU computes. All columns have the same shape and
    dtype, one number a step.

    Args:
        log_prob: of the actions that were taken, under the policy that learns.
        entropy: of that policy, in nats.
        values: what the critic that learns says.
        old_log_probs: what ``log_prob`` was when the actions were taken.
        advantages: how much better they were than expected.
        old_values: what ``values`` were then.
        returns: what they should have been.
        weights: the share of each step in the sums.
        clip_coef: how far the ratio of probabilities, and with ``clip_value_loss`` a value, may move.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy.
        clip_value_loss: whether the value loss is the larger of those before and after clipping.

    Returns:
        The loss, 0-dim, and LOSSES, [5], without gradients.
    """
    log_ratio = log_prob - old_log_probs
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    squared_error = (values - returns).square()
    if clip_value_loss:
        near = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        squared_error = torch.maximum(squared_error, (near - returns).square())
    loss = (0.5 * vf_coef) * squared_error - surrogate - ent_coef * entropy
    with torch.no_grad():
        # (r - 1) - log r: never negative and of low variance (Schulman, "Approximating KL Divergence", 2020).
        approx_kl = ratio - 1 - log_ratio
        clipped = (ratio - 1).abs() > clip_coef
        figures = torch.stack([-surrogate, 0.5 * squared_error, entropy, approx_kl, clipped.to(ratio.dtype)])
        means = figures.flatten(1) @ weights.flatten()
    return loss.flatten() @ weights.flatten(), means


def ppo_objective(log_prob: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """As ``in_plain_pytorch``, by one operator where there is one."""
    is_fused = log_prob.device.type == "cpu" and not torch.compiler.is_compiling()
    objective = torch.ops.fastsync.ppo_objective.default if is_fused else in_plain_pytorch
    return objective(log_prob, *arguments)
