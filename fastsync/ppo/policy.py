"""The policy network: an actor and a critic that share nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Logits of a categorical policy and a state value, from two separate networks with two hidden layers each.

    Weights are orthogonal with gain sqrt(2), 0.01 for the logits so that the first policy is nearly uniform, and 1 for
    the value; biases are 0 (Engstrom et al., "Implementation Matters in Deep RL", ICLR 2020).
    """

    def __init__(self, observation_size: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()
        self.actor = _network(observation_size, hidden_size, num_actions, last_gain=0.01)
        self.critic = _network(observation_size, hidden_size, 1, last_gain=1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., num_actions] and values [...] of observations [..., observation_size]."""
        return self.logits(observations), self.value(observations)

    def logits(self, observations: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the actions, [..., num_actions]."""
        logits: Tensor = self.actor(observations)
        return logits

    def value(self, observations: Tensor) -> Tensor:
        """Expected discounted return, [...]."""
        value: Tensor = self.critic(observations)
        return value.squeeze(-1)


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability [...] of actions [...] under logits [..., num_actions]."""
    return torch.log_softmax(logits, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def _network(num_inputs: int, hidden_size: int, num_outputs: int, *, last_gain: float) -> nn.Sequential:
    return nn.Sequential(
        _linear(num_inputs, hidden_size, gain=math.sqrt(2)),
        nn.Tanh(),
        _linear(hidden_size, hidden_size, gain=math.sqrt(2)),
        nn.Tanh(),
        _linear(hidden_size, num_outputs, gain=last_gain),
    )


def _linear(num_inputs: int, num_outputs: int, *, gain: float) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
