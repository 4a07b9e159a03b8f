"""The policy network, and action distributions against torch.distributions and their own probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions

from fastsync.ppo.distributions import ActionDistribution, make_distribution
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Settings
from tests.refused import refused

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
    noise = distribution.noise(torch.rand(num_rows, distribution.num_noise, generator=torch.Generator().manual_seed(0)))
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
    distribution = make_distribution(SPACES[name], Settings(log_std_init=0.5))
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
    distribution = make_distribution(SPACES[name], Settings())
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
    distribution = make_distribution(SPACES["continuous"], Settings(log_std_init=-1.0))
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


BOUNDS = spaces.Box(np.array([-1.0, 0.0, 5.0], np.float32), np.array([1.0, 3.0, 5.5], np.float32))
OUTPUTS = torch.tensor([[-1.5, 0.2, 3.0], [0.0, 4.0, -0.5], [9.0, -9.0, 0.0]])


def bounded(kind: Any, outputs: torch.Tensor) -> tuple[ActionDistribution, distributions.Distribution, torch.Tensor]:
    """A distribution, torch's own, and what the network computes for it."""
    made = make_distribution(BOUNDS, Settings(action_distribution=kind, log_std_init=0.0 if kind == "beta" else -0.3))
    if kind == "beta":
        outputs = torch.cat([outputs, outputs.flip(-1) / 2], dim=-1)
        one, other = (1 + torch.nn.functional.softplus(outputs)).chunk(2, dim=-1)
        return made, distributions.Independent(distributions.Beta(one, other), 1), outputs
    normal = distributions.Normal(outputs, torch.tensor(-0.3).exp().to(outputs))
    squashed = distributions.TransformedDistribution(normal, distributions.TanhTransform())
    return made, distributions.Independent(squashed, 1), outputs


@pytest.mark.parametrize("kind", ["tanh_normal", "beta"])
def test_bounded_actions_have_torchs_log_densities_and_moments(kind: Any):
    made, expected, outputs = bounded(kind, OUTPUTS.double())
    torch.manual_seed(0)
    samples = expected.sample((40_000,))
    noise = made.noise(torch.rand(40_000, 3, made.num_noise, dtype=torch.float64))
    actions = made.sample(outputs.expand(40_000, -1, -1), noise)
    assert actions.shape == samples.shape
    # Where tanh is 1, torch's inverse and ours are of the nearest number below it, which are not the same.
    usual = (actions.abs() < 0.999).all(-1)
    log_prob, entropy = made.log_prob_and_entropy(outputs, actions)
    torch.testing.assert_close(log_prob[usual], expected.log_prob(actions)[usual], rtol=1e-6, atol=1e-6)
    assert log_prob.isfinite().all()
    assert entropy.shape == log_prob.shape[1:] or entropy.shape == log_prob.shape
    # Means, variances and entropies of as many samples, within five standard errors.
    for power in (1, 2):
        one, other = actions**power, samples**power
        error = ((one.var(0) + other.var(0)) / 40_000).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() <= 5 * error + 1e-12).all()
    surprise = -made.log_prob(outputs, actions)[:, :2]
    assert ((surprise.mean(0) - entropy.expand_as(log_prob)[0, :2]).abs() < 5 * surprise.std(0) / 200).all()
    outputs.requires_grad_()
    (gradient,) = torch.autograd.grad(made.log_prob_and_entropy(outputs, made.mode(outputs.detach()))[1].sum(), outputs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["tanh_normal", "beta"])
def test_bounded_actions_are_scaled_to_their_bounds(kind: Any):
    settings = Settings(action_distribution=kind, hidden_sizes=(8,))
    policy = make_policy(settings, VECTOR, BOUNDS)
    with torch.no_grad():
        policy.actor[-1].weight.normal_(std=20)
    rows = np.random.default_rng(0).normal(size=(500, 5))
    actions = np.concatenate([policy.act(rows, deterministic=each) for each in (True, False)])
    assert (actions >= BOUNDS.low).all()
    assert (actions <= BOUNDS.high).all()
    reach = (actions.max(0) - actions.min(0)) / (BOUNDS.high - BOUNDS.low)
    assert (reach > 0.95).all()
    # Rows that do not count have the action 0.
    log_prob, entropy = policy.distribution.log_prob_and_entropy(
        torch.zeros(1, policy.distribution.num_outputs), torch.zeros(1, 3)
    )
    assert log_prob.isfinite().all()
    assert entropy.isfinite().all()


def test_distributions_that_do_not_suit_are_refused():
    beta = Settings(action_distribution="beta")
    for space in (THREE, spaces.Box(-np.inf, 1, (2,))):
        refused(lambda at=space: make_policy(beta, VECTOR, at), "action_distribution='beta'")
    refused(lambda: Settings(action_distribution="beta", log_std_init=-1.0), "log_std_init=-1", "'beta'")
