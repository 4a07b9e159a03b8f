"""What a rollout records of scripted environments: restarts, last observations of episodes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.envs.vector import EpisodeRecorder, RecordedEnvironments
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Collector, Rollout, Settings
from fastsync.ppo.random_streams import RandomStreams


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


def test_a_vectorised_environment_without_a_finite_reward_is_named(monkeypatch: pytest.MonkeyPatch):
    settings = Settings(num_envs=3, num_steps=4, num_minibatches=1)
    with make_environments(settings, rank=0) as environments:
        policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
        collector = Collector(
            settings, environments, policy, RandomStreams(0, first_index=0, num_envs=3, device=torch.device("cpu"))
        )
        step, steps = environments._vector.step, itertools.count(1)

        def broken(actions: Any) -> Any:
            observations, rewards, *rest = step(actions)
            return observations, np.where((np.arange(3) == 2) & (next(steps) == 3), np.nan, rewards), *rest

        monkeypatch.setattr(environments._vector, "step", broken)
        message = "environment 2 has returned the reward nan in step 3 of the rollout; it must be finite"
        with pytest.raises(RuntimeError, match=message):
            collector.collect()


def collector_for(*scripts: Scripted, num_steps: int, network: Any = "separate") -> Collector:
    """With a policy whose every weight counts."""
    makers = [
        lambda script=script, index=index: EpisodeRecorder(script, seed=0, index=index)
        for index, script in enumerate(scripts)
    ]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    environments = RecordedEnvironments(vector, first_index=0)
    settings = Settings(
        hidden_sizes=(8, 8), network=network, num_steps=num_steps, num_envs=len(scripts), num_minibatches=1
    )
    torch.manual_seed(0)
    policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    streams = RandomStreams(0, first_index=0, num_envs=len(scripts), device=torch.device("cpu"))
    return Collector(settings, environments, policy, streams)


def collect_twice(network: Any = "separate") -> tuple[Collector, list[Rollout]]:
    """Two rollouts of four rows, from an environment that terminates after 3 steps and one truncated after 5."""
    collector = collector_for(Scripted(3, truncates=False), Scripted(5, truncates=True), num_steps=4, network=network)
    rollouts = []
    for _ in range(2):
        rollout = collector.collect()
        rollouts.append(copy.deepcopy(rollout))
    return collector, rollouts


def joined(rollouts: list[Rollout], name: str) -> list[list[int]]:
    """The column as one list of rows for each environment."""
    return torch.cat([getattr(rollout, name) for rollout in rollouts]).int().T.tolist()


# An episode of n steps takes n + 1 rows, the last of them its restart.
EXPECTED = {
    "rewards": [[1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1]],
    "valid": [[1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1]],
    "terminated": [[0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
    "done": [[0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0, 0]],
}
SEEN = [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]


def test_rows_and_episodes_are_those_of_the_environments_also_across_rollouts():
    _, (first, second) = collect_twice()
    observations = torch.cat([first.observations, second.observations])
    assert observations[:, 0].tolist() == SEEN
    assert observations[5, 1].tolist() == [0, 5]
    assert {name: joined([first, second], name) for name in EXPECTED} == EXPECTED
    assert first.episodes == [Episode(environment=0, episode_return=3.0, length=3, row=2)]
    assert second.episodes == [
        Episode(environment=1, episode_return=5.0, length=5, row=0),
        Episode(environment=0, episode_return=3.0, length=3, row=2),
    ]


@pytest.mark.parametrize("network", ["separate", "shared"])
def test_values_and_log_probs_are_the_policys(network: Any):
    collector, rollouts = collect_twice(network)
    policy = collector.policy
    with torch.no_grad():
        for rollout in rollouts:
            outputs, values = policy(rollout.observations)
            torch.testing.assert_close(rollout.values, values)
            torch.testing.assert_close(rollout.log_probs, policy.distribution.log_prob(outputs, rollout.actions))
        # The value after the last step is that of the state the next rollout begins in.
        torch.testing.assert_close(rollouts[0].next_values[-1, 1], rollouts[1].values[0, 1])
        # That of a truncated episode's end is the value of its last observation: 5 steps into episode 0.
        final = policy.value(policy.features(torch.tensor([0.0, 5.0])))
        torch.testing.assert_close(rollouts[1].next_values[0, 1], final)
