"""The policy network, and action distributions against torch.distributions and their own probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions

from fastsync.ppo.policies import ActionDistribution, make_distribution, make_policy
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
        # Householder's QR of n columns makes them orthonormal to n sqrt(m) eps.
        rows, columns = weight.shape
        unit = squared * torch.finfo(torch.float32).eps * min(rows, columns) * max(rows, columns) ** 0.5
        torch.testing.assert_close(weight @ weight.T, squared * torch.eye(rows), rtol=0, atol=unit)
    assert all((p == 0).all() for name, p in policy.named_parameters() if "bias" in name)


SPACES = {
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([2, 3, 2]),
    "continuous": spaces.Box(-1, 1, (3,)),
}


def sampled(distribution: ActionDistribution, outputs: torch.Tensor, num_rows: int) -> torch.Tensor:
    noise = distribution.noise(
        torch.rand(num_rows, distribution.num_outputs, generator=torch.Generator().manual_seed(0))
    )
    return distribution.sample(outputs.expand(num_rows, -1), noise)


def plain(name: str, outputs: torch.Tensor) -> distributions.Distribution | list[distributions.Distribution]:
    if name == "discrete":
        return distributions.Categorical(logits=outputs)
    if name == "multi-discrete":
        return [distributions.Categorical(logits=logits) for logits in outputs.split([2, 3, 2], dim=-1)]
    return distributions.Independent(distributions.Normal(outputs, torch.tensor([0.5, 0.5, 0.5]).exp()), 1)


@pytest.mark.parametrize("name", SPACES)
def test_log_prob_and_entropy_are_torchs(name: str):
    torch.manual_seed(0)
    distribution = make_distribution(SPACES[name], log_std_init=0.5)
    outputs = torch.randn(5, 7, distribution.num_outputs)
    actions = distribution.sample(outputs, distribution.noise(torch.rand(outputs.shape)))
    assert actions.shape == (5, 7, *distribution.shape)
    assert actions.dtype == distribution.dtype
    expected = plain(name, outputs)
    if isinstance(expected, list):
        log_prob = sum(part.log_prob(actions[..., i]) for i, part in enumerate(expected))
        entropy = sum(part.entropy() for part in expected)
    else:
        log_prob, entropy = expected.log_prob(actions), expected.entropy()
    torch.testing.assert_close(distribution.log_prob_and_entropy(outputs, actions), (log_prob, entropy))
    torch.testing.assert_close(distribution.log_prob(outputs, actions), log_prob)


@pytest.mark.parametrize("name", ["discrete", "multi-discrete"])
def test_choices_come_with_their_probabilities(name: str):
    distribution = make_distribution(SPACES[name], log_std_init=0.0)
    sizes = [4] if name == "discrete" else [2, 3, 2]
    probabilities = [torch.arange(1.0, size + 1) / sum(range(size + 1)) for size in sizes]
    outputs = torch.cat([p.log() for p in probabilities])
    actions = sampled(distribution, outputs, 20_000).reshape(20_000, -1)
    for column, expected in zip(actions.unbind(1), probabilities, strict=True):
        frequencies = torch.bincount(column, minlength=len(expected)) / 20_000
        bound = 5 * (expected * (1 - expected) / 20_000).sqrt()  # five standard deviations of a binomial share
        assert ((frequencies - expected).abs() < bound).all()
    mode = distribution.mode(outputs).reshape(-1)
    assert mode.tolist() == [size - 1 for size in sizes]


def test_real_actions_are_normal():
    distribution = make_distribution(SPACES["continuous"], log_std_init=-1.0)
    mean = torch.tensor([-2.0, 0.0, 3.0])
    actions = sampled(distribution, mean, 20_000)
    deviation = torch.tensor(-1.0).exp()
    assert ((actions.mean(0) - mean).abs() < 5 * deviation / 20_000**0.5).all()
    assert ((actions.std(0) / deviation - 1).abs() < 5 / 40_000**0.5).all()
    assert torch.equal(distribution.mode(mean), mean)


def test_weights_are_torchs_own_without_ortho_init():
    assert not make_policy(SETTINGS, VECTOR, THREE).actor[0].bias.any()
    plain = make_policy(replace(SETTINGS, ortho_init=False), VECTOR, THREE)
    for layer in (plain.actor[0], plain.actor[-1], plain.critic[-1]):
        assert layer.bias.any()
        assert layer.weight.abs().max() <= layer.in_features**-0.5  # as torch.nn.Linear has them
