"""PPO with a network of one's own: layer normalisation and SiLU.

    python examples/ppo_layer_norm.py
    fastsync train --policy examples.ppo_layer_norm:Normalised --nproc 2

All settings of ``fastsync train`` can follow.
"""

from typing import Any

import tyro
from torch import nn

from fastsync.ppo import Policy, Settings, train


class Normalised(Policy):
    def __init__(self, observation_space: Any, action_space: Any, settings: Settings) -> None:
        super().__init__(observation_space, action_space, settings)
        self.actor = network(observation_space.shape[0], self.distribution.num_outputs)
        self.critic = network(observation_space.shape[0], 1)


def network(num_inputs: int, num_outputs: int, width: int = 64) -> nn.Sequential:
    hidden = [nn.Linear(num_inputs, width), nn.LayerNorm(width), nn.SiLU()]
    hidden += [nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*hidden, nn.Linear(width, num_outputs))


if __name__ == "__main__":
    train(tyro.cli(Settings), policy=Normalised)
