"""PPO with a network of one's own: layer normalisation, and SiLU between the layers.

    python examples/ppo_layer_norm.py
    torchrun --standalone --nproc-per-node=2 examples/ppo_layer_norm.py
    fastsync train --policy examples.ppo_layer_norm:Normalised --nproc 2

All settings of ``fastsync train`` can be typed behind it.
"""

from typing import Any

import tyro
from torch import nn

from fastsync.ppo import Policy, Settings, train

WIDTH = 64


class Normalised(Policy):
    def __init__(self, observation_space: Any, action_space: Any, settings: Settings) -> None:
        super().__init__(observation_space, action_space, settings)

        def network(num_outputs: int) -> nn.Sequential:
            (num_inputs,) = observation_space.shape
            layers: list[nn.Module] = []
            for size in (num_inputs, WIDTH):
                layers += [nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU()]
            return nn.Sequential(*layers, nn.Linear(WIDTH, num_outputs))

        self.actor, self.critic = network(self.distribution.num_outputs), network(1)


if __name__ == "__main__":
    train(tyro.cli(Settings), policy=Normalised)
