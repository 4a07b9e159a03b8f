"""Random numbers for each environment, which do not depend on where it lives."""

from __future__ import annotations

import torch
from torch import Tensor


class RandomStreams:
    """A stream of random numbers for each of this rank's environments.

    A number follows from the seed, the environment's number among all ranks', and how often was drawn before: so it is
    the same however environments are spread over ranks and on whatever device, no rank draws for another, and one
    integer is all the state there is. torch's generators cannot be set to a place in their sequence on every device;
    these are counters through SplitMix64's mixing function (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        seed: of all streams.
        first_index: number of this rank's first environment.
        num_envs: N, environments of this rank.
        device: where the numbers are made.
    """

    def __init__(self, seed: int, *, first_index: int, num_envs: int, device: torch.device) -> None:
        self.device = device
        self.num_draws = 0
        """How often was drawn so far. May be set, to go on from there."""
        indices = torch.arange(first_index + 1, first_index + num_envs + 1, device=device)
        self._streams = _mix(_mix(torch.tensor(seed, device=device)) + _STEP * indices)

    def bits(self, num_rows: int, num_columns: int = 1) -> Tensor:
        """64 random bits each, [num_rows, N, num_columns] int64. All ranks have to draw the same shapes in turn."""
        self.num_draws += 1
        keys = _mix(self._streams + _signed(_STEP * self.num_draws))
        places = torch.arange(1, num_rows * num_columns + 1, device=self.device).view(num_rows, 1, num_columns)
        return _mix(keys.unsqueeze(1) + _STEP * places)

    def uniform(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Numbers between 0 and 1, without either, [num_rows, N, num_columns]: 23 random bits each, 52 in fp64."""
        num_bits = 52 if dtype == torch.float64 else 23
        return (_shifted(self.bits(num_rows, num_columns), 64 - num_bits).to(dtype) + 0.5) * 2.0**-num_bits


def _signed(bits: int) -> int:
    """The int64 of the lowest 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in _FACTORS:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
