"""The rows of a rollout: buffers for them, and minibatches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .envs.interface import Array, Environments
from .policies import Policy
from .random_streams import RandomStreams

EXTREME = 1e4
"""The largest magnitude in rows that do not count. Rows with larger ones are set to 0, because their products with a
weight of 0 must not overflow, even in 16 bits."""


class Buffers:
    """Memory for a rollout of T steps of N environments, allocated once."""

    def __init__(self, num_steps: int, environments: Environments, policy: Policy, device: torch.device) -> None:
        distribution, num_envs = policy.distribution, environments.num_envs
        self._first_index = environments.first_index
        shape = environments.single_observation_space.shape
        assert shape is not None

        def rows(number: int, *shape: int, dtype: torch.dtype = policy.dtype) -> Tensor:
            return torch.empty(number, num_envs, *shape, dtype=dtype, device=device)

        action_dtype = policy.dtype if distribution.dtype.is_floating_point else distribution.dtype
        # The last row of observations and of values is the first of the next rollout.
        self.observations = rows(num_steps + 1, *shape, dtype=policy.observation_dtype)
        self.actions = rows(num_steps, *distribution.shape, dtype=action_dtype)
        self.outputs = rows(num_steps, distribution.num_outputs)
        self.values = rows(num_steps + 1)
        self.rewards = np.empty((num_steps, num_envs))
        self._flags = np.empty((3, num_steps, num_envs), dtype=np.bool_)
        self.terminated, self.done, self.valid = self._flags
        # Views of each row, made once.
        self.rows = list(zip(self.outputs.unbind(), self.values[:-1].unbind(), strict=True))
        self._observations, self._actions = self.observations.unbind(), self.actions.unbind()
        # Arrays in the same memory, on CPUs.
        self._arrays = (self.observations.numpy(), self.actions.numpy()) if device.type == "cpu" else None

    def observe(self, row: int, observations: Array) -> Tensor:
        """Keeps the observations [N, *observation_shape] before a step, and returns them on the device."""
        if self._arrays is None:
            self._observations[row].copy_(torch.from_numpy(observations))
        else:  # numpy is three times as fast
            self._arrays[0][row] = observations
        return self._observations[row]

    def act(self, row: int, actions: Tensor) -> Array:
        """Keeps the actions [N, *action_shape] of a step, and returns them as an array."""
        kept = self._actions[row].copy_(actions)
        array: Array = kept.cpu().numpy() if self._arrays is None else self._arrays[1][row]
        return array

    def blank_unused(self) -> None:
        """Writes zeros into rows that do not count if they hold nan, inf or extreme values.

        The value of a terminated episode's last observation is not needed. If a simulation has failed, the observation
        may have any values. But nan times a weight of 0 is nan, and the square of a large number overflows.

        Raises:
            RuntimeError: a truncated episode ends with such an observation, whose value is needed.
        """
        columns = [each for each in (self.observations, self.outputs, self.values) if each.is_floating_point()]
        extremes = torch.stack([extreme for column in columns for extreme in torch.aminmax(column)])
        if (extremes.abs() <= EXTREME).all():  # the usual case, in one pass; not with nan
            return
        terminated, done, valid = torch.from_numpy(self._flags).to(self.values.device).unbind()
        is_finite = self.observations[1:].isfinite().flatten(2).all(-1)  # [T, N]
        for index in (done & ~terminated & ~is_finite).any(0).nonzero()[:, 0].tolist():
            raise RuntimeError(
                f"environment {self._first_index + index} has truncated an episode whose last observation is not "
                "finite, and PPO needs its value, because such an episode would have gone on: return terminated=True "
                "where a simulation has failed, or a finite observation"
            )
        is_usual = (self.observations.abs() <= EXTREME).flatten(2).all(-1) & (self.values.abs() <= EXTREME)
        is_usual[:-1] &= (self.outputs.abs() <= EXTREME).all(-1)
        is_blank = ~is_usual & torch.cat([~valid[:1], terminated])  # [T + 1, N]
        self.observations[is_blank], self.values[is_blank] = 0, 0
        self.outputs[is_blank[:-1]], self.actions[is_blank[:-1]] = 0, 0

    def columns(self) -> dict[str, Any]:
        """Returns columns of ``ppo.Rollout`` [T, N, ...] by name, on the device."""
        rewards = torch.from_numpy(self.rewards).to(self.values.device, self.values.dtype)
        flags = torch.from_numpy(self._flags).to(self.values.device).unbind()
        return {
            "observations": self.observations[:-1], "actions": self.actions, "values": self.values[:-1],
            "rewards": rewards, **dict(zip(("terminated", "done", "valid"), flags, strict=True)),
        }  # fmt: skip


def row_weights(valid: Tensor, num_valid: Tensor, *, world_size: int, num_minibatches: int) -> Tensor:
    """Returns the weight of each row in its minibatch's loss, which is a sum of weighted rows.

    Weights are those of a mean over the average number of valid rows in a minibatch. So each valid row of each rank
    counts the same, even if a minibatch or a rank has more restarts than others. Without valid rows all are 0.
    """
    return valid * (world_size * num_minibatches / num_valid.clamp(min=1))


@dataclass(frozen=True)
class Batch:
    """B rows of rollouts, in any order."""

    observations: Tensor  # [B, *observation_shape].
    actions: Tensor  # [B, *action_shape].
    log_probs: Tensor  # [B]: log-probabilities of the actions in the rollout.
    values: Tensor  # [B]: values of the critic in the rollout.
    advantages: Tensor  # [B]: normalised, unless norm_advantages is off.
    returns: Tensor  # [B]: targets of the critic.
    weights: Tensor  # [B]: weight of each row in the mean over its minibatch; 0 for restarts, which are no steps.

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns a batch with a function applied to each column."""
        return Batch(**{name: change(column) for name, column in vars(self).items()})


class Shuffler:
    """Shuffles rollouts and cuts them into minibatches.

    The rows of each environment are shuffled separately. Each minibatch takes the same number of rows from each
    environment, if num_minibatches divides num_steps. So all ranks have equally many rows of a minibatch, and the whole
    minibatch does not depend on how environments are spread over ranks.

    Args:
        num_minibatches: number of minibatches per pass, of equal size.
        streams: random numbers of the environments, on the batches' device.
    """

    def __init__(self, num_minibatches: int, streams: RandomStreams) -> None:
        self._num_minibatches = num_minibatches
        self._streams = streams

    def minibatches(self, batch: Batch, num_epochs: int) -> Iterator[Batch]:
        """Yields the minibatches of each pass over ``batch``, whose columns are [T, N, ...]."""
        rows = batch.map(lambda column: column.flatten(0, 1))
        if self._num_minibatches == 1:  # the order of rows does not matter
            yield from [rows] * num_epochs
            return
        num_steps, num_envs = batch.log_probs.shape
        for order in self._row_orders(num_steps, num_envs, num_epochs):
            shuffled = rows.map(lambda column, at=order: column.index_select(0, at))  # type: ignore[misc]
            yield from self.cut(shuffled, self._num_minibatches)

    @staticmethod
    def cut(batch: Batch, num_parts: int) -> Iterator[Batch]:
        """Yields equal batches, as views."""
        if num_parts == 1:
            yield batch
            return
        columns = {name: column.chunk(num_parts) for name, column in vars(batch).items()}
        for part in range(num_parts):
            yield Batch(**{name: parts[part] for name, parts in columns.items()})

    def _row_orders(self, num_steps: int, num_envs: int, num_epochs: int) -> Sequence[Tensor]:
        """Returns for each epoch indices [T * N] into the flattened rows [T, N], by sorting random keys."""
        steps = self._streams.bits(num_steps, num_epochs).argsort(dim=0, stable=True)
        environments = torch.arange(num_envs, device=steps.device).unsqueeze(1).expand_as(steps)
        if num_steps % self._num_minibatches:
            # A minibatch ends within a row of ``steps``, so the environments have to be shuffled, too.
            environments = self._streams.bits(num_steps, num_epochs).argsort(dim=1, stable=True)
            steps = steps.gather(1, environments)
        return (steps * num_envs + environments).flatten(0, 1).t().contiguous().unbind()
