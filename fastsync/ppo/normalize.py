"""Running means and variances over all steps of all ranks, and observations normalised by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Moments = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

LIMIT = 10.0
"""Normalised observations and rewards are clipped to [-10, 10], as usual (Andrychowicz et al., ICLR 2021, B.6)."""


def moments(values: Tensor, valid: Tensor) -> Tensor:
    """Returns count, sum and sum of squares of the valid rows of ``values`` [..., D], as one fp64 vector [1 + 2 D].

    The sum of these vectors over ranks gives the moments over all ranks. fp64 keeps the variance exact enough when two
    large numbers are subtracted.
    """
    weight = valid.flatten().double()
    rows = values.flatten(0, -2).double()
    return torch.cat([weight.sum().reshape(1), weight @ rows, weight @ rows.square()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts ``moments`` to the number of rows, their mean [D] and their variance [D]; without rows both are 0."""
    count, total, squares = moments[0], *moments[1:].chunk(2)
    divisor = count.clamp(min=1)
    mean = total / divisor
    return count, mean, (squares / divisor - mean.square()).clamp(min=0)


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, as fp64 buffers. Before the first row they are 0 and 1."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device="cpu"))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64, device="cpu"))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64, device="cpu"))

    @torch.no_grad()
    def update(self, added: Tensor, origin: Tensor | float = 0.0) -> None:
        """Adds rows by the ``moments`` of their distances from an origin (Chan et al., 1979, equation 2.1)."""
        count, mean, variance = mean_and_variance(added)
        everything = (self.count + count).clamp(min=1)
        shift = mean + (origin - self.mean)
        # The initial variance of 1 has no weight here, because its count is 0.
        self.variance.copy_(
            (self.variance * self.count + variance * count + shift.square() * self.count * count / everything)
            / everything
        )
        self.mean.add_(shift * count / everything)
        self.count.copy_(everything)


class ObservationNormalizer(RunningMoments):
    """Normalises the first ``size`` numbers of observations [..., D] to mean 0 and variance 1, clipped to [-10, 10].

    The others are pixels. It computes in the observations' dtype. In float32, times such as 1.7e9 seconds would be
    equal before the mean is subtracted.
    """

    def forward(self, observations: Tensor) -> Tensor:
        dtype, size = observations.dtype, len(self.mean)
        deviation = (self.variance + 1e-8).sqrt().to(dtype)
        normalized = ((observations[..., :size] - self.mean.to(dtype)) / deviation).clamp(-LIMIT, LIMIT)
        others = observations[..., size:]
        return torch.cat([normalized, others], dim=-1) if others.shape[-1] else normalized

    @torch.no_grad()
    def learn(self, observations: Sequence[Tensor], valid: Sequence[Tensor], moments_over_ranks: Moments) -> None:
        """Adds the valid rows of all ranks. Every rank must call it.

        Args:
            observations: of each of this rank's rollouts, [T, N, D].
            valid: the same, [T, N] bool.
            moments_over_ranks: returns the sum of ``moments`` over all rollouts of all ranks.
        """
        observations = [each[..., : len(self.mean)] for each in observations]
        if observations[0].dtype != torch.float64:
            self.update(moments_over_ranks(observations, valid))
            return
        # Squares of numbers far from zero lose their differences even in fp64. So the mean is subtracted first.
        origin = self.mean.clone()
        if self.count == 0:
            _, origin, _ = mean_and_variance(moments_over_ranks(observations, valid))
        self.update(moments_over_ranks([each - origin for each in observations], valid), origin)
