"""What a rollout records of scripted environments: restarts, final observations, episodes, and where one goes on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from fastsync.ppo.policy import ActorCritic, log_prob
from fastsync.ppo.rollout import Episode, Rollout, RolloutCollector


class Scripted(gymnasium.Env[Any, Any]):
    """Observes (episode, step); each step is worth 1; episodes have a fixed length and end in a fixed way."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), dtype=np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length: int, *, truncates: bool) -> None:
        self.length, self.truncates, self.episode = length, truncates, -1

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.array([self.episode, self.time], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode += 1
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        over = self.time == self.length
        return self._observe(), 1.0, over and not self.truncates, over and self.truncates, {}


def collect_twice() -> tuple[RolloutCollector, list[Rollout]]:
    """Two rollouts of four rows, from an environment that terminates after 3 steps and one truncated after 5."""
    torch.manual_seed(0)
    envs = SyncVectorEnv([lambda: Scripted(3, truncates=False), lambda: Scripted(5, truncates=True)])
    collector = RolloutCollector(
        envs, ActorCritic(2, 3, 8), num_steps=4, seed=0, generator=torch.Generator().manual_seed(0)
    )
    rollouts = []
    for _ in range(2):
        rollout = collector.collect()
        columns = {name: column.clone() for name, column in vars(rollout).items() if isinstance(column, torch.Tensor)}
        rollouts.append(Rollout(**columns, episodes=rollout.episodes))
    return collector, rollouts


def test_rows_are_those_of_the_environments():
    _, rollouts = collect_twice()
    observations = torch.cat([rollout.observations for rollout in rollouts])
    # Episode and step that the policy saw; an episode of n steps takes n + 1 rows, the last of them its restart.
    assert observations[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert observations[:, 1].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [1, 0], [1, 1]]
    columns = {
        name: torch.cat([getattr(rollout, name) for rollout in rollouts]).int().T.tolist()
        for name in ("rewards", "valid", "terminated", "done")
    }
    assert columns == {
        "rewards": [[1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1]],
        "valid": [[1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1]],
        "terminated": [[0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
        "done": [[0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0, 0]],
    }


def test_episodes_are_told_with_row_return_and_length_also_across_rollouts():
    _, (first, second) = collect_twice()
    assert first.episodes == [Episode(row=2, episode_return=3.0, length=3)]
    assert second.episodes == [
        Episode(row=0, episode_return=5.0, length=5),
        Episode(row=2, episode_return=3.0, length=3),
    ]


def test_values_and_log_probs_are_the_policys():
    collector, rollouts = collect_twice()
    policy = collector.policy
    with torch.no_grad():
        for rollout in rollouts:
            torch.testing.assert_close(rollout.values[:-1], policy.value(rollout.observations))
            torch.testing.assert_close(
                rollout.log_probs, log_prob(policy.logits(rollout.observations), rollout.actions)
            )
        # The value after the last step is that of the state the next rollout begins in.
        torch.testing.assert_close(rollouts[0].values[-1], policy.value(rollouts[1].observations[0]))


def test_actions_are_sampled_from_the_policy():
    torch.manual_seed(0)
    envs = SyncVectorEnv([lambda: Scripted(1000, truncates=True) for _ in range(50)])
    policy = ActorCritic(2, 3, 8)
    probabilities = torch.tensor([0.1, 0.3, 0.6])
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(probabilities.log())
    collector = RolloutCollector(envs, policy, num_steps=400, seed=0, generator=torch.Generator().manual_seed(1))
    frequencies = torch.bincount(collector.collect().actions.flatten(), minlength=3) / 20_000
    # Five standard deviations of a binomial share.
    bound = 5 * (probabilities * (1 - probabilities) / 20_000).sqrt()
    assert ((frequencies - probabilities).abs() < bound).all()


@pytest.mark.parametrize("name", ["_observations", "_actions", "_rewards", "_valid"])
def test_buffers_are_allocated_once(name: str):
    collector, _ = collect_twice()
    before = getattr(collector, name)
    collector.collect()
    assert getattr(collector, name) is before
