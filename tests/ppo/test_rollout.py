"""What a rollout records of scripted environments: restarts, last observations of episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.envs.vector import EpisodeRecorder, RecordedEnvironments
from fastsync.ppo.policies import Policy, make_policy
from fastsync.ppo.ppo import Collector, Rollout, Settings
from fastsync.ppo.random_streams import RandomStreams

SETTINGS = Settings(hidden_sizes=(8, 8))


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


def environments_of(*scripts: Scripted, first_index: int = 0) -> RecordedEnvironments:
    makers = [
        lambda script=script, index=index: EpisodeRecorder(script, seed=0, index=index)
        for index, script in enumerate(scripts)
    ]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    return RecordedEnvironments(vector, first_index=first_index)


def streams_for(environments: RecordedEnvironments) -> RandomStreams:
    return RandomStreams(
        0, first_index=environments.first_index, num_envs=environments.num_envs, device=torch.device("cpu")
    )


def policy_for(environments: RecordedEnvironments, settings: Settings) -> Policy:
    torch.manual_seed(0)
    policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return policy


def collector_for(environments: RecordedEnvironments, policy: Policy, num_steps: int) -> Collector:
    settings = replace(SETTINGS, num_steps=num_steps, num_envs=environments.num_envs, num_minibatches=1)
    return Collector(settings, environments, policy, streams_for(environments))


def collect_twice(settings: Settings = SETTINGS) -> tuple[Collector, list[Rollout]]:
    """Two rollouts of four rows, from an environment that terminates after 3 steps and one truncated after 5."""
    environments = environments_of(Scripted(3, truncates=False), Scripted(5, truncates=True))
    collector = collector_for(environments, policy_for(environments, settings), 4)
    rollouts = []
    for _ in range(2):
        rollout = collector.collect()
        columns = {
            name: column.clone() for name, column in rollout._asdict().items() if isinstance(column, torch.Tensor)
        }
        rollouts.append(rollout._replace(**columns))
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
SEEN = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_rows_are_those_of_the_environments():
    _, rollouts = collect_twice()
    observations = torch.cat([rollout.observations for rollout in rollouts])
    assert [tuple(row) for row in observations[:, 0].tolist()] == SEEN
    assert tuple(observations[5, 1].tolist()) == (0, 5)
    assert {name: joined(rollouts, name) for name in EXPECTED} == EXPECTED


def test_episodes_are_told_with_row_return_and_length_also_across_rollouts():
    _, (first, second) = collect_twice()
    assert first.episodes == [Episode(environment=0, episode_return=3.0, length=3, row=2)]
    assert second.episodes == [
        Episode(environment=1, episode_return=5.0, length=5, row=0),
        Episode(environment=0, episode_return=3.0, length=3, row=2),
    ]


@pytest.mark.parametrize("network", ["separate", "shared"])
def test_values_and_log_probs_are_the_policys(network: Any):
    collector, rollouts = collect_twice(replace(SETTINGS, network=network))
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


def test_ranks_act_as_one_rank_with_all_environments_would():
    scripts = [(3, False), (4, True), (2, False), (7, True)]

    def collected(rank: int, world_size: int) -> Rollout:
        mine = np.array_split(np.arange(4), world_size)[rank]
        mine_scripts = [Scripted(scripts[i][0], truncates=scripts[i][1]) for i in mine]
        environments = environments_of(*mine_scripts, first_index=int(mine[0]))
        return collector_for(environments, policy_for(environments, SETTINGS), 16).collect()

    alone = collected(0, 1)
    together = [collected(rank, 2) for rank in range(2)]
    assert len(alone.actions.unique()) == 3
    for name in ("actions", "observations", "rewards", "done", "valid"):
        assert torch.equal(getattr(alone, name), torch.cat([getattr(part, name) for part in together], dim=1))
