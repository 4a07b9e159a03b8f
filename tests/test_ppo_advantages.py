"""Generalised advantage estimation against its definition, and normalisation over ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsync.ppo.advantages import estimate_advantages, normalize_over_ranks
from tests.ranks import run_ranks

GOES_ON, TERMINATES, TRUNCATES = range(3)


@st.composite
def endings(draw: st.DrawFn) -> list[list[int]]:
    """For each environment, how each of its rows ends. The row after an ending is a restart and goes on."""
    num_rows, num_envs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    columns = []
    for _ in range(num_envs):
        column = draw(
            st.lists(st.sampled_from([GOES_ON, GOES_ON, TERMINATES, TRUNCATES]), min_size=num_rows, max_size=num_rows)
        )
        for row in range(1, num_rows):
            if column[row - 1] != GOES_ON:
                column[row] = GOES_ON
        columns.append(column)
    return columns


def plain_advantage(
    start: int, column: list[int], rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float
) -> float:
    """The sum over l of (gamma * lambda)^l delta_{start + l}, to the end of the episode or of the rollout."""
    advantage, weight = 0.0, 1.0
    for row in range(start, len(column)):
        successor = 0.0 if column[row] == TERMINATES else float(values[row + 1])
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
    num_rows, num_envs = ending.shape
    done = ending != GOES_ON
    restarts = torch.zeros_like(done)
    restarts[1:] = done[:-1]
    rewards = torch.randn(num_rows, num_envs, generator=generator, dtype=torch.float64)
    values = torch.randn(num_rows + 1, num_envs, generator=generator, dtype=torch.float64)
    # What is in a restart's reward must reach no other row.
    rewards[restarts] = 1e6

    got = estimate_advantages(rewards, values, ending == TERMINATES, done, gamma=gamma, gae_lambda=gae_lambda)

    for env, column in enumerate(columns):
        for row in range(num_rows):
            if not restarts[row, env]:
                expected = plain_advantage(row, column, rewards[:, env], values[:, env], gamma, gae_lambda)
                torch.testing.assert_close(float(got[row, env]), expected, rtol=1e-9, atol=1e-9)


def rank_rows(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    advantages = 1000 + (1 + rank) * torch.randn(6, 5, generator=generator)
    valid = torch.rand(6, 5, generator=generator) < (0.9, 0.5)[rank]
    advantages[~valid] = 1e6
    return advantages, valid


def normalize(rank: int, world_size: int) -> tuple[Tensor, float]:
    normalized, num_valid = normalize_over_ranks(*rank_rows(rank))
    return normalized, float(num_valid)


def test_normalisation_pools_the_valid_rows_of_all_ranks():
    rows = [rank_rows(rank) for rank in range(2)]
    pooled = torch.cat([advantages[valid] for advantages, valid in rows]).double()
    for (advantages, valid), (normalized, num_valid) in zip(rows, run_ranks(normalize, 2, timeout=120), strict=True):
        assert num_valid == len(pooled)
        expected = (advantages.double() - pooled.mean()) / pooled.std(correction=0)
        torch.testing.assert_close(normalized[valid].double(), expected[valid], rtol=1e-5, atol=1e-5)
