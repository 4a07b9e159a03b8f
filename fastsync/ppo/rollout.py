"""Collecting experience: the policy acts in the environments for some steps, and buffers keep what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from fastsync.ppo.envs import space_sizes
from fastsync.ppo.policy import ActorCritic, log_prob


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    row: int
    """The row of the rollout in which it ended."""
    episode_return: float
    """Sum of its rewards."""
    length: int
    """Number of its steps."""


@dataclass(frozen=True)
class Rollout:
    """What T steps of N environments gave. All tensors lie on the policy's device; the next collection overwrites them.

    Episodes restart with an extra step (gymnasium's AutoresetMode.NEXT_STEP): if environment n is done at row t, its
    observation at row t + 1 is the final one of the old episode, and the step taken from there ignores the action,
    gives reward 0 and leads to the first observation of the new episode. ``valid[t + 1, n]`` is False for such a row.
    So ``values[t + 1]`` is at every valid row t the value of the true successor state, also when the episode ends at t.
    """

    observations: Tensor
    """[T, N, observation_size] float32: what the policy saw."""
    actions: Tensor
    """[T, N] int64: what it did."""
    log_probs: Tensor
    """[T, N] float32: log-probability of the actions."""
    values: Tensor
    """[T + 1, N] float32: the critic's value of the observations, and of those after the last step."""
    rewards: Tensor
    """[T, N] float32."""
    terminated: Tensor
    """[T, N] bool: the step led to a terminal state, whose value is 0."""
    done: Tensor
    """[T, N] bool: the step ended the episode, by termination or truncation."""
    valid: Tensor
    """[T, N] bool: the row is a step of an episode, and not a restart."""
    episodes: list[Episode]
    """The episodes that ended, in order."""


class RolloutCollector:
    """Steps the environments with the policy. All buffers are allocated here, once.

    Args:
        envs: NEXT_STEP vector environments with vector observations and discrete actions.
        policy: acts; its weights may change between collections.
        num_steps: T, the rows of a rollout.
        seed: seeds the environments. Environments that are copies of each other get seed, seed + 1, ...
        generator: source of the action noise, on the policy's device.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        policy: ActorCritic,
        *,
        num_steps: int,
        seed: int,
        generator: torch.Generator,
    ) -> None:
        self.envs = envs
        self.policy = policy
        self.num_steps = num_steps
        self.generator = generator
        self.device = generator.device
        rows = (num_steps, envs.num_envs)
        observation_size, num_actions = space_sizes(envs)
        self._observations = torch.empty(num_steps + 1, envs.num_envs, observation_size, device=self.device)
        self._actions = torch.empty(rows, dtype=torch.int64, device=self.device)
        self._noise = torch.empty(*rows, num_actions, device=self.device)
        self._rewards = np.empty(rows, dtype=np.float32)
        self._terminated = np.empty(rows, dtype=np.bool_)
        self._done = np.empty(rows, dtype=np.bool_)
        self._valid = np.empty(rows, dtype=np.bool_)
        # What the environments carry from one rollout into the next.
        self._next_observation = envs.reset(seed=seed)[0]
        self._restarting = np.zeros(envs.num_envs, dtype=np.bool_)
        self._episode_return = np.zeros(envs.num_envs, dtype=np.float64)
        self._episode_length = np.zeros(envs.num_envs, dtype=np.int64)

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Acts for T steps."""
        # argmax(logits + Gumbel noise) is a sample of the categorical distribution, without normalising it each step.
        self._noise.exponential_(generator=self.generator).log_().neg_()
        episodes: list[Episode] = []
        for row in range(self.num_steps):
            self._observations[row].copy_(torch.from_numpy(self._next_observation))
            logits = self.policy.logits(self._observations[row])
            torch.argmax(logits + self._noise[row], dim=-1, out=self._actions[row])
            self._step(row, self._actions[row].cpu().numpy(), episodes)
        self._observations[-1].copy_(torch.from_numpy(self._next_observation))
        observations = self._observations[:-1]
        return Rollout(
            observations=observations,
            actions=self._actions,
            log_probs=log_prob(self.policy.logits(observations), self._actions),
            values=self.policy.value(self._observations),
            rewards=self._to_device(self._rewards),
            terminated=self._to_device(self._terminated),
            done=self._to_device(self._done),
            valid=self._to_device(self._valid),
            episodes=episodes,
        )

    def _step(self, row: int, actions: np.ndarray[Any, Any], episodes: list[Episode]) -> None:
        self._next_observation, rewards, terminated, truncated, _ = self.envs.step(actions)
        done = terminated | truncated
        valid = ~self._restarting
        self._rewards[row], self._terminated[row], self._done[row], self._valid[row] = rewards, terminated, done, valid
        self._restarting = done
        self._episode_return += rewards
        self._episode_length += valid
        episodes.extend(
            Episode(row, float(self._episode_return[index]), int(self._episode_length[index]))
            for index in np.flatnonzero(done)
        )
        self._episode_return[done] = 0.0
        self._episode_length[done] = 0

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
