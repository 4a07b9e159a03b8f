"""Advantages, how much better actions were than expected: generalised estimation, and their scale over all ranks."""

from __future__ import annotations

from torch import Tensor

from fastsync.ppo.discounted_sums import discounted_sums
from fastsync.ppo.normalize import mean_and_variance


def estimate_advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., ICLR 2016, equation 16).

    A step's successor is worth 0 where the episode terminated, and ``next_values`` otherwise: also where it was
    truncated. No advantage flows back over the end of an episode. Rows that are restarts get a number too, which means
    nothing and reaches no other row.

    Args:
        rewards: [T, N].
        values: [T, N], of the states in which the steps began.
        next_values: [T, N], of those to which they led.
        terminated: [T, N] bool.
        done: [T, N] bool, terminated or truncated.
        gamma: discount per step.
        gae_lambda: weight of longer returns, 0 for one step, 1 for whole episodes.

    Returns:
        Advantages [T, N].
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decays = gamma * gae_lambda * (~done).to(deltas.dtype)
    return discounted_sums(deltas, decays)


def normalize_advantages(advantages: Tensor, moments: Tensor) -> Tensor:
    """Shifts and scales advantages [T, N] to the mean 0 and variance 1 of the rows that ``moments`` [3] are of."""
    _, mean, variance = mean_and_variance(moments)
    return ((advantages.double() - mean) / (variance.sqrt() + 1e-8)).to(advantages.dtype)
