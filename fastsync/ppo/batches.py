"""The rows of a rollout: memory for them, and minibatches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .envs.interface import Array
from .random_streams import RandomStreams

EXTREME = 1e4
"""The largest magnitude in rows that do not count. Rows with larger ones are set to 0, because their products with a
weight of 0 must not overflow, even in 16 bits."""


class Rows:
    """A tensor [T, ...] that is written row by row, with views of its rows made once.

    Attributes:
        tensor: the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._rows = tensor.unbind()
        self._array = tensor.numpy() if tensor.device.type == "cpu" else None  # in the same memory

    def __getitem__(self, row: int) -> Tensor:
        return self._rows[row]

    def write(self, row: int, array: Array) -> Tensor:
        """Writes an array into a row, and returns the row."""
        if self._array is None:
            self._rows[row].copy_(torch.from_numpy(array))
        else:  # numpy is three times as fast
            self._array[row] = array
        return self._rows[row]

    def array(self, row: int) -> Array:
        """Returns a row as an array."""
        array: Array = self._rows[row].cpu().numpy() if self._array is None else self._array[row]
        return array


def blank_unused(
    observations: Tensor, values: Tensor, outputs: Tensor, actions: Tensor, *, terminated: Tensor, done: Tensor,
    valid: Tensor, first_index: int,
) -> None:  # fmt: skip
    """Writes zeros into rows of a rollout that do not count if they hold nan, inf or extreme values.

    The value of a terminated episode's last observation is not needed. If a simulation has failed, the observation
    may have any values. But nan times a weight of 0 is nan, and the square of a large number overflows.

    Args:
        observations, values: [T + 1, N, ...]; the last row follows the rollout.
        outputs, actions, terminated, done, valid: [T, N, ...].
        first_index: number of the first environment.

    Raises:
        RuntimeError: a truncated episode ends with such an observation, whose value is needed.
    """
    columns = [each for each in (observations, outputs, values) if each.is_floating_point()]
    extremes = torch.stack([extreme for column in columns for extreme in torch.aminmax(column)])
    if (extremes.abs() <= EXTREME).all():  # the usual case, in one pass; not with nan
        return
    is_finite = observations[1:].isfinite().flatten(2).all(-1)  # [T, N]
    for index in (done & ~terminated & ~is_finite).any(0).nonzero()[:, 0].tolist():
        raise RuntimeError(
            f"environment {first_index + index} has truncated an episode whose last observation is not "
            "finite, and PPO needs its value, because such an episode would have gone on: return terminated=True "
            "where a simulation has failed, or a finite observation"
        )
    is_usual = (observations.abs() <= EXTREME).flatten(2).all(-1) & (values.abs() <= EXTREME)
    is_usual[:-1] &= (outputs.abs() <= EXTREME).all(-1)
    is_blank = ~is_usual & torch.cat([~valid[:1], terminated])  # [T + 1, N]
    observations[is_blank], values[is_blank] = 0, 0
    outputs[is_blank[:-1]], actions[is_blank[:-1]] = 0, 0


def check_rewards(rewards: Array, *, first_index: int) -> None:
    """Checks the rewards [T, N] of a rollout. Vectorised environments come without other checks.

    Args:
        rewards: of the rollout.
        first_index: number of the first environment.

    Raises:
        RuntimeError: one is not finite.
    """
    wrong = ~np.isfinite(rewards)
    if wrong.any():
        row, index = np.argwhere(wrong)[0]
        raise RuntimeError(
            f"environment {first_index + index} has returned the reward {rewards[row, index]} in step {row + 1} of the "
            "rollout; it must be finite"
        )


@dataclass(frozen=True)
class Batch:
    """B rows of rollouts, in any order."""

    observations: Tensor  # [B, *observation_shape].
    actions: Tensor  # [B, *action_shape].
    log_probs: Tensor  # [B]: log-probabilities of the actions in the rollout.
    values: Tensor  # [B]: values of the critic in the rollout.
    advantages: Tensor  # [B]: normalised, unless norm_advantages is none.
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

    def minibatches(
        self, batch: Batch, num_epochs: int, normalize: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Iterator[Batch]:
        """Yields the minibatches of each pass over ``batch``, whose columns are [T, N, ...].

        Args:
            batch: the rollout.
            num_epochs: E, the number of passes.
            normalize: is called once, before the first minibatch, if there are M > 1 minibatches. It gets the
                advantages [E, M, B] of all of them, and whether each row is valid. It returns the advantages to use.
        """
        rows = batch.map(lambda column: column.flatten(0, 1))
        if self._num_minibatches == 1:  # the order of rows does not matter
            yield from [rows] * num_epochs
            return
        num_steps, num_envs = batch.log_probs.shape
        orders = self._row_orders(num_steps, num_envs, num_epochs)
        advantages = None
        if normalize is not None:
            at = torch.stack(list(orders)).unflatten(1, (self._num_minibatches, -1))
            advantages = normalize(rows.advantages[at], rows.weights[at] > 0).flatten(1)
        for epoch, order in enumerate(orders):
            shuffled = rows.map(lambda column, at=order: column.index_select(0, at))  # type: ignore[misc]
            if advantages is not None:
                shuffled = replace(shuffled, advantages=advantages[epoch])
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
