"""The policy network: its shapes, what is shared, how it begins, and precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Settings

VECTOR = spaces.Box(-1, 1, (5,))
IMAGE = spaces.Box(0, 255, (4, 84, 84), dtype=np.uint8)
THREE = spaces.Discrete(3)
SETTINGS = Settings(hidden_sizes=(16, 8))


def test_a_vector_policy_has_the_layers_it_was_asked_for():
    policy = make_policy(replace(SETTINGS, activation="elu"), VECTOR, THREE)
    assert [tuple(p.shape) for p in policy.actor.parameters()] == [(16, 5), (16,), (8, 16), (8,), (3, 8), (3,)]
    assert [tuple(p.shape) for p in policy.critic.parameters()] == [(16, 5), (16,), (8, 16), (8,), (1, 8), (1,)]
    assert policy.trunk is None
    assert isinstance(policy.actor[1], torch.nn.ELU)
    outputs, values = policy(torch.randn(6, 2, 5))
    assert (outputs.shape, values.shape) == ((6, 2, 3), (6, 2))


def test_layers_can_be_shared():
    policy = make_policy(replace(SETTINGS, network="shared"), VECTOR, THREE)
    assert [tuple(p.shape) for p in policy.trunk.parameters()] == [(16, 5), (16,), (8, 16), (8,)]
    policy(torch.randn(6, 5))[1].sum().backward()
    assert all(p.grad is not None for p in policy.trunk.parameters())
    assert all(p.grad is None for p in policy.actor.parameters())


@pytest.mark.parametrize("network", ["auto", "separate"])
def test_images_go_through_convolutions(network: Any):
    policy = make_policy(replace(SETTINGS, network=network), IMAGE, THREE)
    assert (policy.trunk is not None) == (network == "auto")
    # Nature 2015: 32 filters 8x8, 64 4x4, 64 3x3, 512 units.
    body = policy.trunk if policy.trunk is not None else policy.actor[:-1]
    assert [tuple(p.shape) for p in body.parameters() if p.dim() > 1] == [
        (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136),
    ]  # fmt: skip
    images = torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    outputs, values = policy(images)
    assert (outputs.shape, values.shape) == ((2, 3, 3), (2, 3))


def test_weights_begin_orthogonal():
    torch.manual_seed(0)
    policy = make_policy(Settings(network="shared", hidden_sizes=(16, 16)), VECTOR, THREE)
    gains = {policy.trunk[2].weight: 2.0, policy.actor[-1].weight: 1e-4, policy.critic[-1].weight: 1.0}
    for weight, squared in gains.items():
        torch.testing.assert_close(weight @ weight.T, squared * torch.eye(len(weight)), rtol=1e-4, atol=1e-6)
    assert all((p == 0).all() for name, p in policy.named_parameters() if "bias" in name)
