"""Random numbers for each environment, equal on all ranks and devices."""

from __future__ import annotations

import torch
from torch import Tensor


class RandomStreams:
    """A stream of random numbers for each of this rank's environments.

    A number depends on the seed, on the environment's number among those of all ranks, and on the number of earlier
    draws. So it does not depend on how environments are spread over ranks, and the whole state is one integer. torch's
    generators cannot do that on every device. The numbers are counters mixed by SplitMix64 (Steele, Lea and Flood,
    OOPSLA 2014).

    Args:
        seed: seed of all streams.
        first_index: number of this rank's first environment.
        num_envs: N, number of environments of this rank.
        device: device of the numbers.
    """

    def __init__(self, seed: int, *, first_index: int, num_envs: int, device: torch.device) -> None:
        self.device = device
        self.num_draws = 0
        """Number of draws so far. Set it to continue from there."""
        indices = torch.arange(first_index + 1, first_index + num_envs + 1, device=device)
        self._streams = _mix(_mix(torch.tensor(seed, device=device)) + _STEP * indices)

    def bits(self, num_rows: int, num_columns: int = 1) -> Tensor:
        """Draws 64 random bits each, [num_rows, N, num_columns] int64. All ranks must draw the same shapes in order."""
        self.num_draws += 1
        keys = _mix(self._streams + _signed(_STEP * self.num_draws))
        counters = torch.arange(1, num_rows * num_columns + 1, device=self.device).view(num_rows, 1, num_columns)
        return _mix(keys.unsqueeze(1) + _STEP * counters)

    def uniform(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Draws numbers in the open interval (0, 1), [num_rows, N, num_columns]: 23 random bits each, 52 in fp64."""
        num_bits = 52 if dtype == torch.float64 else 23
        return (_shifted(self.bits(num_rows, num_columns), 64 - num_bits).to(dtype) + 0.5) * 2.0**-num_bits


def _signed(bits: int) -> int:
    """Returns the lowest 64 bits as an int64."""
    return (bits + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in _FACTORS:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifts to the right, and fills with zeros."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
