"""Generalised advantage estimation against its definition; running moments, and what is normalised by them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.normalize import ObservationNormalizer, RunningMoments, moments
from fastsync.ppo.ppo import (
    PPO,
    Batch,
    RewardNormalizer,
    Settings,
    estimate_advantages,
    explained_variance,
    normalize_advantages,
)
from tests.models import group_of_one
from tests.ranks import run_ranks

GOES_ON, TERMINATES, TRUNCATES = range(3)


@st.composite
def endings(draw: st.DrawFn) -> list[list[int]]:
    """For each environment, how each of its rows ends."""
    num_rows, num_envs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    ending = st.sampled_from([GOES_ON, GOES_ON, TERMINATES, TRUNCATES])
    return [draw(st.lists(ending, min_size=num_rows, max_size=num_rows)) for _ in range(num_envs)]


def plain_advantage(
    start: int, column: list[int], rewards: Tensor, values: Tensor, successors: Tensor, gamma: float, gae_lambda: float
) -> float:
    """The sum over l of (gamma * lambda)^l delta_{start + l}, to the end of the episode or of the rollout."""
    advantage, weight = 0.0, 1.0
    for row in range(start, len(column)):
        successor = 0.0 if column[row] == TERMINATES else float(successors[row])
        advantage += weight * (float(rewards[row]) + gamma * successor - float(values[row]))
        weight *= gamma * gae_lambda
        if column[row] != GOES_ON:
            break
    return advantage


@settings(deadline=None, max_examples=200)
@given(endings(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_advantages_are_those_of_the_definition(columns: list[list[int]], gamma: float, gae_lambda: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    ending = torch.tensor(columns).T
    restarts = torch.zeros_like(ending, dtype=torch.bool)
    for row in range(1, len(ending)):  # the row after an ending is a restart, and ends nothing
        restarts[row] = ending[row - 1] != GOES_ON
        ending[row][restarts[row]] = GOES_ON
    done = ending != GOES_ON
    rewards = torch.randn(ending.shape, generator=generator, dtype=torch.float64)
    values = torch.randn(len(ending) + 1, ending.shape[1], generator=generator, dtype=torch.float64)
    next_values = values[1:]
    # What is in a restart's reward must reach no other row.
    rewards[restarts] = 1e6

    got = estimate_advantages(
        rewards, values[:-1], next_values, ending == TERMINATES, done, Settings(gamma=gamma, gae_lambda=gae_lambda)
    )

    for env, column in enumerate(ending.T.tolist()):
        of_env = rewards[:, env], values[:, env], next_values[:, env]
        for row in range(len(ending)):
            if not restarts[row, env]:
                expected = plain_advantage(row, column, *of_env, gamma, gae_lambda)
                torch.testing.assert_close(float(got[row, env]), expected, rtol=1e-9, atol=1e-9)


def test_normalisation_pools_the_valid_rows_of_all_ranks():
    generator = torch.Generator().manual_seed(0)
    ranks = [1000 + scale * torch.randn(6, 5, generator=generator) for scale in (1, 2)]
    valid = [torch.rand(6, 5, generator=generator) < share for share in (0.9, 0.5)]
    of_all = sum(moments(mine.unsqueeze(-1), counts) for mine, counts in zip(ranks, valid, strict=True))
    pooled = torch.cat([mine[counts] for mine, counts in zip(ranks, valid, strict=True)]).double()
    expected = (ranks[0].double() - pooled.mean()) / pooled.std()
    normalized = normalize_advantages(ranks[0], of_all)
    torch.testing.assert_close(normalized.double(), expected, rtol=1e-5, atol=1e-5)


def _minibatch_norms(rank: int, world_size: int) -> list[list[float]]:
    """Sums of what each minibatch is normalised to, of 4 environments over all ranks."""
    generator = torch.Generator().manual_seed(0)
    advantages, valid = torch.randn(12, 4, generator=generator), torch.rand(12, 4, generator=generator) < 0.8
    settings = Settings(num_envs=4 // world_size, num_steps=12, num_minibatches=3)
    with make_environments(settings, rank=rank) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
    mine = slice(rank * settings.num_envs, (rank + 1) * settings.num_envs)
    column = (advantages[:, mine] * 100 + 5).contiguous()
    batch = Batch(**dict.fromkeys(("observations", "actions", "log_probs", "values", "returns"), column),
                  advantages=column, weights=valid[:, mine] * 1.0)  # fmt: skip
    parts = [part for (part,) in ppo.shuffler.minibatches([batch], 2, ppo._normalize_minibatches)]
    sums = []
    for part in parts:
        counts = part.weights > 0
        if world_size == 1:  # the formula of Stable-Baselines3 and CleanRL
            raw = part.values[counts]
            expected = (raw - raw.mean()) / (raw.std() + 1e-8)
            torch.testing.assert_close(part.advantages[counts], expected, rtol=1e-5, atol=1e-5)
        rows = part.advantages[counts].double()
        sums.append([float(counts.sum()), float(rows.sum()), float(rows.square().sum()), float(rows.pow(3).sum())])
    return sums


def test_a_minibatch_of_all_ranks_is_normalised_as_that_of_one() -> None:
    (alone,), both = run_ranks(_minibatch_norms, 1), run_ranks(_minibatch_norms, 2)
    assert len(alone) == 6
    torch.testing.assert_close(torch.tensor(both).sum(0), torch.tensor(alone), rtol=1e-5, atol=1e-4)


def test_a_single_row_is_not_normalised() -> None:
    advantages = torch.tensor([[2.0, 3.0], [5.0, 7.0]])  # two minibatches, of which the first has one valid row
    sums = torch.tensor([[[1.0], [2.0]], [[2.0], [12.0]], [[4.0], [74.0]]], dtype=torch.float64)
    normalized = normalize_advantages(advantages, sums)
    torch.testing.assert_close(normalized, torch.tensor([[2.0, 3.0], [-1.0, 1.0]]) / torch.tensor([[1.0], [2**0.5]]))


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


def test_observations_far_from_zero_keep_what_differs():
    """Such as times in seconds. float32 holds only every 128th second of this century."""
    generator = torch.Generator().manual_seed(0)
    normalizer, seen = ObservationNormalizer(2), []
    for _ in range(3):
        rows = torch.tensor([1.7e9, 3.0]) + torch.randn(8, 5, 2, generator=generator, dtype=torch.float64)
        valid = torch.rand(8, 5, generator=generator) < 0.7
        normalizer.learn([rows, rows + 1], [valid] * 2, lambda *mine: sum(map(moments, *mine)))
        seen += [rows[valid], rows[valid] + 1]
    learnt = torch.cat(seen)
    torch.testing.assert_close(normalizer.variance, learnt.var(0, correction=0), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        normalizer(rows), (rows - learnt.mean(0)) / learnt.std(0, correction=0), rtol=0, atol=1e-5
    )


def test_a_policy_sees_float64_observations_after_their_mean_is_subtracted():
    settings = Settings(env="tests.toy_envs:Clocked", norm_observations=True, num_envs=4, num_epochs=1)
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
        ppo.learn(ppo.collect())
        (rollout,) = ppo.collect()
        features = ppo.policy.features(rollout.observations)[rollout.valid]
        assert features.dtype == torch.float32
        assert 0.5 < features[:, 0].std() < 2
        ppo.learn([rollout])


def test_discounted_returns_go_on_over_rollouts_and_begin_anew_with_episodes():
    normalizer = RewardNormalizer(0.5, (1, 2), torch.float32)
    rewards = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    done = torch.tensor([[False, False], [True, False], [False, False]])
    first = normalizer.discounted_returns(rewards, done, 0)
    assert first.tolist() == [[1, 2], [1.5, 3], [1, 3.5]]
    assert normalizer.carried.tolist() == [[1, 3.5]]
    second = normalizer.discounted_returns(rewards, torch.zeros_like(done), 0)
    assert second[0].tolist() == [1.5, 3.75]


def test_rewards_are_divided_by_the_deviation_of_the_return_and_cut_off():
    normalizer = RewardNormalizer(0.9, (1, 1), torch.float32)
    normalizer.update(moments(torch.tensor([[3.0], [7.0]]), torch.ones(2, dtype=torch.bool)))
    torch.testing.assert_close(normalizer(torch.tensor([3.0, -3.0, 1e6])), torch.tensor([1.5, -1.5, 10.0]))


def test_explained_variance_is_that_of_all_valid_rows():
    generator = torch.Generator().manual_seed(0)
    advantages, returns = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    valid = torch.rand(7, 5, generator=generator) < 0.7
    both = moments(torch.stack([advantages, returns], -1), valid)
    expected = 1 - advantages[valid].var(correction=0) / returns[valid].var(correction=0)
    assert explained_variance(both) == pytest.approx(float(expected))
    assert explained_variance(moments(torch.stack([0 * returns, returns], -1), valid)) == 1.0
    assert math.isnan(explained_variance(moments(torch.stack([advantages, 0 * returns], -1), valid)))
