"""Collecting experience: the policy acts in the environments for some steps, and buffers keep what happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from fastsync.ppo.envs.make import Environments, Step
from fastsync.ppo.memory import MemoryState
from fastsync.ppo.policy import ActorCritic
from fastsync.ppo.random_streams import RandomStreams
from fastsync.ppo.runs.metrics import Episode


@dataclass(frozen=True)
class Rollout:
    """The outcome of T steps of N environments. All tensors lie on the policy's device; the next one overwrites them.

    Where episodes restart with a step of its own (gymnasium's AutoresetMode.NEXT_STEP), that step ignores the action,
    gives reward 0 and leads to the first observation of the new episode: its row is not valid.
    """

    observations: Tensor
    """[T, N, *observation_shape]: what the policy saw."""
    actions: Tensor
    """[T, N, *action_shape]: what it did."""
    log_probs: Tensor
    """[T, N]: log-probability of the actions."""
    values: Tensor
    """[T, N]: the critic's value of the observations."""
    next_values: Tensor
    """[T, N]: its value of the true next observations: where an episode ended, of that episode's last one."""
    rewards: Tensor
    """[T, N]."""
    terminated: Tensor
    """[T, N] bool: the step led to a terminal state, whose value is 0."""
    done: Tensor
    """[T, N] bool: the step ended the episode, by termination or truncation."""
    valid: Tensor
    """[T, N] bool: the row is a step of an episode, and not a restart."""
    starts: Tensor
    """[T, N] bool: the row is the first of an episode."""
    memory: MemoryState | None
    """What a recurrent policy remembered before the first row."""
    episodes: list[Episode]
    """The episodes that ended, in order."""
    environment_seconds: float
    """Time in the environments."""
    policy_seconds: float
    """Time in everything else."""


class RolloutCollector:
    """Steps the environments with the policy, whose weights may change between collections.

    All buffers are allocated here, once.
    """

    def __init__(
        self,
        environments: Environments,
        policy: ActorCritic,
        *,
        num_steps: int,
        streams: RandomStreams,
    ) -> None:
        self.environments = environments
        self.policy = policy
        self.num_steps = num_steps
        self.device = streams.device
        self._streams = streams
        num_envs = environments.num_envs
        distribution = policy.distribution
        space = environments.single_observation_space
        assert isinstance(space, spaces.Box)
        action_dtype = policy.dtype if distribution.dtype.is_floating_point else distribution.dtype

        def rows(*shape: int, dtype: torch.dtype = policy.dtype, num_rows: int = num_steps) -> Tensor:
            return torch.empty(num_rows, num_envs, *shape, dtype=dtype, device=self.device)

        self._observations = rows(*space.shape, dtype=policy.observation_dtype, num_rows=num_steps + 1)
        self._actions = rows(*distribution.shape, dtype=action_dtype)
        self._outputs = rows(distribution.num_outputs)
        self._values = rows(num_rows=num_steps + 1)
        self._rewards = np.empty((num_steps, num_envs))
        # Views of each row, made here once.
        self._observation_rows = self._observations.unbind()
        self._output_rows = self._outputs.unbind()
        self._action_rows = self._actions.unbind()
        flags = np.empty((4, num_steps, num_envs), dtype=np.bool_)
        self._flags = flags
        self._terminated, self._done, self._valid, self._starts = flags
        # What goes on from one rollout into the next.
        self._next_observation = environments.reset()
        self._next_starts = np.ones(num_envs, dtype=np.bool_)
        self._memory = policy.memory.initial_state(num_envs) if policy.memory else None

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Acts for T steps."""
        began = time.perf_counter()
        distribution = self.policy.distribution
        uniform = self._streams.uniform(self.num_steps, distribution.num_outputs, self.policy.dtype)
        noise_rows = distribution.noise(uniform).unbind()
        memory = self._memory
        episodes: list[Episode] = []
        finals: list[_Final] = []
        environment_seconds = 0.0
        for row in range(self.num_steps):
            actions = self._act(row, noise_rows[row])
            stepped = time.perf_counter()
            step = self.environments.step(actions)
            environment_seconds += time.perf_counter() - stepped
            self._record(row, step, episodes, finals)
        self._complete_values()
        terminated, done, valid, starts = torch.from_numpy(self._flags).to(self.device).unbind()
        return Rollout(
            observations=self._observations[:-1],
            actions=self._actions,
            log_probs=distribution.log_prob(self._outputs, self._actions),
            values=self._values[:-1],
            next_values=self._next_values(finals),
            rewards=torch.from_numpy(self._rewards).to(self.device, self.policy.dtype),
            terminated=terminated,
            done=done,
            valid=valid,
            starts=starts,
            memory=memory,
            episodes=episodes,
            environment_seconds=environment_seconds,
            policy_seconds=time.perf_counter() - began - environment_seconds,
        )

    def state(self) -> dict[str, Tensor]:
        """Returns what goes on into the next rollout besides the environments: one row an environment, on the CPU."""
        columns = {"starts": torch.from_numpy(self._next_starts.copy())}
        if self._memory is not None:
            columns["hidden"], columns["cell"] = (part.cpu() for part in self._memory)
        return columns

    def restore(self, observations: np.ndarray[Any, Any], columns: dict[str, Tensor]) -> None:
        """Goes on where ``state`` was taken, from what the restored environments show now."""
        self._next_observation = observations
        self._next_starts = columns["starts"].numpy().copy()
        if self._memory is not None:
            self._memory = (columns["hidden"].to(self.device), columns["cell"].to(self.device))

    def _act(self, row: int, noise: Tensor) -> np.ndarray[Any, Any]:
        """Looks, decides, remembers; returns the actions [N, *action_shape]."""
        self._observe(row)
        self._starts[row] = self._next_starts
        features, self._memory = self._features(self._observation_rows[row], self._memory, self._next_starts)
        outputs = self.policy.outputs(features)
        self._output_rows[row].copy_(outputs)
        if self.policy.is_shared:
            self._values[row] = self.policy.value(features)
        actions = self._action_rows[row].copy_(self.policy.distribution.sample(outputs, noise))
        return actions.cpu().numpy()

    def _observe(self, row: int) -> None:
        self._observation_rows[row].copy_(torch.from_numpy(self._next_observation))

    def _features(
        self, observations: Tensor, memory: MemoryState | None, starts: np.ndarray[Any, Any]
    ) -> tuple[Tensor, MemoryState | None]:
        if memory is None:
            return self.policy.features(observations)
        return self.policy.features_of_row(observations, memory, torch.from_numpy(starts).to(self.device))

    def _record(self, row: int, step: Step, episodes: list[Episode], finals: list[_Final]) -> None:
        done = step.terminated | step.truncated
        self._rewards[row], self._terminated[row], self._done[row] = step.rewards, step.terminated, done
        self._valid[row] = step.valid
        self._next_observation = step.observations
        self._next_starts = done if self.environments.same_step else ~step.valid
        first = self.environments.first_index
        episodes.extend(Episode(row, e.episode_return, e.length, first + e.index) for e in step.episodes)
        for index, observation in step.final_observations.items():
            if step.truncated[index] and not step.terminated[index]:
                memory = tuple(part[index] for part in self._memory) if self._memory is not None else ()
                finals.append(_Final(row, index, observation, memory))

    def _complete_values(self) -> None:
        """Fills in those of all rows at once where the actor does without them, else that of the last row."""
        self._observe(self.num_steps)
        if self.policy.is_shared:
            features, _ = self._features(self._observations[-1], self._memory, self._next_starts)
            self._values[-1] = self.policy.value(features)
        else:
            self._values.copy_(self.policy.value(self.policy.features(self._observations)[0]))

    def _next_values(self, finals: Sequence[_Final]) -> Tensor:
        next_values = self._values[1:]
        if not finals:
            return next_values
        observations = torch.from_numpy(np.stack([final.observation for final in finals]))
        memory = None
        if self._memory is not None:
            hidden, cell = zip(*(final.memory for final in finals), strict=True)
            memory = (torch.stack(hidden), torch.stack(cell))
        features, _ = self._features(
            observations.to(self.device, self._observations.dtype), memory, np.zeros(len(finals), dtype=np.bool_)
        )
        rows, environments = [final.row for final in finals], [final.index for final in finals]
        next_values = next_values.clone()
        next_values[rows, environments] = self.policy.value(features)
        return next_values


@dataclass(frozen=True)
class _Final:
    """The last observation of a truncated episode whose environment has gone on to the next already."""

    row: int
    index: int
    """Of the environment."""
    observation: np.ndarray[Any, Any]
    memory: tuple[Tensor, ...]
    """What the policy remembered of the episode, for this environment."""
