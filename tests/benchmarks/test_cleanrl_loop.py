"""The baseline that works as CleanRL does: its arithmetic, and that it learns."""

from __future__ import annotations

import pytest
import torch

from benchmarks.baselines.cleanrl_loop import Rollout, _policy_loss, _value_loss
from tests.ppo.test_advantages import GOES_ON, TERMINATES, plain_advantage


def test_advantages_are_discounted_sums_of_surprises_up_to_the_end_of_an_episode():
    generator = torch.Generator().manual_seed(3)
    rollout = Rollout(num_steps=6, num_envs=1, num_inputs=4)
    rollout.rewards.copy_(torch.randn(6, 1, generator=generator))
    rollout.values.copy_(torch.randn(6, 1, generator=generator))
    rollout.dones[4] = 1.0  # the episode ends with step 3; step 4 is the first of the next
    last_value = torch.tensor([0.7])
    gamma, gae_lambda = 0.9, 0.8
    successors = torch.cat([rollout.values[1:, 0], last_value])
    ending = [GOES_ON, GOES_ON, GOES_ON, TERMINATES, GOES_ON, GOES_ON]
    of_env = rollout.rewards[:, 0], rollout.values[:, 0], successors
    expected = [plain_advantage(step, ending, *of_env, gamma, gae_lambda) for step in range(6)]
    found = rollout.advantages(last_value, torch.zeros(1), gamma, gae_lambda)
    torch.testing.assert_close(found[:, 0], torch.tensor(expected))


def test_losses_are_clipped():
    advantage, ratio = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([1.5, 0.5, 1.5, 0.5])
    # -min(ratio · A, clipped ratio · A): the worse of both.
    expected = -(1.2 + 0.5 - 1.5 - 0.8) / 4
    assert _policy_loss(advantage, ratio, 0.2).item() == pytest.approx(expected)
    new, old, returns = torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([2.0])
    assert _value_loss(new, old, returns, 0.2).item() == pytest.approx(0.5 * 0.8**2)
