"""The meaning of a policy's last layer: distributions over discrete, multi-discrete and continuous actions.

Each has ``sample``, ``mode``, ``log_prob`` and ``log_prob_and_entropy`` of the last layer's outputs. Randomness comes
from outside, as noise that is drawn for a whole rollout at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from gymnasium import spaces
from torch import Tensor, nn

import fastsync._ppo  # noqa: F401 registers torch.ops.fastsync.categorical


class ActionDistribution(nn.Module, ABC):
    """Actions of one kind of space.

    Attributes:
        num_outputs: what the last layer gives, per action.
        shape: of one action.
        dtype: of actions.
    """

    num_outputs: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def noise(self, uniform: Tensor) -> Tensor:
        """Makes what ``sample`` needs, from numbers between 0 and 1, both [..., num_outputs]."""

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions [..., *shape] from outputs and noise [..., num_outputs]."""

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """The likeliest actions [..., *shape] under outputs [..., num_outputs]."""

    @abstractmethod
    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability, or its density, of actions [..., *shape] under outputs [..., num_outputs], and the entropy.

        Returns:
            Both [...], the entropy in nats.
        """

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """The log-probability alone."""
        return self.log_prob_and_entropy(outputs, actions)[0]


class Categorical(ActionDistribution):
    """One choice out of n; the outputs are logits."""

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self.num_outputs = num_choices
        self.shape = ()
        self.dtype = torch.int64

    def noise(self, uniform: Tensor) -> Tensor:
        # Gumbel: the largest of logits + noise is a sample, so nothing needs to be normalised while the policy acts.
        return -torch.log(-torch.log(uniform))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return torch.argmax(outputs + noise, dim=-1)

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.argmax(outputs, dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.device.type == "cpu" and not torch.compiler.is_compiling():
            return torch.ops.fastsync.categorical.default(outputs, actions)  # type: ignore[no-any-return]
        return self.in_plain_pytorch(outputs, actions)

    @staticmethod
    def in_plain_pytorch(outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The specification of torch.ops.fastsync.categorical, and what a GPU computes."""
        log_probabilities = torch.log_softmax(outputs, dim=-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return log_probabilities.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


class MultiCategorical(ActionDistribution):
    """Several independent choices; the outputs are their logits, one after the other."""

    def __init__(self, num_choices: Sequence[int]) -> None:
        super().__init__()
        self._parts = [Categorical(number) for number in num_choices]
        self._sizes = list(num_choices)
        self.num_outputs = sum(num_choices)
        self.shape = (len(num_choices),)
        self.dtype = torch.int64

    def noise(self, uniform: Tensor) -> Tensor:
        return self._parts[0].noise(uniform)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self.mode(outputs + noise)

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in outputs.split(self._sizes, dim=-1)], dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logits = outputs.split(self._sizes, dim=-1)
        choices = actions.unbind(-1)
        both = [p.log_prob_and_entropy(x, a) for p, x, a in zip(self._parts, logits, choices, strict=True)]
        log_probs, entropies = zip(*both, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class DiagonalGaussian(ActionDistribution):
    """Real numbers, each normally distributed; the outputs are means, the standard deviations parameters of their own.

    Samples are not bounded: the environment's bounds cut them off there, where their log-probability is taken for.
    """

    def __init__(self, size: int, *, log_std_init: float) -> None:
        super().__init__()
        self.num_outputs = size
        self.shape = (size,)
        self.dtype = torch.float32
        self.log_std = nn.Parameter(torch.full((size,), log_std_init))

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


def make_distribution(action_space: spaces.Space, *, log_std_init: float) -> ActionDistribution:  # type: ignore[type-arg]
    """The distribution for a space that ``make_environments`` lets through."""
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategorical([int(number) for number in action_space.nvec])
    assert isinstance(action_space, spaces.Box)
    return DiagonalGaussian(action_space.shape[0], log_std_init=log_std_init)
