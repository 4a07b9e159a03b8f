"""Running means and variances of observations and returns, over all steps of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Sums = Callable[[Tensor, Tensor], Tensor]

LIMIT = 10.0
"""Normalised observations and rewards are cut off here, as is customary (Andrychowicz et al., ICLR 2021, B.6)."""


def moments(values: Tensor, valid: Tensor) -> Tensor:
    """Number, sum and sum of squares of the valid rows of ``values`` [..., D], as one fp64 vector [1 + 2 D].

    The moments of all ranks together are the sum of each rank's. In fp64 the variance survives the subtraction of two
    large numbers.
    """
    weight = valid.flatten().double()
    rows = values.flatten(0, -2).double()
    return torch.cat([weight.sum().reshape(1), weight @ rows, weight @ rows.square()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of rows that ``moments`` are of, and their mean and variance [D]."""
    count, total, squares = moments[0], *moments[1:].chunk(2)
    mean = total / count
    return count, mean, (squares / count - mean.square()).clamp(min=0)


class RunningMoments(nn.Module):
    """Mean and variance of all rows seen so far. Before the first they are 0 and 1.

    They are buffers in fp64: part of the state dict, and no parameters.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, added: Tensor) -> None:
        """Takes in the rows whose ``moments`` are ``added`` (Chan et al., 1979, equation 2.1)."""
        count, mean, variance = mean_and_variance(added)
        everything = self.count + count
        shift = mean - self.mean
        # Before the first rows the variance of 1 is a convention, and weighs nothing.
        self.variance.copy_(
            (self.variance * self.count + variance * count + shift.square() * self.count * count / everything)
            / everything
        )
        self.mean.add_(shift * count / everything)
        self.count.copy_(everything)


class ObservationNormalizer(RunningMoments):
    """Shifts and scales observations [..., D] to mean 0 and variance 1, cut off at 10."""

    def forward(self, observations: Tensor) -> Tensor:
        dtype = observations.dtype
        deviation = (self.variance + 1e-8).sqrt().to(dtype)
        return ((observations - self.mean.to(dtype)) / deviation).clamp(-LIMIT, LIMIT)


class RewardNormalizer(RunningMoments):
    """Divides rewards by the standard deviation of the discounted return, cut off at 10; their sign stays.

    The return of an environment at a step is that of its episode so far: ``R[t] = gamma * R[t - 1] + r[t]`` (Engstrom
    et al., "Implementation Matters in Deep RL", ICLR 2020, B).
    """

    def __init__(self, gamma: float, num_envs: int, dtype: torch.dtype) -> None:
        super().__init__(1)
        self._gamma = gamma
        self.register_buffer("carried", torch.zeros(num_envs, dtype=dtype), persistent=False)

    carried: Tensor
    """[N]: R of the step before, 0 at the beginning of an episode."""

    def forward(self, rewards: Tensor) -> Tensor:
        deviation = (self.variance + 1e-8).sqrt().to(rewards.dtype)
        return (rewards / deviation).clamp(-LIMIT, LIMIT)

    def discounted_returns(self, rewards: Tensor, done: Tensor, discounted_sums: Sums) -> Tensor:
        """R at each step [T, N], from rewards [T, N] and where episodes ended [T, N]; goes on with the next rollout."""
        goes_on = (~done).to(rewards.dtype)
        summands = torch.cat([torch.add(rewards[:1], self.carried, alpha=self._gamma), rewards[1:]])
        decays = torch.cat([torch.zeros_like(summands[:1]), self._gamma * goes_on[:-1]])
        # The past takes the place of what is to come.
        returns = discounted_sums(summands.flip(0), decays.flip(0)).flip(0)
        self.carried.copy_(returns[-1] * goes_on[-1])
        return returns


def normalize(
    rollout: Any,
    policy: Any,
    reward_normalizer: RewardNormalizer | None,
    sum_over_ranks: Callable[[Tensor], Tensor],
    discounted_sums: Sums,
) -> tuple[Tensor, Tensor | None]:
    """The rewards of a rollout to learn from [T, N], and the moments of all ranks' observations if they are normalised.

    Args:
        rollout: ``ppo.Rollout``.
        policy: whose observations may be.
        reward_normalizer: None to leave rewards as they are.
        sum_over_ranks: of moments.
        discounted_sums: ``ppo.discounted_sums``.
    """
    mine, rewards = [], rollout.rewards
    if reward_normalizer is not None:
        returns = reward_normalizer.discounted_returns(rewards, rollout.done, discounted_sums)
        mine.append(moments(returns.unsqueeze(-1), rollout.valid))
    if policy.normalizer is not None:
        mine.append(moments(rollout.observations, rollout.valid))
    if not mine:
        return rewards, None
    over_all_ranks = list(sum_over_ranks(torch.cat(mine)).split([len(part) for part in mine]))
    if reward_normalizer is not None:
        reward_normalizer.update(over_all_ranks.pop(0))
        rewards = reward_normalizer(rewards)
    return rewards, over_all_ranks[0] if over_all_ranks else None
