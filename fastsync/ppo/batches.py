"""The rows of a rollout: memory for them, and what they may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .envs.interface import Array

EXTREME = 1e4
"""The largest magnitude in rows that do not count. Rows with larger ones are set to 0, because their products with a
weight of 0 must not overflow, even in 16 bits."""


def as_tensor(values: Array | Tensor) -> Tensor:
    """Returns a tensor in the same memory, whatever torch's default device is."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


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

    def write(self, row: int, array: Array | Tensor) -> Tensor:
        """Writes an array or a tensor into a row, and returns the row."""
        if self._array is None or isinstance(array, Tensor):
            self._rows[row].copy_(as_tensor(array))
        else:  # numpy is three times as fast
            self._array[row] = array
        return self._rows[row]


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


def check_rewards(rewards: Tensor, *, first_index: int) -> None:
    """Checks the rewards [T, N] of a rollout. Vectorised environments come without other checks.

    Args:
        rewards: of the rollout.
        first_index: number of the first environment.

    Raises:
        RuntimeError: one is not finite.
    """
    wrong = ~rewards.isfinite()
    if wrong.any():
        row, index = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"environment {first_index + index} has returned the reward {rewards[row, index]} in step {row + 1} of the "
            "rollout; it must be finite"
        )
