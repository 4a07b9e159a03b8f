"""How much better an action was than expected: generalised advantage estimation, and its scale over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsync.distributed import dist_sum


def estimate_advantages(
    rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., ICLR 2016, equation 16), with restarts as extra rows.

    A step's successor is worth 0 where the episode terminated, and ``values[t + 1]`` otherwise: also where it was
    truncated, because the row after it still holds the final observation (see Rollout). No advantage flows back over
    the end of an episode. Rows that are restarts get a number too, which means nothing and reaches no other row.

    Args:
        rewards: [T, N].
        values: [T + 1, N].
        terminated: [T, N] bool.
        done: [T, N] bool, terminated or truncated.
        gamma: discount per step.
        gae_lambda: weight of longer returns, 0 for one step, 1 for whole episodes.

    Returns:
        Advantages [T, N].
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    decays = gamma * gae_lambda * (~done).to(deltas.dtype)
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for delta, decay, advantage in zip(deltas.flip(0), decays.flip(0), reversed(advantages.unbind()), strict=True):
        following = torch.addcmul(delta, decay, following, out=advantage)
    return advantages


def normalize_over_ranks(advantages: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts and scales to mean 0 and variance 1 over the valid rows of all ranks. Every rank must call it.

    Args:
        advantages: [T, N].
        valid: [T, N] bool.

    Returns:
        Normalised advantages [T, N], and the number of valid rows over all ranks as a 0-dim fp64 tensor.
    """
    # In fp64 the variance survives the subtraction of two large numbers.
    exact = advantages.double()
    weight = valid.double()
    count, total, squares = dist_sum(
        torch.stack([weight.sum(), (exact * weight).sum(), (exact.square() * weight).sum()])
    ).unbind()
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0)
    normalized = (exact - mean) / (variance.sqrt() + 1e-8)
    return normalized.to(advantages.dtype), count
