"""The rows of a rollout: where they are kept, and how they are cut into minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .envs.interface import Environments
from .policies import Policy
from .random_streams import RandomStreams


class Buffers:
    """Where a rollout of T steps of N environments is written to: made once."""

    def __init__(self, num_steps: int, environments: Environments, policy: Policy, device: torch.device) -> None:
        distribution, num_envs = policy.distribution, environments.num_envs
        shape = environments.single_observation_space.shape
        assert shape is not None

        def rows(number: int, *shape: int, dtype: torch.dtype = policy.dtype) -> Tensor:
            return torch.empty(number, num_envs, *shape, dtype=dtype, device=device)

        action_dtype = policy.dtype if distribution.dtype.is_floating_point else distribution.dtype
        # The last rows of observations and values are those that the next rollout begins with.
        self.observations = rows(num_steps + 1, *shape, dtype=policy.observation_dtype)
        self.actions = rows(num_steps, *distribution.shape, dtype=action_dtype)
        self.outputs = rows(num_steps, distribution.num_outputs)
        self.values = rows(num_steps + 1)
        self.rewards = np.empty((num_steps, num_envs))
        self._flags = np.empty((3, num_steps, num_envs), dtype=np.bool_)
        self.terminated, self.done, self.valid = self._flags
        # Views of each row, made here once.
        columns = (self.observations[:-1], self.outputs, self.actions, self.values[:-1])
        self.rows = list(zip(*(column.unbind() for column in columns), strict=True))

    def columns(self) -> dict[str, Any]:
        """The columns of a rollout [T, N, ...] that it is told as it is, on the device."""
        rewards = torch.from_numpy(self.rewards).to(self.values.device, self.values.dtype)
        flags = torch.from_numpy(self._flags).to(self.values.device).unbind()
        return {
            "observations": self.observations[:-1], "actions": self.actions, "values": self.values[:-1],
            "rewards": rewards, **dict(zip(("terminated", "done", "valid"), flags, strict=True)),
        }  # fmt: skip


def row_weights(valid: Tensor, num_valid: Tensor, *, world_size: int, num_minibatches: int) -> Tensor:
    """The weight of each row in the sum that is its minibatch's loss: the mean, but with one divisor everywhere.

    Every valid row of every rank weighs the same, whichever minibatch it falls into, so that ranks with more restarts
    do not count for more; a minibatch has on average ``num_valid / (world_size * num_minibatches)`` valid rows.
    """
    return valid * (world_size * num_minibatches / num_valid)


@dataclass(frozen=True)
class Batch:
    """B rows to learn from, in any order."""

    observations: Tensor  # [B, *observation_shape].
    actions: Tensor  # [B, *action_shape].
    log_probs: Tensor  # [B]: log-probability of the actions when they were taken.
    values: Tensor  # [B]: what the critic said then.
    advantages: Tensor  # [B]: normalised.
    returns: Tensor  # [B]: what the critic should have said.
    weights: Tensor
    """[B]: the share of a row in the mean over its minibatch, 0 for rows that are no step of an episode."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """A batch of changed columns."""
        return Batch(**{name: change(column) for name, column in vars(self).items()})


class Shuffler:
    """Cuts rollouts into minibatches in an order that is new each time.

    The rows of each environment are shuffled on their own, and each minibatch takes the same number of rows from each
    environment (where the number of minibatches divides that of steps). So each rank's part of a minibatch is as large
    as the others', and the whole is the same however environments are spread over ranks.

    Args:
        num_minibatches: how many of equal size.
        streams: random numbers of the environments, on the batches' device.
    """

    def __init__(self, num_minibatches: int, streams: RandomStreams) -> None:
        self._num_minibatches = num_minibatches
        self._streams = streams

    def minibatches(self, batch: Batch, num_epochs: int) -> Iterator[Batch]:
        """The minibatches of some passes over ``batch``, whose columns are [T, N, ...], one pass after the other."""
        rows = batch.map(lambda column: column.flatten(0, 1))
        if self._num_minibatches == 1:  # whose order is of no importance
            yield from [rows] * num_epochs
            return
        num_steps, num_envs = batch.log_probs.shape
        for order in self._row_orders(num_steps, num_envs, num_epochs):
            shuffled = rows.map(lambda column, at=order: column.index_select(0, at))  # type: ignore[misc]
            yield from self.cut(shuffled, self._num_minibatches)

    @staticmethod
    def cut(batch: Batch, num_parts: int) -> Iterator[Batch]:
        """Equal parts, as views."""
        columns = {name: column.chunk(num_parts) for name, column in vars(batch).items()}
        for part in range(num_parts):
            yield Batch(**{name: parts[part] for name, parts in columns.items()})

    def _row_orders(self, num_steps: int, num_envs: int, num_epochs: int) -> Sequence[Tensor]:
        """For each epoch indices [T * N] into rows that were [T, N], by random keys [T, N, num_epochs]."""
        steps = self._streams.bits(num_steps, num_epochs).argsort(dim=0, stable=True)
        environments = torch.arange(num_envs, device=steps.device).unsqueeze(1).expand_as(steps)
        if num_steps % self._num_minibatches:
            # A minibatch ends within a row of ``steps``: chance has to say for which environments.
            environments = self._streams.bits(num_steps, num_epochs).argsort(dim=1, stable=True)
            steps = steps.gather(1, environments)
        return (steps * num_envs + environments).flatten(0, 1).t().contiguous().unbind()
