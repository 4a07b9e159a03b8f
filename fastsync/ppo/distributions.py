"""Distributions of actions, one for each kind of space.

The caller draws the random numbers, for a whole rollout at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from . import fused
from .envs.spaces import Array
from .settings import RunSettings


@fused.Operator
def categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [B] of actions [B] under logits [B, n], and entropies [B], in nats."""
    log_probabilities = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


@fused.Operator
def choose(logits: Tensor, noise: Tensor) -> Tensor:
    """Returns the argmax [B] of logits + noise [B, n]: with Gumbel noise, a sample of the logits' distribution."""
    return torch.argmax(logits + noise, dim=-1)


class ActionDistribution(nn.Module, ABC):
    """A distribution over the actions of one kind of space.

    Attributes:
        num_outputs: number of parameters that the network's last layer computes.
        num_noise: number of random numbers that a sample takes.
        shape: shape of an action.
        dtype: dtype of actions.
    """

    num_outputs: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_noise(self) -> int:
        return self.num_outputs

    @abstractmethod
    def noise(self, uniform: Tensor) -> Tensor:
        """Transforms uniform random numbers in (0, 1) to the noise of ``sample``, both [..., num_noise]."""

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Samples actions [..., *shape], from outputs [..., num_outputs] and noise [..., num_noise]."""

    def scaled(self, actions: Tensor) -> Tensor:
        """Returns actions as the environment takes them, but for clipping and counting: both are the translator's."""
        return actions

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """Returns the likeliest actions [..., *shape], from outputs [..., num_outputs]."""

    @abstractmethod
    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [...] (or log densities) of actions [..., *shape], and entropies [...] in nats.

        The distributions are those of outputs [..., num_outputs].
        """

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Returns the log-probabilities only."""
        return self.log_prob_and_entropy(outputs, actions)[0]


class Categorical(ActionDistribution):
    """One choice out of n, or several independent choices. The outputs are the logits of all choices.

    Args:
        num_choices: n, or a list with the n of each choice.
    """

    def __init__(self, num_choices: int | Sequence[int]) -> None:
        super().__init__()
        self._sizes = [num_choices] if isinstance(num_choices, int) else list(num_choices)
        self.num_outputs = sum(self._sizes)
        self.shape = () if isinstance(num_choices, int) else (len(self._sizes),)
        self.dtype = torch.int64

    def noise(self, uniform: Tensor) -> Tensor:
        # Gumbel noise: the argmax of logits + noise is a sample. So acting needs no softmax.
        return -torch.log(-torch.log(uniform))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return choose(outputs, noise) if not self.shape else self.mode(outputs + noise)

    def mode(self, outputs: Tensor) -> Tensor:
        if not self.shape:
            return torch.argmax(outputs, dim=-1)
        return torch.stack([logits.argmax(-1) for logits in self.choices(outputs)], dim=-1)

    def choices(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the logits [..., n] of each choice, from outputs [..., num_outputs]."""
        return torch.split(outputs, self._sizes, dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.shape:
            return categorical(outputs, actions)
        each = zip(self.choices(outputs), actions.unbind(-1), strict=True)
        log_probs, entropies = zip(*(categorical(logits, chosen) for logits, chosen in each), strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class DiagonalGaussian(ActionDistribution):
    """Independent normal distributions. The outputs are the means; the log standard deviations are parameters.

    Samples are not bounded. The environment clips them to its bounds; log-probabilities are of the unclipped samples.
    """

    def __init__(self, size: int, *, log_std_init: float) -> None:
        super().__init__()
        self.num_outputs = size
        self.shape = (size,)
        self.dtype = torch.float32
        self.log_std = nn.Parameter(torch.full((size,), log_std_init, dtype=torch.float32, device="cpu"))

    def noise(self, uniform: Tensor) -> Tensor:
        normal: Tensor = torch.special.ndtri(uniform)
        return normal

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + self.log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        standardized = (actions - outputs) * (-self.log_std).exp()
        log_prob = (-0.5 * standardized.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return log_prob, entropy.expand(outputs.shape[:-1])


class _Constants:
    """Numbers that are copied to a device once, because the host waits for a copy."""

    def __init__(self, *numbers: Array) -> None:
        self._numbers = [torch.from_numpy(each) for each in numbers]
        self._copies: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def like(self, tensor: Tensor) -> list[Tensor]:
        """Returns them with the device and the dtype of a tensor."""
        if tensor.device.type == "cpu":  # where exporters trace, whose tensors must not be kept
            return [each.to(tensor) for each in self._numbers]
        key = tensor.device, tensor.dtype
        if key not in self._copies:
            with torch.inference_mode(False):  # or no gradient would go through what uses them later
                self._copies[key] = [each.to(tensor) for each in self._numbers]
        return self._copies[key]


class TanhNormal(DiagonalGaussian):
    """Normal distributions squashed by tanh: actions are in (-1, 1). The environment gets them scaled to its bounds.

    Log densities are those of the actions in (-1, 1). ``mode`` is the median.
    """

    def __init__(self, bounds: spaces.Box, *, log_std_init: float) -> None:
        super().__init__(bounds.shape[0], log_std_init=log_std_init)
        self._bounds = _Bounds(bounds)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return _inside(super().sample(outputs, noise).tanh(), -1.0)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.tanh()

    def scaled(self, actions: Tensor) -> Tensor:
        return self._bounds.scaled((actions + 1) / 2)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return self._with_normal_entropy(outputs, actions)[0]

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = self._with_normal_entropy(outputs, actions)
        # The entropy is that of the normal distribution plus the mean of log(slope), an integral in each dimension.
        # Gauss-Hermite quadrature estimates it: without random numbers, and with a gradient.
        nodes, weights = _QUADRATURE.like(outputs)
        at = outputs.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * nodes  # [..., size, nodes]
        return log_prob, entropy + (_log_slope(at) @ weights).sum(-1)

    def _with_normal_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of actions, and entropies of what they were before tanh."""
        before = _inside(actions, -1.0).atanh()
        log_prob, entropy = super().log_prob_and_entropy(outputs, before)
        return log_prob - _log_slope(before).sum(-1), entropy


_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(16)
_QUADRATURE = _Constants(math.sqrt(2) * _NODES, _WEIGHTS / math.sqrt(math.pi))
"""Nodes and weights of a mean over a standard normal distribution."""


def _log_slope(before: Tensor) -> Tensor:
    """Returns log(1 - tanh(x)^2), without its loss of digits."""
    return 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))


class Beta(ActionDistribution):
    """Beta distributions: actions are in (0, 1), and the environment gets them scaled to its bounds.

    Log densities are those of the actions in (0, 1). Both concentrations are 1 + softplus of an output, so that there
    is one peak (Chou et al., "Improving Stochastic Policy Gradients", ICML 2017).
    """

    TRIES = 6
    """Each try of a gamma distribution's sample is accepted with a probability of at least 0.95. So 1 in 50 million
    samples is that of the first try, which no test accepted."""

    def __init__(self, bounds: spaces.Box) -> None:
        super().__init__()
        self.num_outputs, self.shape, self.dtype = 2 * bounds.shape[0], bounds.shape, torch.float32
        self._bounds = _Bounds(bounds)

    @property
    def num_noise(self) -> int:
        return 2 * self.TRIES * self.num_outputs

    def noise(self, uniform: Tensor) -> Tensor:
        for_normal, others = uniform.chunk(2, dim=-1)
        return torch.cat([torch.special.ndtri(for_normal), others.log()], dim=-1)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        # A quotient of two samples of gamma distributions, each by rejection (Marsaglia and Tsang, 2000).
        normal, log_uniform = noise.unflatten(-1, (2, self.TRIES, self.num_outputs)).unbind(-3)
        reduced = (nn.functional.softplus(outputs) + 2 / 3).unsqueeze(-2)  # concentrations - 1/3
        cube = (1 + normal / (9 * reduced).sqrt()) ** 3
        positive = cube.clamp(min=torch.finfo(cube.dtype).tiny)
        bound = normal.square() / 2 + reduced * (1 - positive + positive.log())
        accepted = (cube > 0) & (log_uniform < bound)
        first = accepted.to(torch.uint8).argmax(-2, keepdim=True)
        gamma = (reduced * positive.gather(-2, first)).squeeze(-2)
        one, other = gamma.chunk(2, dim=-1)
        return _inside(one / (one + other), 0.0)

    def mode(self, outputs: Tensor) -> Tensor:
        one, other = nn.functional.softplus(outputs).clamp(min=torch.finfo(outputs.dtype).tiny).chunk(2, dim=-1)
        return one / (one + other)

    def scaled(self, actions: Tensor) -> Tensor:
        return self._bounds.scaled(actions)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        extra, _, log_beta = self._terms(outputs)
        return _powers_of(actions, extra) - log_beta

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        extra, both, log_beta = self._terms(outputs)
        entropy = log_beta - (extra * (1 + extra).digamma()).sum(-1) + (both * (2 + both).digamma()).sum(-1)
        return _powers_of(actions, extra) - log_beta, entropy

    def _terms(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the concentrations - 1, the sums of two of them - 2, and the logarithm of the beta function."""
        extra = nn.functional.softplus(outputs)
        both = extra.unflatten(-1, (2, -1)).sum(-2)
        return extra, both, (1 + extra).lgamma().sum(-1) - (2 + both).lgamma().sum(-1)


def _powers_of(actions: Tensor, extra: Tensor) -> Tensor:
    """Returns the logarithm of a beta density [...] of actions, up to the beta function."""
    inside = _inside(actions, 0.0)
    return (extra * torch.cat([inside.log(), (-inside).log1p()], dim=-1)).sum(-1)


class _Bounds:
    """Maps [0, 1] to the bounds of a Box."""

    def __init__(self, box: spaces.Box) -> None:
        low, high = (each.astype(np.float64) for each in (box.low, box.high))
        self._low_and_size = _Constants(low, high - low)

    def scaled(self, actions: Tensor) -> Tensor:
        low, size = self._low_and_size.like(actions)
        return low + size * actions


def _inside(actions: Tensor, low: float) -> Tensor:
    """Clamps actions into the open interval (low, 1), at whose ends densities are 0 or infinite."""
    tiny = torch.finfo(actions.dtype).eps
    return actions.clamp(low + tiny, 1 - tiny)


def make_distribution(action_space: Space[Any], settings: RunSettings) -> ActionDistribution:
    """Makes the distribution for a space that ``make_environments`` accepts.

    Raises:
        ValueError: ``settings.action_distribution`` does not suit the space.
    """
    kind = settings.action_distribution
    is_bounded = isinstance(action_space, spaces.Box) and action_space.is_bounded()
    if kind != "normal" and not is_bounded:
        raise ValueError(
            f"action_distribution={kind!r} is for a Box with finite bounds, and the environment has the actions "
            f"{action_space}; leave it out"
        )
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete):
        return Categorical([int(number) for number in action_space.nvec])
    assert isinstance(action_space, spaces.Box)
    if kind == "beta":
        return Beta(action_space)
    if kind == "tanh_normal":
        return TanhNormal(action_space, log_std_init=settings.log_std_init)
    return DiagonalGaussian(action_space.shape[0], log_std_init=settings.log_std_init)
