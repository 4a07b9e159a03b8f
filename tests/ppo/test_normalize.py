"""Running moments against those of all rows at once, and what is normalised by them."""

from __future__ import annotations

import torch

from fastsync.ppo.normalize import ObservationNormalizer, RewardNormalizer, RunningMoments, moments
from fastsync.ppo.ppo import discounted_sums


def test_running_moments_are_those_of_all_rows_so_far():
    generator = torch.Generator().manual_seed(0)
    running = RunningMoments(3)
    seen = []
    for mean, num_rows in ((1e4, 5), (-3.0, 40), (0.0, 7)):
        parts = [mean + torch.randn(num_rows, 2, 3, generator=generator) * torch.tensor([1, 2, 3]) for _ in range(2)]
        valid = torch.rand(num_rows, 2, generator=generator) < 0.7
        running.update(sum(moments(part, valid) for part in parts))  # two ranks
        seen += [part[valid].double() for part in parts]
        rows = torch.cat(seen)
        assert running.count == len(rows)
        torch.testing.assert_close(running.mean, rows.mean(0))
        torch.testing.assert_close(running.variance, rows.var(0, correction=0), rtol=1e-6, atol=1e-9)


def test_observations_are_normalised_and_cut_off():
    normalizer = ObservationNormalizer(2)
    observations = torch.tensor([[1.0, 5.0], [3.0, -1e6]])
    assert torch.equal(normalizer(observations)[0], torch.tensor([1.0, 5.0]))  # nothing is known yet
    normalizer.update(moments(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.ones(2, dtype=torch.bool)))
    torch.testing.assert_close(normalizer(observations), torch.tensor([[0.0, 1.5], [2.0, -10.0]]))


def test_discounted_returns_go_on_over_rollouts_and_begin_anew_with_episodes():
    normalizer = RewardNormalizer(0.5, 2, torch.float32)
    rewards = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    done = torch.tensor([[False, False], [True, False], [False, False]])
    first = normalizer.discounted_returns(rewards, done, discounted_sums)
    assert first.tolist() == [[1, 2], [1.5, 3], [1, 3.5]]
    assert normalizer.carried.tolist() == [1, 3.5]
    second = normalizer.discounted_returns(rewards, torch.zeros_like(done), discounted_sums)
    assert second[0].tolist() == [1.5, 3.75]


def test_rewards_are_divided_by_the_deviation_of_the_return_and_cut_off():
    normalizer = RewardNormalizer(0.9, 1, torch.float32)
    normalizer.update(moments(torch.tensor([[3.0], [7.0]]), torch.ones(2, dtype=torch.bool)))
    torch.testing.assert_close(normalizer(torch.tensor([3.0, -3.0, 1e6])), torch.tensor([1.5, -1.5, 10.0]))
