"""Action distributions against torch.distributions, and samples against their probabilities."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from torch import distributions

from fastsync.ppo.policies import ActionDistribution, make_distribution

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
